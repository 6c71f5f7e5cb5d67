"""Shares token counts out to the GPUs, keeps their processes running, and makes tables of what they measured."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from sglang_patches import upstream
from sglang_patches.errors import PatchError
from sglang_patches.tune.moe import choose, journal, tables
from sglang_patches.tune.moe.geometry import GEMMS, Gemm, Geometry
from sglang_patches.tune.moe.journal import Known, Record
from sglang_patches.tune.moe.space import parse
from sglang_patches.tune.moe.tables import Row, Table

_RESTART = 3  # `worker.RESTART`; that module imports torch
_RESTARTS = 5
_GRACE = 10.0  # seconds
_KERNEL = "sglang/kernels/ops/moe/fused_moe_triton_kernels.py"


@dataclass(frozen=True)
class Request:
    """What to tune. `gpus`: as ``CUDA_VISIBLE_DEVICES`` names them; empty: the CPU, to try the command."""

    geometry: Geometry
    tokens: tuple[int, ...]
    out: Path
    gpus: tuple[str, ...]
    seconds: float = 240
    seed: int = 1
    layers: int = 4
    candidates: int = 0


@dataclass(frozen=True, order=True)
class Rate:
    """Bytes a second that memory was seen to move, and what moved them."""

    bytes_a_second: float
    of: str


@dataclass(frozen=True)
class Line:
    """One token count of the result.

    Attributes:
        chosen: what the table has; upstream's own where ours is not faster beyond chance.
        candidate: the fastest pair by single products; None if nothing was measured.
        verdict: of the whole layer, None where the candidate is upstream's own or was not reached.
        floor_us: of the weights of the experts that are expected to be active, at `Result.rate`.
    """

    tokens: int
    upstream: Row
    chosen: Row
    candidate: choose.Pair | None
    verdict: choose.Verdict | None
    floor_us: float
    differs: float | None

    @property
    def floor_holds(self) -> bool:
        """Whether the whole layer took no less than `floor_us`, with upstream's choice and with ours."""
        return self.verdict is None or min(self.verdict.upstream, self.verdict.tuned) >= self.floor_us


@dataclass
class Result:
    """All of it. `tables` is empty where ours wins nowhere: then upstream should go without a file.

    Attributes:
        rate: the fastest that this run saw memory move; what `Line.floor_us` is reckoned by.
    """

    request: Request
    facts: Record
    rate: Rate
    lines: list[Line] = field(default_factory=list)
    tables: dict[Gemm, Table] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    @property
    def broken_floors(self) -> list[int]:
        """Token counts at which less than the floor was measured, so that it is none."""
        return [line.tokens for line in self.lines if not line.floor_holds]

    @property
    def better(self) -> list[Line]:
        """The token counts at which ours goes into the table."""
        return [line for line in self.lines if line.chosen != line.upstream]


def shares(tokens: Sequence[int], gpus: int) -> list[tuple[int, ...]]:
    """Neighbouring token counts for each GPU, as evenly as they go; no GPU more than there are counts."""
    count = min(gpus, len(tokens))
    ends = [round(len(tokens) * place / count) for place in range(count + 1)]
    return [tuple(tokens[begin:end]) for begin, end in itertools.pairwise(ends)]


