"""Are split kernels right on this GPU? Asked once, at start: what compiles may still be wrong where it never ran."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Cached tokens of the requests that are tried: several chunks, and less than one.
LENGTHS = (200, 33)
# And of one that a single program walks: more turns of its loop than its pipeline has stages, and a rest.
LONG = 1000
# Outputs are averages of numbers near 1; bfloat16 and a softmax rounded to it move them by less than 0.02.
WORST = 0.05


def attention(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    begins: Sequence[int],
    *,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """What the kernels are to write, in float32 and without splits: [requests * tokens, heads, DV].

    Args:
        q: [requests * tokens, heads, DK].
        k_new, v_new: [requests * tokens, KV heads, DK or DV], of the new tokens; token i of a request sees 0 to i.
        k_cache, v_cache: [slots, KV heads, DK or DV]; converted to the type of ``q`` first, as the kernels do.
        slots, begins: request r's cached tokens are ``slots[begins[r] : begins[r + 1]]``.
        k_scale, v_scale: what cached keys and values are to be multiplied with.
    """
    count, group = len(begins) - 1, q.shape[1] // k_new.shape[1]
    tokens, out = len(q) // count, []
    for request in range(count):
        own = slice(request * tokens, (request + 1) * tokens)
        cached = slots[begins[request] : begins[request + 1]]
        keys = torch.cat([k_cache[cached].to(q.dtype).float() * k_scale, k_new[own].float()])
        values = torch.cat([v_cache[cached].to(q.dtype).float() * v_scale, v_new[own].float()])
        rows = q[own].float().unflatten(1, (-1, group))
        scores = torch.einsum("tkgd,nkd->kgtn", rows, keys) * scale
        visible = torch.ones(tokens, len(keys), dtype=torch.bool, device=q.device).tril(len(cached))
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        out.append(torch.einsum("kgtn,nkd->tkgd", weights, values).flatten(1, 2))
    return torch.cat(out)


@dataclass(frozen=True)
class Requests:
    """Random cached tokens of one or two requests, and where they are.

    Attributes:
        lengths: cached tokens of each.
        begins: where each one's are in ``slots``, and where the last ends.
        slots: in random order, from 1.
    """

    lengths: tuple[int, ...]
    begins: list[int]
    slots: torch.Tensor
    device: torch.device
    generator: torch.Generator

    @property
    def indptr(self) -> torch.Tensor:
        return torch.tensor(self.begins, dtype=torch.int32, device=self.device)

    def random(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device).to(dtype)


def requests(run: Any, fits: Callable[[int], bool]) -> Iterator[Requests]:
    """What is tried, in turn: at most two requests as they are split, then a long one in a single program.

    Args:
        run: as `plan.SplitAttention`; of one split while the long request is tried.
        fits: whether it takes a number of requests; where it takes none, nothing is tried.
    """
    count = next((n for n in (2, 1) if fits(n)), 0)
    if not count:
        return
    device, override = run.workspace.device, run.override
    yield _made(LENGTHS[:count], device)
    run.override = 1
    try:
        if fits(1):
            yield _made((LONG,), device)
    finally:
        run.override = override


def _made(lengths: tuple[int, ...], device: torch.device) -> Requests:
    generator = torch.Generator().manual_seed(0)
    slots = (torch.randperm(sum(lengths), generator=generator) + 1).to(device)
    return Requests(lengths, [0, *torch.tensor(lengths).cumsum(0).tolist()], slots, device, generator)


def worst(differences: Sequence[float]) -> float:
    """The largest; NaN where one is; 0 where there is none."""
    return float(torch.tensor(differences).max()) if differences else 0.0


def wrong(difference: Callable[[], float]) -> str:
    """What is wrong with kernels on this GPU, in words; empty where nothing is.

    Args:
        difference: runs them; the largest absolute difference from attention in float32, NaN where they wrote NaN.
    """
    try:
        found = difference()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if found <= WORST:
        return ""
    return f"on this GPU they are up to {found:g} from attention in float32; at most {WORST} is rounding"
