"""How far the kernels are from attention in float32 on this GPU; see `_split_kv.check`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from sglang_patches.runtime._split_kv import check

if TYPE_CHECKING:
    from sglang_patches.runtime.draft_extend_split_kv.launch import SplitExtend


def difference(run: SplitExtend, *, tokens: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> float:
    """Largest absolute difference from attention in float32, over random requests; NaN where a kernel wrote NaN.

    Args:
        run: where it holds one request, one is tried, and 0 is returned where it holds none.
        tokens: new tokens of a request.
        dtype: of queries and new tokens.
        cache_dtype: of the KV cache.
    """
    heads, kv_heads = run.heads, run.kv_heads
    found: list[float] = []
    scale = run.key_width**-0.5
    for tried in check.requests(run, lambda count: run.fits(count, tokens * heads, run.width)):
        rows, slots = len(tried.lengths) * tokens, len(tried.slots) + 1
        q = tried.random(rows, heads, run.key_width, dtype=dtype)
        k, v = (tried.random(rows, kv_heads, width, dtype=dtype) for width in (run.key_width, run.width))
        k_cache, v_cache = (
            tried.random(slots, kv_heads, width, dtype=dtype).to(cache_dtype) for width in (run.key_width, run.width)
        )
        out = torch.full((rows, heads, run.width), math.nan, dtype=dtype, device=q.device)
        run(q, k, v, out, k_cache, v_cache, tried.indptr, tried.slots, scale=scale)
        wanted = check.attention(q, k, v, k_cache, v_cache, tried.slots, tried.begins, scale=scale)
        found.append(float((out.float() - wanted).abs().max()))
    return check.worst(found)
