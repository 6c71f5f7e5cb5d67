"""Does a plan hold? Tokens per second at every batch size without speculation, with a fixed chain, and with the plan.

    sglang-patches spec plan --costs FOLDER --accept-length 2.69 --context 1024 --write plan.json
    python -m benchmark.spec_plan.run --plan plan.json --out benchmark/results/NAME/tokens.json

Serves one TP-8 rank's share of Kimi-K2.5 (61 layers, int4, random weights, routers drawn) with acceptance pinned
(upstream's SGLANG_SIMULATE_ACC_LEN), an engine for each arm and round. With several GPUs arms run at once and change
GPUs every round; so compare arms by rounds, not by GPUs. A pinned acceptance is the same for a chain of any length that
allows it, so give a plan of 3 steps or none (`--costs` of a folder with 4 and 1 draft tokens).

About 2 minutes an engine. Written after every engine; the same command goes on. Exit code: 0 all was measured, 1 an
engine failed, 2 it could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.spec_plan.engine import ARMS, Work, measure
from sglang_patches import provenance, selection
from sglang_patches.bench import shard
from sglang_patches.document import secrets

_LIMIT_S = 900
# Upstream's default commits one token id for all, so that requests would read the same experts.
_TOKEN_MODE = "real-draft-token"


def summary(engines: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """A row for each batch size: tokens per second by arm (median of all repeats), and their ratio to ``none``.

    Args:
        engines: what `engine.measure` wrote, with the ``round`` it was measured in.
        tokens: of each answer.

    Returns: rows with ``batch_size``, ``<arm>`` (tokens per second), ``<arm>_over_none`` (of the medians), and
        ``<arm>_least`` (the least ratio among rounds).
    """
    rows = []
    sizes = [batch["batch_size"] for batch in engines[0]["batches"]] if engines else []
    for at, size in enumerate(sizes):
        speeds: dict[str, dict[int, list[float]]] = {}
        for one in engines:
            batch = one["batches"][at]
            of_round = speeds.setdefault(one["arm"], {}).setdefault(one["round"], [])
            of_round += [size * tokens / seconds for seconds in batch["seconds"]]
        row: dict[str, Any] = {"batch_size": size}
        for arm, rounds in speeds.items():
            row[arm] = float(np.median(np.concatenate(list(rounds.values()))))
        for arm, rounds in speeds.items():
            both = [number for number in rounds if arm != "none" and number in speeds.get("none", {})]
            if both:
                ratios = [np.median(rounds[number]) / np.median(speeds["none"][number]) for number in both]
                row |= {f"{arm}_over_none": row[arm] / row["none"], f"{arm}_least": float(min(ratios))}
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of a Markdown table."""
    arms = [arm for arm in ARMS if any(arm in row for row in rows)]
    gains = [arm for arm in arms if any(f"{arm}_over_none" in row for row in rows)]
    head = ["batch", *(f"{arm}, tok/s" for arm in arms), *(f"{arm} / none (least round)" for arm in gains)]
    lines = [" | ".join(["", *head, ""]).strip(), "|" + "---|" * len(head)]
    for row in rows:
        cells = [str(row["batch_size"]), *(f"{row[arm]:.0f}" if arm in row else "-" for arm in arms)]
        for arm in gains:
            known = f"{arm}_over_none" in row
            cells.append(f"{row[f'{arm}_over_none']:.3f} ({row[f'{arm}_least']:.3f})" if known else "-")
        lines.append(" | ".join(["", *cells, ""]).strip())
    return lines


def jobs(arms: list[str], rounds: int, gpus: int, done: set[tuple[str, int]]) -> list[list[tuple[str, int, int]]]:
    """Arm, round and GPU of each engine, in groups that run at once: an arm has another GPU in the next round."""
    groups = []
    for number in range(rounds):
        order = arms if number % 2 == 0 else arms[::-1]
        left = [(arm, number, (arms.index(arm) + number) % gpus) for arm in order if (arm, number) not in done]
        while left:
            group: list[tuple[str, int, int]] = []
            for job in list(left):
                if job[2] not in {taken[2] for taken in group}:
                    group.append(job)
                    left.remove(job)
            groups.append(group)
    return groups