def visible() -> tuple[str, ...]:
    """The GPUs of this process, without touching them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(part.strip() for part in named.split(",") if part.strip())
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return tuple(str(number) for number in range(pynvml.nvmlDeviceGetCount()))
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no module, no driver, no GPU: all mean that there is none
        return ()


def measure(request: Request) -> None:
    """Run a process a GPU until all have measured, and start those anew that a kernel took down.

    Raises:
        PatchError: a process failed otherwise, or the folder holds another plan, or samples of another device, Triton
            or upstream release. What was measured is kept.
    """
    installed = upstream.locate()
    if installed is None or installed.read(_KERNEL) is None:
        told = f"sglang {installed.release} lacks {_KERNEL}" if installed else "SGLang is not installed here"
        raise PatchError(f"{told}\n  expected   the newest lane's release, whose kernel this calls")
    request.out.mkdir(parents=True, exist_ok=True)
    parts = shares(request.tokens, max(len(request.gpus), 1))
    stray = {file.name for file in journal.files(request.out)} - {
        _file(request, place).name for place in range(len(parts))
    }
    if stray:
        raise PatchError(
            f"{request.out}: {', '.join(sorted(stray))} of a run on other GPUs\n"
            "  remedy     as many --gpus as then, another --out, or remove those files"
        )
    running = {place: _start(request, place, part) for place, part in enumerate(parts)}
    tries = dict.fromkeys(running, 0)
    try:
        while running:
            for place, process in list(running.items()):
                try:
                    code = process.wait(timeout=0.5)
                except subprocess.TimeoutExpired:
                    continue
                del running[place]
                if code == 0:
                    continue
                tries[place] += 1
                if (code != _RESTART and code >= 0) or tries[place] > _RESTARTS:
                    raise PatchError(
                        f"{_label(request, place)}the measuring process ended with code {code}; what it said is above\n"
                        f"  remedy     mend that; the same command then goes on, with what {request.out} holds"
                    )
                running[place] = _start(request, place, parts[place])
    except KeyboardInterrupt:  # which they got too: each ends by itself, and says so in its samples
        for process in running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_GRACE)
        raise
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def _file(request: Request, place: int) -> Path:
    return request.out / ("samples.jsonl" if len(request.gpus) < 2 else f"samples-{place}.jsonl")


def _label(request: Request, place: int) -> str:
    return f"GPU {request.gpus[place]}: " if len(request.gpus) > 1 else ""


def _start(request: Request, place: int, tokens: tuple[int, ...]) -> subprocess.Popen[bytes]:
    plan = {
        "geometry": request.geometry.document(), "tokens": tokens, "layers": request.layers, "seed": request.seed,
        "seconds": request.seconds, "candidates": request.candidates,
    }  # fmt: skip
    # Upstream as it is: a patch that answers the lookup would be measured against itself.
    environment = {**os.environ, "SGLANG_PATCHES": "none"}
    # As a CPU server, upstream asks for a CPU build of sgl_kernel, which a patch brings and `none` leaves out.
    for name in ("SGLANG_MOE_CONFIG_DIR", "SGLANG_USE_CPU_ENGINE"):
        environment.pop(name, None)
    if request.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = request.gpus[place]
    else:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    arguments = [json.dumps(plan), str(_file(request, place)), _label(request, place)]
    return subprocess.Popen([sys.executable, "-P", "-m", "sglang_patches.tune.moe.worker", *arguments], env=environment)


def result(request: Request) -> Result:
    """From the samples in the folder: what each token count takes, and the tables.

    Raises:
        PatchError: nothing whole was measured, or not all on one device, Triton and upstream release.
    """
    parts = [Known(journal.read(file)) for file in journal.files(request.out)]
    parts = [known for known in parts if known.facts]
    if not parts:
        raise PatchError(f"{request.out}: no samples of `tune moe`\n  remedy     run it, or name its folder")
    journal.check_place(request.out)
    names = sorted({known.facts["names"]["gate_up"] for known in parts})
    if len(names) != 1:
        raise PatchError(
            f"{request.out}: samples for {len(names)} tables: {', '.join(names)}\n  remedy     an --out for each"
        )
    made = Result(request, parts[-1].facts, max(rate(request.geometry, known) for known in parts))
    changed = sum(len(known.layer) for known in parts)
    for known in parts:
        made.lines += _lines(request.geometry, known, changed, made.rate)
        made.failed += [f"{gemm} {config}: {why}" for (gemm, _, config), why in known.failed.items()]
    made.lines.sort(key=lambda line: line.tokens)
    if made.better:
        # Those of the last part: behind the largest count of all.
        kept = {int(at): _row(told) for at, told in _last(parts)["beyond"].items()}
        made.tables = tables.assemble({line.tokens: line.chosen for line in made.lines}, kept)
    return made


def _last(parts: Iterable[Known]) -> dict[str, Any]:
    return max((known.facts for known in parts), key=lambda facts: max(map(int, facts["upstream"])))


def _row(told: dict[str, str]) -> Row:
    return {gemm: parse(told[gemm]) for gemm in GEMMS}


def rate(geometry: Geometry, known: Known) -> Rate:
    """The fastest of one GPU: of the copy, and of each product's weights in the median of a sample's replays.

    Reading alone is faster than a copy, which also writes, by how much depends on the kernel. So no kernel of ours
    would tell a floor: the fastest of some hundred of upstream's does, and no product is below it.
    """
    found = [Rate(known.facts["bandwidth"], "a copy, read and written bytes")]
    for (gemm, tokens, config), samples in known.products():
        reads = geometry.active(tokens) * geometry.expert_bytes(gemm)
        found.append(Rate(reads / median(samples) * 1e6, f"{gemm} at {tokens} tokens, {config}"))
    return max(found)


def _lines(geometry: Geometry, known: Known, comparisons: int, fastest: Rate) -> list[Line]:
    lines = []
    for at, told in known.facts["upstream"].items():
        tokens, own = int(at), _row(told)
        times = {gemm: choose.by_round(known.final.get(tokens, []), gemm) for gemm in GEMMS}
        candidate = choose.pair(times, own)
        chosen, verdict, differs = own, None, None
        if candidate is not None:
            pair = {"gate_up": str(candidate.gate_up), "down": str(candidate.down)}
            records = [record for record in known.layer.get(tokens, []) if record["pair"] == pair]
            verdict = choose.verdict(records, max(comparisons, 1))
            differs = max((record["differs"] for record in records), default=None)
            # Upstream's tiles and ours are each as far from float32 as rounding allows, and so from each other twice.
            right = differs is not None and differs <= 2 * choose.TOLERANCE[geometry.dtype]
            if verdict is not None and verdict.ours and right:
                chosen = {"gate_up": candidate.gate_up, "down": candidate.down}
        reads = geometry.active(tokens) * sum(geometry.expert_bytes(gemm) for gemm in GEMMS)
        floor = reads / fastest.bytes_a_second * 1e6
        lines.append(Line(tokens, own, chosen, candidate, verdict, floor, differs))
    return lines
