"""What does speculation gain? Tokens per second at every batch size, without it, with a fixed chain, and with a plan.

    sglang-patches spec plan --costs FOLDER --accept-length 2.69 --context 1024 --write plan.json
    python -m benchmark.spec_plan.run --plan plan.json --out benchmark/results/NAME/tokens.json

Serves one TP-8 rank's share of Kimi-K2.5 (61 layers, int4, random weights, all drawn) with acceptance pinned, as
upstream's SGLANG_SIMULATE_ACC_LEN does, an engine for each arm and round: none, fixed and plan with the patches of
SGLANG_PATCHES, upstream-none and upstream-fixed without any, fixed:-NAME without one. Before that each answers a few
prompts with acceptance as it is; their tokens and logprobs are compared. A timed answer follows one of a single token
to the same prompts, and rates are of what comes after that token. With several GPUs arms run at once and change GPUs
every round; so compare arms by rounds, not by GPUs. With --together all engines are up at once and take turns, a timed
answer each, so that a slow minute is shared by all and one start does for many answers; the GPU must hold them all
(--layers). A pinned acceptance is the same for a chain of any length that allows it, so give a plan of 3 steps or none
(`--costs` of a folder with 4 and 1 draft tokens).

About 2 minutes an engine. Written after every engine; the same command goes on. Exit code: 0 all was measured, 1 an
engine failed, 2 it could not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmark.spec_plan import summary, tables
from benchmark.spec_plan.engine import AFTER_FIRST, ARMS, BASELINE, TOKEN_MODE, Turns, Work, measure, split
from sglang_patches import provenance, selection
from sglang_patches.bench import options, shard
from sglang_patches.bench.folder import replace
from sglang_patches.document import secrets
from sglang_patches.errors import PatchError

_LIMIT_S = 900
_DEFAULT_ARMS = ("none", "fixed", "plan")

Job = tuple[str, int, int]


@dataclass
class Running:
    """An engine's process, the file that it writes and the pipe on which it says that its turn is over."""

    job: Job
    part: Path
    process: subprocess.Popen[bytes]
    replies: int | None

    def go(self) -> None:
        """Give it a turn; the first one begins its start."""
        assert self.process.stdin is not None
        # One that is dead already is told of by its status.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(b"go\n")
            self.process.stdin.flush()

    def replied(self) -> bool:
        """Wait until its turn is over; False where it died, or takes so long that it is ended."""
        assert self.replies is not None
        ready, _, _ = select.select([self.replies], [], [], _LIMIT_S)
        if not ready:
            self.process.kill()
        return bool(ready) and bool(os.read(self.replies, 1))

    def failed(self) -> bool:
        """Wait until it ends, and say whether that was as it should be."""
        try:
            failed = self.process.wait(_LIMIT_S) != 0
        except subprocess.TimeoutExpired:
            self.process.kill()
            failed = self.process.wait() != 0
        if self.replies is not None:
            os.close(self.replies)
        return failed or not self.part.exists()


def jobs(
    arms: list[str], rounds: int, gpus: int, done: set[tuple[str, int]], *, together: bool = False
) -> list[list[Job]]:
    """Arm, round and GPU of each engine, in groups that are up at once: an arm has another GPU in the next round."""
    groups = []
    for number in range(rounds):
        order = arms if number % 2 == 0 else arms[::-1]
        left = [(arm, number, (arms.index(arm) + number) % gpus) for arm in order if (arm, number) not in done]
        while left:
            group: list[Job] = []
            for job in list(left):
                if job[2] not in {taken[2] for taken in group}:
                    group.append(job)
                    left.remove(job)
            groups.append(group)
    everything = [job for group in groups for job in group]
    return [everything] if together and everything else groups


