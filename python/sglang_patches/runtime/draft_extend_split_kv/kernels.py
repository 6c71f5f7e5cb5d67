"""Triton kernel of patch ``draft-extend-split-kv``: attention of a few new tokens over a split cache, grouped queries.

Flash-decoding (Dao et al. 2023) for several tokens a request. The ``GROUP`` query heads that share a KV head, times the
new tokens, are the rows of one matrix product, so a KV head's keys and values are read once for ``BLOCK_M`` of them.
The cached tokens are cut into chunks, one program each, whose results are put together afterwards
(`_split_kv.kernels.merge_splits`).
"""

# Triton gives the arguments of a kernel their types at launch.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from sglang_patches.runtime._split_kv.kernels import chunk_tokens


@triton.jit(do_not_specialize=["batch", "splits", "target"])
def attend_splits(
    Q,  # [batch * L, H, DK]
    K,  # [batch * L, KV_HEADS, DK]: the new tokens' keys, not scaled
    V,  # [batch * L, KV_HEADS, DV]
    KCache,  # [slots, KV_HEADS, DK]
    VCache,  # [slots, KV_HEADS, DV]
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
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_kct,
    stride_kch,
    stride_vct,
    stride_vch,
    L: tl.constexpr,
    H: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
):
    """Program (KV head within block of rows, split, request): attention over its chunk; the last also over the new."""
    GROUP: tl.constexpr = H // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    row_block = tl.program_id(0) // KV_HEADS
    split = tl.program_id(1)
    request = tl.program_id(2)
    begin = tl.load(indptr + request)
    length = tl.load(indptr + request + 1) - begin
    total = tl.load(indptr + batch)
    chunk = chunk_tokens(length, total, tl.num_programs(0), target, splits, MIN_CHUNK, BLOCK_N)
    last = tl.maximum(tl.cdiv(length, chunk), 1) - 1
    if split <= last:
        rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
        real = rows < L * GROUP
        token = rows // GROUP
        head = kv_head * GROUP + rows % GROUP
        dk = tl.arange(0, BLOCK_DK)
        dv = tl.arange(0, BLOCK_DV)
        in_dk = dk < DK
        in_dv = dv < DV
        q_rows = Q + (request * L + token).to(tl.int64) * stride_qt + head * stride_qh
        q = tl.load(q_rows[:, None] + dk[None, :], mask=real[:, None] & in_dk[None, :], other=0.0)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        norm = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

        first = split * chunk
        end = tl.minimum(first + chunk, length)
        k_head = KCache + kv_head * stride_kch
        v_head = VCache + kv_head * stride_vch
        for start in tl.range(first, end, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            cached = n < end
            slots = tl.load(indices + begin + n, mask=cached, other=0).to(tl.int64)
            at = k_head + slots * stride_kct
            k = tl.load(at[:, None] + dk[None, :], mask=cached[:, None] & in_dk[None, :], other=0.0).to(q.dtype)
            at = v_head + slots * stride_vct
            v = tl.load(at[:, None] + dv[None, :], mask=cached[:, None] & in_dv[None, :], other=0.0).to(q.dtype)
            scores = tl.dot(q, tl.trans(k))
            scores = tl.where(cached[None, :], scores * (scale * k_scale), float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            shrink = tl.exp2(top - new_top)
            p = tl.exp2(scores - new_top[:, None])
            norm = norm * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None] + tl.dot(p.to(q.dtype), v)
            top = new_top
        acc *= v_scale

        if split == last:
            # Token i sees the new tokens 0 to i. Each row sees at least one, so none is left without a norm. Queries
            # are loaded again: triton reads them from shared memory in the loop only if nothing after it uses them.
            q = tl.load(q_rows[:, None] + dk[None, :], mask=real[:, None] & in_dk[None, :], other=0.0)
            j = tl.arange(0, BLOCK_L)
            at = K + (request * L + j).to(tl.int64) * stride_kt + kv_head * stride_kh
            k = tl.load(at[:, None] + dk[None, :], mask=(j < L)[:, None] & in_dk[None, :], other=0.0).to(q.dtype)
            at = V + (request * L + j).to(tl.int64) * stride_vt + kv_head * stride_vh
            v = tl.load(at[:, None] + dv[None, :], mask=(j < L)[:, None] & in_dv[None, :], other=0.0).to(q.dtype)
            scores = tl.dot(q, tl.trans(k))
            scores = tl.where((j[None, :] <= token[:, None]) & (j < L)[None, :], scores * scale, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            shrink = tl.exp2(top - new_top)
            p = tl.exp2(scores - new_top[:, None])
            norm = norm * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None] + tl.dot(p.to(q.dtype), v)
            top = new_top

        out = (request * splits + split).to(tl.int64) * (L * H) + token * H + head
        tl.store(Partial + out[:, None] * DV + dv[None, :], acc / norm[:, None], mask=real[:, None] & in_dv[None, :])
        tl.store(Lse + out, top + tl.log2(norm), mask=real)
