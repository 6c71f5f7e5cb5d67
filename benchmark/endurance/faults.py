"""Faults: what a server does when its processes, its disk or its clock fail, each a named scenario.

    python -m benchmark.endurance.faults --out benchmark/results/NAME           # a CPU, 5 to 15 minutes
    python -m benchmark.endurance.faults --out /tmp/f --only scheduler-killed --only clock-jump
    python -m benchmark.endurance.faults --list

disk-full mounts two small file systems below /tmp, which root may; clock-jump needs a C compiler. A scenario that this
machine cannot do is told as not run. The folder gets the servers' logs and `faults.json`, written again after each
scenario.

Exit code: 0 all that ran went as expected, 1 one did not, 2 it could not run.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmark.endurance.scenarios import SCENARIOS, NotRun, Stage, Unexpected
from benchmark.endurance.servers import write
from sglang_patches.errors import PatchError


def row(stage: Stage, name: str) -> dict[str, Any]:
    """Do one scenario; what came of it. A server that it left in an unknown state is ended."""
    expected, harm = SCENARIOS[name]
    begun = time.monotonic()
    try:
        facts, outcome, detail = harm(stage), "as expected", ""
    except NotRun as error:
        facts, outcome, detail = {}, "not run", str(error)
    except (Unexpected, PatchError, httpx.HTTPError, OSError, TimeoutError, psutil.Error) as error:
        facts, outcome, detail = {}, "not as expected", f"{type(error).__name__}: {error}"[:2000]
        stage.stop()
    return {"scenario": name, "expected": expected, "outcome": outcome, "detail": detail,
            "seconds": round(time.monotonic() - begun, 1), "facts": facts}  # fmt: skip


def main() -> int:
    """Run it; returns the exit status, see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for faults.json and the servers' logs")
    parser.add_argument("--only", action="append", choices=tuple(SCENARIOS), help="one of them; may be repeated")
    parser.add_argument("--list", action="store_true", help="name the scenarios and what must come of them, and end")
    given = parser.parse_args()
    if given.list:
        print("\n".join(f"{name:20} {expected}" for name, (expected, _) in SCENARIOS.items()))
        return 0
    if given.out is None:
        parser.error("--out is missing: the folder for faults.json")
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # unwinds: servers, mounts
    names = [name for name in SCENARIOS if name in (given.only or SCENARIOS)]
    told: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["python", "-m", "benchmark.endurance.faults", *sys.argv[1:]],
        "finished": False,
        "scenarios": [],
    }
    with tempfile.TemporaryDirectory(prefix="cache", dir="/tmp") as folder:

        def say(line: str) -> None:
            print(f"  {line}", file=sys.stderr, flush=True)

        try:
            given.out.mkdir(parents=True, exist_ok=True)
            stage = Stage(given.out, Path(folder, "cache"), say)
            _run(stage, names, told)
        except (PatchError, Unexpected, httpx.HTTPError, OSError) as error:
            print(f"faults: {error}", file=sys.stderr)
            return 2
    bad = [one["scenario"] for one in told["scenarios"] if one["outcome"] == "not as expected"]
    print(f"{given.out / 'faults.json'}: {len(names)} scenarios, {', '.join(bad) or 'none'} not as expected")
    return 1 if bad else 0


def _run(stage: Stage, names: list[str], told: dict[str, Any]) -> None:
    out = stage.folder / "faults.json"
    try:
        begun = time.monotonic()
        for at, name in enumerate(names, 1):
            print(f"{at}/{len(names)} {name}: {SCENARIOS[name][0]}", file=sys.stderr, flush=True)
            found = row(stage, name)
            told["scenarios"].append(found)
            told["provenance"] = stage.provenance
            left = (time.monotonic() - begun) / at * (len(names) - at)
            stage.say(f"{found['outcome']} {found['detail']}{found['facts'] or ''}; {left:.0f} s left")
            good = sum(one["outcome"] == "as expected" for one in told["scenarios"])
            told["headline"] = f"{good} of {len(names)} scenarios as expected"
            write(out, told)
        # The last scenario's restart is a start, too.
        told["restarts_that_served"] = stage.starts - 1 if stage.server else 0
        told["finished"] = True
    finally:
        stage.stop()
        write(out, told)


if __name__ == "__main__":
    sys.exit(main())
