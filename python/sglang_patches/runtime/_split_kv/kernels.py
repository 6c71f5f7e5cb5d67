"""Triton kernels' common part: how a batch's contexts are cut into chunks, and how their results are put together.

Flash-decoding (Dao et al. 2023). A kernel of its own computes what one chunk of cached tokens gives (`MLA` and grouped
queries differ there) and leaves, for each row (a new token and a query head) and split, a float32 result and the
log-sum-exp of its scores. Lengths are read on the device and only the number of launched programs is fixed, so that a
captured graph serves any lengths. Softmax is in base 2 and in float32.
"""

# Triton gives the arguments of a kernel their types at launch.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def chunk_tokens(length, total, row_blocks, target, splits, MIN_CHUNK: tl.constexpr, BLOCK_N: tl.constexpr):
    """Cached tokens a program takes of a request of ``length``: about ``total / target`` of the whole batch's.

    In proportion to the length, so that one long request among short ones is still spread over the GPU.
    """
    even = tl.cdiv(total.to(tl.int64) * row_blocks, target).to(tl.int32)
    chunk = tl.maximum(tl.maximum(even, tl.cdiv(length, splits)), MIN_CHUNK)
    return tl.cdiv(chunk, BLOCK_N) * BLOCK_N


@triton.jit(do_not_specialize=["batch", "splits", "row_blocks", "target"])
def merge_splits(
    Partial,
    Lse,
    Out,  # [batch * L, H, DV]
    indptr,
    batch,
    splits,
    row_blocks,
    target,
    stride_ot,
    stride_oh,
    L: tl.constexpr,
    H: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPLITS_UP: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
):
    """Program (row, block of numbers, request): its chunks' results, weighed by what each saw of the softmax."""
    row = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    request = tl.program_id(2)
    length = tl.load(indptr + request + 1) - tl.load(indptr + request)
    total = tl.load(indptr + batch)
    chunk = chunk_tokens(length, total, row_blocks, target, splits, MIN_CHUNK, BLOCK_N)
    active = tl.maximum(tl.cdiv(length, chunk), 1)

    base = (request * splits).to(tl.int64) * (L * H) + row
    every = tl.arange(0, SPLITS_UP)
    lse = tl.load(Lse + base + every * (L * H), mask=every < active, other=float("-inf"))
    top = tl.max(lse, 0)
    norm = tl.sum(tl.exp2(lse - top), 0)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in tl.range(0, active, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        at = base + s * (L * H)
        weight = tl.exp2(tl.load(Lse + at, mask=s < active, other=float("-inf")) - top)
        part = tl.load(
            Partial + at[:, None] * DV + d[None, :], mask=(s < active)[:, None] & (d < DV)[None, :], other=0.0
        )
        acc += tl.sum(weight[:, None] * part, 0)
    out = Out + (request * L + row // H).to(tl.int64) * stride_ot + (row % H) * stride_oh
    tl.store(out + d, (acc / norm).to(Out.dtype.element_ty), mask=d < DV)
