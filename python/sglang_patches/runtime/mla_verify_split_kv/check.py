"""How far the kernels are from attention in float32 on this GPU; see `_split_kv.check`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from sglang_patches.runtime._split_kv import check


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
    return check.attention(q, drafts, drafts[..., :width], cache, cache[..., :width], slots, begins, scale=scale)


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
    found: list[float] = []
    scale = (width + rope) ** -0.5
    for tried in check.requests(run, lambda count: run.fits(count, tokens * heads, width)):
        rows, latent = len(tried.lengths) * tokens, width + rope
        cache = tried.random(len(tried.slots) + 1, 1, latent, dtype=dtype).to(cache_dtype)
        q, drafts = tried.random(rows, heads, latent, dtype=dtype), tried.random(rows, 1, latent, dtype=dtype)
        out = torch.full((rows, heads, width), math.nan, dtype=dtype, device=q.device)
        run(q, drafts, out, cache, tried.indptr, tried.slots, width=width, scale=scale)
        wanted = attention(q, drafts, cache, tried.slots, tried.begins, width=width, scale=scale)
        found.append(float((out.float() - wanted).abs().max()))
    return check.worst(found)
