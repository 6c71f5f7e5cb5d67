"""Are the kernels right on this GPU? Asked once, at start: what compiles may still be wrong where it never ran."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

# Cached tokens of the requests that are tried: several chunks, and less than one.
LENGTHS = (200, 33)
# Outputs are averages of numbers near 1; bfloat16 and a softmax rounded to it move them by less than 0.02.
WORST = 0.05


def attention(
    q: torch.Tensor,
    drafts: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    begins: Sequence[int],
    *,
    width: int,
    scale: float,
) -> torch.Tensor:
    """What the kernels are to write, in float32 and without splits: [requests * tokens, heads, width].

    Args:
        q: [requests * tokens, heads, width + rope].
        drafts: [requests * tokens, 1, width + rope], the draft tokens' latent rows.
        cache: [slots, 1, width + rope]; converted to the type of ``q`` first, as the kernels do.
        slots, begins: request r's cached tokens are ``slots[begins[r] : begins[r + 1]]``.
    """
    count = len(begins) - 1
    tokens, out = len(q) // count, []
    for request in range(count):
        own = slice(request * tokens, (request + 1) * tokens)
        cached = cache[slots[begins[request] : begins[request + 1]], 0].to(q.dtype)
        keys = torch.cat([cached, drafts[own, 0]]).float()
        scores = torch.einsum("thd,nd->htn", q[own].float(), keys) * scale
        visible = torch.ones(tokens, len(keys), dtype=torch.bool, device=q.device).tril(len(cached))
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        out.append(torch.einsum("htn,nd->thd", weights, keys[:, :width]))
    return torch.cat(out)


def difference(
    run: Any, *, tokens: int, heads: int, width: int, rope: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> float:
    """Largest absolute difference from attention in float32, over random requests; NaN where a kernel wrote NaN.

    Args:
        run: `launch.SplitVerify`; where it holds one request, one is tried, and 0 is returned where it holds none.
        tokens: draft tokens of a request.
        width, rope: numbers of a latent row that are the value, and that are not.
        dtype: of queries and drafts.
        cache_dtype: of the KV cache.
    """
    count = next((n for n in (2, 1) if run.fits(n, tokens * heads, width)), 0)
    lengths, device = LENGTHS[:count], run.workspace.device
    if not lengths:
        return 0.0
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device).to(dtype)

    total = sum(lengths)
    cache = random(total + 1, 1, width + rope).to(cache_dtype)
    slots = (torch.randperm(total, generator=generator) + 1).to(device)
    begins = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    q, drafts = random(count * tokens, heads, width + rope), random(count * tokens, 1, width + rope)
    out = torch.full((count * tokens, heads, width), math.nan, dtype=dtype, device=device)
    scale = (width + rope) ** -0.5
    run(q, drafts, out, cache, torch.tensor(begins, dtype=torch.int32, device=device), slots, width=width, scale=scale)

    wanted = attention(q, drafts, cache, slots, begins, width=width, scale=scale)
    return float((out.float() - wanted).abs().max())
