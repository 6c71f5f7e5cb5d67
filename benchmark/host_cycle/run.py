"""What does the host do in a decode step or an EAGLE-3 cycle?

    python -m benchmark.host_cycle.run --out DIR                                 # 12 layers of a share, bf16, on a GPU
    python -m benchmark.host_cycle.run --out DIR --model M --draft D --arm none  # a pair of your own, also on a CPU

Serves a rank's share of Kimi-K2.5 (or a pair), measures milliseconds a target pass at batch 1, then lets py-spy sample
the scheduler's stacks while a long answer is made, and measures again. Where the host is the slower one it never waits
for the GPU, and the table says what it does instead. py-spy stops the process for each sample, so a pass takes longer
meanwhile; only shares are taken from the samples.

Needs py-spy (`pip install py-spy`), and the right to trace a child process. About 2 minutes. Written: host.json,
table.md and stacks.txt.xz. Exit code: 0 measured, 2 it could not.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from benchmark.host_cycle import stacks
from benchmark.spec_plan.engine import ARMS, Served, Work
from benchmark.spec_plan.run import add_served, environment
from sglang_patches import provenance, selection
from sglang_patches.bench import shard
from sglang_patches.document import secrets

_SHORT = 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the result")
    arms = [name for name, arm in ARMS.items() if not arm.planned]
    parser.add_argument("--arm", choices=arms, default="fixed", help="default fixed: EAGLE-3, 3 steps")
    parser.add_argument("--seconds", type=int, default=8, help="of sampling; default 8")
    parser.add_argument("--rate", type=int, default=500, help="samples a second; default 500")
    parser.add_argument("--tokens", type=int, default=1000, help="of the timed answers; default 1000")
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens; default 1024")
    add_served(parser, layers=shard.LAYERS, weights="bf16")
    return parser


def spy() -> str | None:
    """The program py-spy, also where its environment is not activated; None where it is not installed."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


def main() -> int:
    """Run it; returns the exit status."""
    parser = _parser()
    given = parser.parse_args()
    if bool(given.model) != bool(given.draft):
        parser.error("--model and --draft: give both, or neither")
    cuda = selection.has_gpu()
    if not cuda and not given.model:
        return _cannot("no GPU here", "run it on a machine with one, or give --model and --draft")
    sampler = spy()
    if sampler is None:
        return _cannot("py-spy is not installed", "pip install py-spy")
    # The engine's processes inherit it.
    os.environ.update(environment(given.arm, os.environ.get("CUDA_VISIBLE_DEVICES", "0") if cuda else None))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    work = Work(
        layers=given.layers, weights=given.weights, model=given.model, draft=given.draft, context=given.context,
        batch_sizes=[1], tokens=given.tokens, repeats=1, accept_lengths=[], answers=1, plan=None,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        print("host_cycle: starting the server", flush=True)
        served = Served(given.arm, work, Path(scratch), cuda)
        try:
            told = _measure(served, given, sampler)
        except (RuntimeError, ValueError) as error:
            return _cannot(str(error), "as root, or with the capability SYS_PTRACE, py-spy may trace it")
        finally:
            served.engine.shutdown()
        lines, result = told
    command = secrets.again(["python", "-m", "benchmark.host_cycle.run", *sys.argv[1:]], os.environ)
    result = {"command": command, "headline": stacks.headline(result), "arm": given.arm, **result}
    result |= {"arguments": " ".join(served.chosen.shown(served.steps)), "code_state": provenance.code_state()}
    result["when"] = datetime.now(UTC).isoformat(timespec="seconds")
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "stacks.txt.xz").write_bytes(lzma.compress("\n".join(lines).encode()))
    (given.out / "host.json").write_text(json.dumps(result, indent=1) + "\n")
    table = stacks.table(result)
    (given.out / "table.md").write_text("\n".join(table) + "\n")
    print("\n".join(table[:9]))
    print(f"{given.out}: host.json, table.md, stacks.txt.xz")
    return 0


def _cannot(seen: str, remedy: str) -> int:
    print(f"host_cycle: {seen}\n  remedy     {remedy}", file=sys.stderr)
    return 2


def _measure(served: Served, given: argparse.Namespace, sampler: str) -> tuple[list[str], dict[str, Any]]:
    """Raises RuntimeError where py-spy fails."""
    served.generate(1, given.tokens)  # compiles what is compiled late
    before = _pass_ms(served, given.tokens)
    scheduler = next(
        child.pid for child in psutil.Process().children(recursive=True) if "sglang::scheduler" in _title(child)
    )
    done = threading.Event()

    def keep_busy() -> None:
        while not done.is_set():
            served.generate(1, given.tokens)

    busy = threading.Thread(target=keep_busy)
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        words = [sampler, "record", "--pid", str(scheduler), "--duration", str(given.seconds)]
        words += ["--rate", str(given.rate), *stacks.OPTIONS, "--output", file.name]
        busy.start()
        try:
            print(f"host_cycle: {before:.2f} ms a pass; sampling for {given.seconds} s", flush=True)
            ran = subprocess.run(words, capture_output=True, text=True, check=False)
        finally:
            done.set()
            busy.join()
        if ran.returncode:
            raise RuntimeError(f"py-spy ended with {ran.returncode}: {ran.stderr.strip()[-300:]}")
        found = stacks.read(Path(file.name).read_text().splitlines())
    after = _pass_ms(served, given.tokens)
    return stacks.shorter(found), {**stacks.summary(found, before), "pass_ms_after": after}


def _pass_ms(served: Served, tokens: int) -> float:
    """Milliseconds of a target pass: of a long answer less a short one, which has the same prefill."""
    short, few = served.generate(1, _SHORT)
    long, many = served.generate(1, tokens)
    return 1e3 * (long - short) / (many - few)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it ended meanwhile
        return ""


if __name__ == "__main__":
    sys.exit(main())