def main() -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the result")
    parser.add_argument("--plan", type=Path, help="what `spec plan --write` wrote; without it that arm is left out")
    parser.add_argument("--accept-length", type=float, default=2.69, help="pinned; default 2.69")
    parser.add_argument("--arms", default="", help=f"default: {','.join(ARMS)}, or those without a plan")
    parser.add_argument("--batch-sizes", default="1,2,4,8,16,32,64")
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=512, help="of each answer; few make its prefill weigh too much")
    parser.add_argument("--repeats", type=int, default=3, help="answers of each batch size and engine")
    parser.add_argument("--rounds", type=int, default=2, help="engines of each arm")
    parser.add_argument("--layers", type=int, default=shard.WHOLE)
    parser.add_argument("--weights", choices=shard.WEIGHTS, default="int4")
    parser.add_argument("--one", choices=ARMS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    work = Work(
        layers=given.layers, weights=given.weights, batch_sizes=[int(size) for size in given.batch_sizes.split(",")],
        context=given.context, tokens=given.tokens, repeats=given.repeats,
        plan=given.plan.resolve() if given.plan else None,
    )  # fmt: skip
    if given.one:
        measure(given.one, work, given.out)
        return 0
    arms = given.arms.split(",") if given.arms else [arm for arm in ARMS if arm != "plan" or given.plan]
    if not set(arms) <= set(ARMS) or ("plan" in arms and not (given.plan and given.plan.is_file())):
        parser.error(f"--arms {','.join(arms)}: of {', '.join(ARMS)}, and plan needs --plan with a file")
    if not selection.has_gpu():
        print("spec_plan: no GPU here\n  remedy     run it on a machine with one", file=sys.stderr)
        return 2
    given.out.parent.mkdir(parents=True, exist_ok=True)
    command = secrets.again(["python", "-m", "benchmark.spec_plan.run", *sys.argv[1:]], os.environ)
    asked = {**work.model_dump(mode="json", exclude={"plan"}), "accept_length": given.accept_length}
    asked["token_mode"] = _TOKEN_MODE
    asked["plan"] = json.loads(given.plan.read_text()) if given.plan else None
    result: dict[str, Any] = {"command": command, "work": asked, "code_state": provenance.code_state(), "engines": []}
    if given.out.exists():
        before = json.loads(given.out.read_text())
        if before["work"] != asked or before["code_state"]["id"] != result["code_state"]["id"]:
            parser.error(f"--out {given.out}: measured with other work or patches; name another file")
        result["engines"] = before["engines"]
    return _carry_out(given, result, arms)


def _carry_out(given: argparse.Namespace, result: dict[str, Any], arms: list[str]) -> int:
    import torch

    own = list(sys.argv[1:])
    done = {(one["arm"], one["round"]) for one in result["engines"]}
    groups, failed, begun = jobs(arms, given.rounds, torch.cuda.device_count(), done), False, time.monotonic()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(gpu) for gpu in range(torch.cuda.device_count())]
    for at, group in enumerate(groups):
        left = (time.monotonic() - begun) / at * (len(groups) - at) if at else None
        say = "" if left is None else f", {int(left) // 60}:{int(left) % 60:02d} left"
        print(f"spec_plan: round {group[0][1] + 1}: {', '.join(arm for arm, _, _ in group)}{say}", flush=True)
        running = []
        for arm, number, gpu in group:
            part = given.out.with_suffix(f".{arm}.part")
            environ = os.environ | {"CUDA_VISIBLE_DEVICES": names[gpu]}
            environ["SGLANG_SIMULATE_ACC_LEN"] = str(given.accept_length)
            environ["SGLANG_SIMULATE_ACC_TOKEN_MODE"] = _TOKEN_MODE
            # The last --out wins.
            words = [sys.executable, "-m", "benchmark.spec_plan.run", *own, "--out", str(part), "--one", arm]
            running.append((arm, number, gpu, part, subprocess.Popen(words, env=environ)))
        for arm, number, gpu, part, process in running:
            try:
                status = process.wait(_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
            if status or not part.exists():
                print(f"spec_plan: the engine of {arm} failed (status {status})", file=sys.stderr)
                failed = True
                continue
            result["engines"].append({"round": number, "gpu": gpu, **json.loads(part.read_text())})
            part.unlink()
        result["when"] = datetime.now(UTC).isoformat(timespec="seconds")
        result["summary"] = summary(result["engines"], given.tokens)
        given.out.write_text(json.dumps(result) + "\n")
        print("\n".join(table(result["summary"])), flush=True)
    return 1 if failed or not result["engines"] else 0


if __name__ == "__main__":
    sys.exit(main())
