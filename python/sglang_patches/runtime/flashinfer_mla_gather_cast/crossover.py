"""From how many pages on a step casts the whole pool: measured on the GPU at start, or as the operator says."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from sglang_patches.runtime.flashinfer_mla_gather_cast import pages

if TYPE_CHECKING:
    from sglang_patches.runtime.flashinfer_mla_gather_cast.pages import Shape

VARIABLE = "SGLANG_PATCHES_GATHER_CAST_LIMIT"
# Shares of the pool's pages that are timed, spread over the pool as a batch's pages are.
SHARES = (0.0625, 0.25, 0.5, 0.75, 1.0)
ROUNDS = 5


@dataclass(frozen=True)
class Crossover:
    """The share of the pool's pages up to which a step gathers, and where it is from: ``measured``, ``set`` by the
    operator or ``default``. Times are milliseconds of one layer, ``plan_ms`` of one step."""

    origin: str
    share: float
    upstream_ms: float | None = None
    whole_ms: float | None = None
    plan_ms: float | None = None
    gather_ms: dict[str, float] | None = None

    def saves_ms(self, layers: int) -> float | None:
        """What a step that reads the smallest timed share of the pool saves; None where nothing was measured."""
        if self.upstream_ms is None or self.plan_ms is None or self.gather_ms is None:
            return None
        return layers * (self.upstream_ms - self.gather_ms[str(SHARES[0])]) - self.plan_ms

    def figures(self) -> dict[str, object]:
        """JSON-able; what was not measured is left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def asked_share() -> float | None:
    """``SGLANG_PATCHES_GATHER_CAST_LIMIT``: a share of the pool, or None where it is to be measured.

    Raises:
        ValueError: not a number from 0 to 1.
    """
    text = os.environ.get(VARIABLE, "auto").strip()
    if text in ("", "auto"):
        return None
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(
            f"{VARIABLE}={text!r} is not a share of the KV pool\n"
            "  wanted     a number from 0 (cast the whole pool always) to 1 (never), or auto (measure at start)\n"
            f"  remedy     unset {VARIABLE}"
        )
    return share


def measure(buffer: torch.Tensor, out: torch.Tensor, shape: Shape) -> Crossover:
    """Time upstream's cast, ours of the whole pool, and gathers of `SHARES` of it, in turn.

    Args:
        buffer: float8_e4m3fn ``[rows, 1, dim]`` on the GPU; only read.
        out: the static buffer, ``[rows, 1, dim]``; overwritten.
    """
    device = buffer.device
    plans = {str(share): _spread(shape, share, device) for share in SHARES}
    every = pages.Pages(
        torch.arange(shape.pages, dtype=torch.int32, device=device),
        torch.tensor([shape.pages], dtype=torch.int32, device=device),
    )
    totals = torch.zeros(3, dtype=torch.int64, device=device)
    slots = torch.arange(min(shape.rows, 65536), dtype=torch.int32, device=device)
    used = torch.tensor([slots.numel()], dtype=torch.int32, device=device)
    scratch = pages.Pages.empty(shape, device)
    runs: dict[str, Callable[[], object]] = {
        "upstream": lambda: buffer.to(out.dtype),
        "whole": lambda: pages.cast(buffer, every, shape, out),
        # A plan with limit 0 leaves the slots alone and does all the work of any other.
        "plan": lambda: pages.plan(slots, used, shape, 0, scratch, totals),
    }
    for share, wanted in plans.items():
        runs[share] = lambda wanted=wanted: pages.cast(buffer, wanted, shape, out)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(ROUNDS + 1):
        for name, work in runs.items():
            took = _milliseconds(work)
            if round_:  # the first compiles
                times[name].append(took)
    # Upstream's temporary is as large as the pool: give it back to whoever needs it next.
    torch.cuda.empty_cache()
    took_ms = {name: round(statistics.median(values), 4) for name, values in times.items()}
    gather_ms = {share: took_ms[share] for share in plans}
    return Crossover(
        "measured",
        choose(gather_ms, took_ms["whole"]),
        upstream_ms=took_ms["upstream"],
        whole_ms=took_ms["whole"],
        plan_ms=took_ms["plan"],
        gather_ms=gather_ms,
    )


def choose(gather_ms: dict[str, float], whole_ms: float) -> float:
    """The largest share of the pool whose gather takes no longer than the whole pool, between two timed shares by
    straight line; 0 where even the smallest takes longer."""
    best, before = 0.0, (0.0, 0.0)
    for share, took in sorted((float(share), took) for share, took in gather_ms.items()):
        if took > whole_ms:
            if before[0] > 0 and took > before[1]:
                best = before[0] + (share - before[0]) * (whole_ms - before[1]) / (took - before[1])
            break
        best, before = share, (share, took)
    return round(best, 4)


def _spread(shape: Shape, share: float, device: torch.device) -> pages.Pages:
    n = max(1, int(shape.pages * share))
    generator = torch.Generator().manual_seed(n)
    chosen = torch.randperm(shape.pages, generator=generator)[:n].sort().values
    order = torch.zeros(shape.pages, dtype=torch.int32, device=device)
    order[:n] = chosen.to(device, torch.int32)
    return pages.Pages(order, torch.tensor([n], dtype=torch.int32, device=device))


def _milliseconds(work: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
