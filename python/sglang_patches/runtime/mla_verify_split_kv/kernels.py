"""Triton kernels of patch ``mla-verify-split-kv``: attention of a chain of draft tokens over a split MLA cache.

Flash-decoding (Dao et al. 2023) for several tokens a request. Under absorbed MLA all query heads read one latent row of
``DV + PE`` numbers per cached token, whose first ``DV`` are also the value. So a request's draft tokens and heads
together are the rows of one matrix product, and the cache is read once for ``BLOCK_M`` of them. The cached tokens are
cut into chunks, one program each (`attend_splits`), whose results are put together afterwards (`merge_splits`).

Lengths are read on the device and only the number of launched programs is fixed, so that a captured graph serves any
lengths. Softmax is in base 2 and in float32.
"""

# Triton gives the arguments of a kernel their types at launch.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _chunk(length, total, row_blocks, target, splits, MIN_CHUNK: tl.constexpr, BLOCK_N: tl.constexpr):
    """Cached tokens a program takes of a request of ``length``: about ``total / target`` of the whole batch's.

    In proportion to the length, so that one long request among short ones is still spread over the GPU.
    """
    even = tl.cdiv(total.to(tl.int64) * row_blocks, target).to(tl.int32)
    chunk = tl.maximum(tl.maximum(even, tl.cdiv(length, splits)), MIN_CHUNK)
    return tl.cdiv(chunk, BLOCK_N) * BLOCK_N


@triton.jit(do_not_specialize=["batch", "splits", "target"])
def attend_splits(
    Q,  # [batch * L, H, DV + PE]
    Extend,  # [batch * L, 1, DV + PE]: the draft tokens' latent rows, not scaled
    Cache,  # [slots, 1, DV + PE]
    Partial,  # [batch, splits, L * H, DV] float32
    Lse,  # [batch, splits, L * H] float32, base 2
    indptr,  # [batch + 1]
    indices,  # [indptr[batch]]: slots
    scale,  # softmax scale * log2(e)
    k_scale,
    v_scale,
    batch,
    splits,
    target,
    stride_qt,
    stride_qh,
    stride_et,
    stride_cache,
    L: tl.constexpr,
    H: tl.constexpr,
    DV: tl.constexpr,
    PE: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_PE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
):
    """Program (block of rows, split, request): attention over its chunk; the last also over the drafts."""
    row_block = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2)
    begin = tl.load(indptr + request)
    length = tl.load(indptr + request + 1) - begin
    total = tl.load(indptr + batch)
    chunk = _chunk(length, total, tl.num_programs(0), target, splits, MIN_CHUNK, BLOCK_N)
    last = tl.maximum(tl.cdiv(length, chunk), 1) - 1
    if split <= last:
        rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
        real = rows < L * H
        token = rows // H
        dv = tl.arange(0, BLOCK_DV)
        pe = tl.arange(0, BLOCK_PE)
        in_dv = dv < DV
        in_pe = pe < PE
        q_rows = Q + (request * L + token).to(tl.int64) * stride_qt + (rows % H) * stride_qh
        q = tl.load(q_rows[:, None] + dv[None, :], mask=real[:, None] & in_dv[None, :], other=0.0)
        q_pe = tl.load(q_rows[:, None] + DV + pe[None, :], mask=real[:, None] & in_pe[None, :], other=0.0)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        norm = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

        first = split * chunk
        end = tl.minimum(first + chunk, length)
        for start in tl.range(first, end, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            cached = n < end
            slots = tl.load(indices + begin + n, mask=cached, other=0).to(tl.int64)
            at = Cache + slots * stride_cache
            k = tl.load(at[:, None] + dv[None, :], mask=cached[:, None] & in_dv[None, :], other=0.0).to(q.dtype)
            k_pe = tl.load(at[:, None] + DV + pe[None, :], mask=cached[:, None] & in_pe[None, :], other=0.0)
            scores = tl.dot(q, tl.trans(k))
            scores += tl.dot(q_pe, tl.trans(k_pe.to(q.dtype)))
            scores = tl.where(cached[None, :], scores * (scale * k_scale), float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            shrink = tl.exp2(top - new_top)
            p = tl.exp2(scores - new_top[:, None])
            norm = norm * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None] + tl.dot(p.to(q.dtype), k)
            top = new_top
        acc *= v_scale

        if split == last:
            # A chain: token i sees the draft tokens 0 to i. Each row sees at least one, so none is left without a norm.
            # Queries are loaded again, because triton reads them from shared memory in the loop only if nothing after
            # it uses them; otherwise every warp holds them all in registers, and spills.
            q = tl.load(q_rows[:, None] + dv[None, :], mask=real[:, None] & in_dv[None, :], other=0.0)
            q_pe = tl.load(q_rows[:, None] + DV + pe[None, :], mask=real[:, None] & in_pe[None, :], other=0.0)
            j = tl.arange(0, BLOCK_L)
            at = Extend + (request * L + j).to(tl.int64) * stride_et
            k = tl.load(at[:, None] + dv[None, :], mask=(j < L)[:, None] & in_dv[None, :], other=0.0).to(q.dtype)
            k_pe = tl.load(at[:, None] + DV + pe[None, :], mask=(j < L)[:, None] & in_pe[None, :], other=0.0)
            scores = tl.dot(q, tl.trans(k))
            scores += tl.dot(q_pe, tl.trans(k_pe.to(q.dtype)))
            scores = tl.where((j[None, :] <= token[:, None]) & (j < L)[None, :], scores * scale, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            shrink = tl.exp2(top - new_top)
            p = tl.exp2(scores - new_top[:, None])
            norm = norm * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None] + tl.dot(p.to(q.dtype), k)
            top = new_top

        out = (request * splits + split).to(tl.int64) * (L * H) + rows
        tl.store(Partial + out[:, None] * DV + dv[None, :], acc / norm[:, None], mask=real[:, None] & in_dv[None, :])
        tl.store(Lse + out, top + tl.log2(norm), mask=real)


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
    chunk = _chunk(length, total, row_blocks, target, splits, MIN_CHUNK, BLOCK_N)
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