def environment(arm: str, gpu: str | None) -> dict[str, str]:
    """Variables of an arm's engine; `gpu` is its number or UUID, None on a CPU."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if gpu is None:
        from sglang_patches.serve import cpu_environment

        environ = {**cpu_environment(), **environ}
    else:
        environ["CUDA_VISIBLE_DEVICES"] = gpu
    patches = split(arm)[1]
    if patches is not None:
        environ[selection.VARIABLE] = patches
    return environ


def add_served(parser: argparse.ArgumentParser, *, layers: int, weights: str) -> None:
    """Options that say what is served: a share of so many layers by default, or a pair."""
    parser.add_argument("--layers", type=int, default=layers, help=f"of the share's {shard.WHOLE}; default {layers}")
    parser.add_argument("--weights", choices=shard.WEIGHTS, default=weights, help=f"of its experts; default {weights}")
    parser.add_argument("--model", type=Path, help="serve this target and not the share; with --draft, on a CPU too")
    parser.add_argument("--draft", type=Path, help="its draft")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the result")
    parser.add_argument("--plan", type=Path, help="what `spec plan --write` wrote; without it that arm is left out")
    parser.add_argument("--accept-lengths", default="2.69,3.2", help="pinned, one after the other; default 2.69,3.2")
    what = f"of {', '.join(ARMS)}; fixed:-NAME:-NAME: without these patches; default {','.join(_DEFAULT_ARMS)}"
    parser.add_argument("--arms", default="", help=what)
    parser.add_argument("--over", default="", help="the arm that others are compared to; default none, or the first")
    parser.add_argument("--together", action="store_true", help="all engines are up at once and take turns")
    parser.add_argument("--batch-sizes", default="1,2,4,8,16,32,64")
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens; default 1024")
    parser.add_argument("--tokens", type=int, default=512, help="of each answer, the first not timed; default 512")
    parser.add_argument("--repeats", type=int, default=1, help="answers of each batch size, accept length and engine")
    parser.add_argument("--rounds", type=int, default=2, help="engines of each arm; default 2")
    parser.add_argument("--answers", type=int, default=8, help="prompts of which answers are compared; default 8")
    add_served(parser, layers=shard.WHOLE, weights="int4")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--reply", type=int, help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Run it; returns the exit status."""
    parser = _parser()
    given = parser.parse_args()
    work = Work(
        layers=given.layers, weights=given.weights, model=given.model, draft=given.draft, context=given.context,
        batch_sizes=[int(size) for size in given.batch_sizes.split(",")], tokens=given.tokens, repeats=given.repeats,
        accept_lengths=[float(length) for length in given.accept_lengths.split(",")], answers=given.answers,
        plan=given.plan.resolve() if given.plan else None, together=given.together,
    )  # fmt: skip
    cuda = selection.has_gpu()
    if given.one:
        measure(given.one, work, given.out, cuda, Turns(given.reply))
        return 0
    arms = given.arms.split(",") if given.arms else [arm for arm in _DEFAULT_ARMS if arm != "plan" or given.plan]
    try:
        planned = [arm for arm in arms if split(arm)[0].planned]
        for arm in arms:
            selection.select(options.installed_series(), split(arm)[1])
    except (PatchError, ValueError) as error:
        parser.error(f"--arms: {error}")
    if planned and not (given.plan and given.plan.is_file()):
        parser.error(f"--arms {','.join(planned)}: needs --plan with a file that `spec plan --write` wrote")
    over = given.over or (BASELINE if BASELINE in arms else arms[0])
    if over not in arms:
        parser.error(f"--over {over}: not among the arms {', '.join(arms)}")
    if given.tokens < 2:
        parser.error(f"--tokens {given.tokens}: at least 2, since what follows the first is timed")
    if bool(given.model) != bool(given.draft):
        parser.error("--model and --draft: give both, or neither")
    if not cuda and not given.model:
        remedy = "run it on a machine with one, or give --model and --draft"
        print(f"spec_plan: no GPU here\n  remedy     {remedy}", file=sys.stderr)
        return 2
    given.out.parent.mkdir(parents=True, exist_ok=True)
    asked = {**work.model_dump(mode="json", exclude={"plan", "model", "draft"}), "token_mode": TOKEN_MODE}
    asked["pair"] = [given.model.name, given.draft.name] if given.model else None
    asked["plan"] = json.loads(given.plan.read_text()) if given.plan else None
    command = secrets.again(["python", "-m", "benchmark.spec_plan.run", *sys.argv[1:]], os.environ)
    result: dict[str, Any] = {"command": command, "work": asked, "over": over}
    result |= {"code_state": provenance.code_state(), "engines": []}
    if given.out.exists():
        before = json.loads(given.out.read_text())
        if before["work"] != asked or before["code_state"]["id"] != result["code_state"]["id"]:
            parser.error(f"--out {given.out}: measured with other work or patches; name another file")
        if summary.timed(before["engines"]) != AFTER_FIRST:
            parser.error(f"--out {given.out}: has no `first_seconds`, being of an earlier version; name another file")
        result |= {name: before[name] for name in ("engines", "when") if name in before}
    return _carry_out(given, result, arms, _gpus() if cuda else [None])


