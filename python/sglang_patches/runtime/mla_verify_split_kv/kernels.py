"""Triton kernels of patch ``mla-verify-split-kv``: attention of a chain of draft tokens over a split MLA cache.

Flash-decoding (Dao et al. 2023) for several tokens a request. Under absorbed MLA all query heads read one latent row of
``DV + PE`` numbers per cached token, whose first ``DV`` are also the value. So a request's draft tokens and heads
together are the rows of one matrix product, and the cache is read once for ``BLOCK_M`` of them. The cached tokens are
cut into chunks, one program each (`attend_splits`), whose results are put together afterwards
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
    chunk = chunk_tokens(length, total, tl.num_programs(0), target, splits, MIN_CHUNK, BLOCK_N)
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