def _gpus() -> list[str | None]:
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [*visible.split(",")] if visible else [str(gpu) for gpu in range(torch.cuda.device_count())]


def _carry_out(given: argparse.Namespace, result: dict[str, Any], arms: list[str], gpus: list[str | None]) -> int:
    done = {(one["arm"], one["round"]) for one in result["engines"]}
    groups = jobs(arms, given.rounds, len(gpus), done, together=given.together)
    failed, begun = False, time.monotonic()
    ahead: list[Running] = []
    running: list[Running] = []
    try:
        for at, group in enumerate(groups):
            left = (time.monotonic() - begun) / at * (len(groups) - at) if at else None
            say = "" if left is None else f", {int(left) // 60}:{int(left) % 60:02d} left"
            print(f"spec_plan: round {group[0][1] + 1}: {', '.join(arm for arm, _, _ in group)}{say}", flush=True)
            running, ahead = ahead or [_begin(job, given, gpus) for job in group], []
            for engine in running:
                engine.go()
            # These import upstream while the engines start.
            ahead = [_begin(job, given, gpus) for job in groups[at + 1]] if at + 1 < len(groups) else []
            if given.together:
                _take_turns(running, [*given.batch_sizes.split(",")], given.repeats)
            for engine in running:
                arm, number, gpu = engine.job
                if engine.failed():
                    status = engine.process.returncode
                    print(f"spec_plan: the engine of {arm} failed (status {status})", file=sys.stderr)
                    failed = True
                    continue
                result["engines"].append({"round": number, "gpu": gpu, **json.loads(engine.part.read_text())})
                # Here, so that a run in which all engines fail leaves the time of what is there.
                result["when"] = datetime.now(UTC).isoformat(timespec="seconds")
                engine.part.unlink()
            _write(given.out, result, given.tokens)
    finally:
        for engine in [*running, *ahead]:
            if engine.process.poll() is None:
                engine.process.kill()
                engine.process.wait()
    return 1 if failed or not result["engines"] else 0


def _take_turns(running: list[Running], sizes: list[str], repeats: int) -> None:
    """Every engine answers once, then once more in the opposite order; the first time is warm-up.

    Engines of one round are neighbours in the order, so what a slow minute does to one it does to the other.
    """
    alive = [engine for engine in running if engine.replied()]
    if alive:
        print(f"spec_plan: {len(alive)} of {len(running)} engines are up", flush=True)
    for size in sizes:
        for repeat in range(repeats + 1):
            for engine in alive if repeat % 2 else alive[::-1]:
                engine.go()
                if not engine.replied():
                    alive = [one for one in alive if one is not engine]
        print(f"spec_plan: batch {size}: {repeats} answers of {len(alive)} engines", flush=True)


def _begin(job: Job, given: argparse.Namespace, gpus: list[str | None]) -> Running:
    arm, number, gpu = job
    part = given.out.with_suffix(f".{arm.replace(':', '')}.{number}.part")
    part.unlink(missing_ok=True)
    # The last --out wins.
    words = [sys.executable, "-m", "benchmark.spec_plan.run", *sys.argv[1:], "--out", str(part), "--one", arm]
    replies, reply = os.pipe() if given.together else (None, None)
    if reply is not None:
        words += ["--reply", str(reply)]
    passed = () if reply is None else (reply,)
    process = subprocess.Popen(words, env=environment(arm, gpus[gpu]), stdin=subprocess.PIPE, pass_fds=passed)
    if reply is not None:
        # So that its death closes the pipe.
        os.close(reply)
    return Running(job, part, process, replies)


def _write(out: Path, result: dict[str, Any], tokens: int) -> None:
    result |= summary.of(result["engines"], tokens, result["over"])
    replace(out, json.dumps(result) + "\n")
    print("\n".join(tables.lines(result, differences=False)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
