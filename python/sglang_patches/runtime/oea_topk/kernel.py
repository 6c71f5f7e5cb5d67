"""The rule as one Triton kernel: a program a token, each of which finds the whole batch's union by itself.

Finding it anew in every program costs ``tokens`` times the arithmetic and saves a second launch and a wait between
programs. A verify batch has few tokens, and its router's logits stay in the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_patches.runtime.oea_topk.reference import Router
from sglang_patches.runtime.oea_topk.settings import Rule

# Below every key.
_LOWEST = -(2**63) + 1
# Keys of a block of rows stay in registers.
_BLOCK_KEYS = 4096


@triton.jit
def _keys(scores, bias, offsets, inside, SOFTMAX: tl.constexpr, BLOCK: tl.constexpr, LOWEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """int64 keys that order as scores do, the lower expert first among equals, and the weights."""
    if SOFTMAX:
        ranked = tl.where(inside, scores, -float("inf"))
        powers = tl.where(inside, tl.exp(ranked - tl.max(ranked, axis=1)[:, None]), 0.0)
        weights = powers / tl.sum(powers, axis=1)[:, None]
    else:
        weights = tl.sigmoid(scores)
        ranked = weights + bias
    ranked = tl.where(ranked == ranked, ranked, -1e30)
    ranked = tl.where(ranked == 0.0, 0.0, ranked)  # one zero, as in a comparison of floats
    bits = ranked.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.to(tl.int64) << 32) + (BLOCK - 1 - offsets).to(tl.int64)
    return tl.where(inside, keys, LOWEST), weights


@triton.jit
def _own(  # type: ignore[no-untyped-def]
    keys, weights, p, K0: tl.constexpr, K: tl.constexpr, HAS_P: tl.constexpr, ROWS: tl.constexpr, LOWEST: tl.constexpr
):
    """Which experts are among a row's own: those that its first K0 ranks, or its share p, name."""
    own = keys < LOWEST
    if HAS_P:
        left, total = keys, tl.zeros([ROWS], dtype=tl.float32)
        for _ in tl.static_range(K):
            top = tl.max(left, axis=1)[:, None]
            total += tl.sum(tl.where(left == top, weights, 0.0), axis=1)
            left = tl.where(left == top, LOWEST, left)
        left, before = keys, tl.zeros([ROWS], dtype=tl.float32)
        for rank in tl.static_range(K0):
            top = tl.max(left, axis=1)[:, None]
            short = (before < total * p) | (rank == 0)
            own = own | ((left == top) & short[:, None])
            before += tl.sum(tl.where(left == top, weights, 0.0), axis=1)
            left = tl.where(left == top, LOWEST, left)
    else:
        left = keys
        for _ in tl.static_range(K0):
            top = tl.max(left, axis=1)[:, None]
            own = own | (left == top)
            left = tl.where(left == top, LOWEST, left)
    return own


@triton.jit
def _oea_kernel(  # type: ignore[no-untyped-def]
    logits,  # [M, N], any floating dtype
    bias,  # [N]
    real,  # int32 scalar
    out_weights,  # [M, K + SHARED] float32
    out_ids,  # [M, K + SHARED] int32
    counts,  # [3] int64
    M,
    stride,
    p,
    scale,
    shared_weight,
    N: tl.constexpr,
    K: tl.constexpr,
    K0: tl.constexpr,
    K_MAX: tl.constexpr,
    RANK_CAP: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    SHARED: tl.constexpr,
    SOFTMAX: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_P: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOWEST: tl.constexpr,
):
    token = tl.program_id(0)
    columns = tl.arange(0, BLOCK_N)[None, :]
    inside = columns < N
    count = tl.minimum(tl.load(real), M)
    holds = (count >= LEAST) & (count <= MOST)
    if HAS_BIAS:
        offset = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    else:
        offset = tl.zeros([1, BLOCK_N], dtype=tl.float32)

    # Which experts are some real token's own; none is looked for where the rule does not hold.
    union = tl.zeros([BLOCK_N], dtype=tl.int32)
    wide = tl.zeros([BLOCK_N], dtype=tl.int32)
    for block in range(tl.where(holds, tl.cdiv(count, BLOCK_M), 0)):
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        live = (rows < count) & inside
        scores = tl.load(logits + rows * stride + columns, mask=live, other=0.0).to(tl.float32)
        keys, weights = _keys(scores, offset, columns, live, SOFTMAX, BLOCK_N, LOWEST)
        own = _own(keys, weights, p, K0, K, HAS_P, BLOCK_M, LOWEST) & live
        union = union | tl.max(own.to(tl.int32), axis=0)
        if COUNT:  # noqa: SIM102  decided at compilation, the other on the device
            if token == M:  # the one program that is no token's
                top = _own(keys, weights, p, K, K, False, BLOCK_M, LOWEST) & live
                wide = wide | tl.max(top.to(tl.int32), axis=0)
    if COUNT:  # noqa: SIM102
        if token == M:
            # Free slots get others of the union, or one set of spare experts for all tokens, see the reference.
            loaded = tl.maximum(tl.sum(union), K)
            tl.atomic_add(counts, tl.where(holds, loaded, 0).to(tl.int64))
            tl.atomic_add(counts + 1, tl.where(holds, tl.sum(wide), 0).to(tl.int64))
            tl.atomic_add(counts + 2, holds.to(tl.int64))

    row = inside & (token < M)
    scores = tl.load(logits + token * stride + columns, mask=row, other=0.0).to(tl.float32)
    keys, weights = _keys(scores, offset, columns, inside, SOFTMAX, BLOCK_N, LOWEST)
    own = _own(keys, weights, p, K0, K, HAS_P, 1, LOWEST) & (token < count)
    may = own | ((union[None, :] > 0) & inside)
    may = tl.where(holds, may, inside)
    most = tl.where(holds, K_MAX, K)
    if RANK_CAP > 0:
        capped = holds & (token < count)
    slots = tl.arange(0, BLOCK_K)
    ids = tl.zeros([BLOCK_K], dtype=tl.int32)
    chosen = tl.zeros([BLOCK_K], dtype=tl.float32)
    left = tl.where(may, keys, LOWEST)
    # What fills slots that stay free: the union's others, then the lowest ids, below every key.
    spare = tl.where(union[None, :] > 0, keys, LOWEST + BLOCK_N - columns.to(tl.int64))
    spare = tl.where(inside, spare, LOWEST)
    for slot in tl.static_range(K):
        top = tl.max(left, axis=1)[:, None]
        at = left == top
        found = (tl.max(top) > LOWEST) & (slot < most)
        if RANK_CAP > 0:
            rank = tl.sum((keys > top).to(tl.int32))
            found = found & ((rank < RANK_CAP) | (capped == 0))
        at = tl.where(found, at, spare == tl.max(spare, axis=1)[:, None])
        ids = tl.where(slots == slot, tl.sum(tl.where(at, columns, 0)), ids)
        chosen = tl.where((slots == slot) & found, tl.sum(tl.where(at, weights, 0.0)), chosen)
        left = tl.where(at, LOWEST, left)
        spare = tl.where(at, LOWEST, spare)

    if RENORMALIZE:
        total = tl.sum(chosen, axis=0)
        chosen = chosen / tl.where(total > 0.0, total, 1.0)
    chosen = chosen * scale
    if SHARED > 0:
        chosen = tl.where(slots >= K, shared_weight, chosen)
        ids = tl.where(slots >= K, N + slots - K, ids)
    at_row = token * (K + SHARED) + slots
    written = (slots < K + SHARED) & (token < M)
    tl.store(out_weights + at_row, chosen, mask=written)
    tl.store(out_ids + at_row, ids, mask=written)


def choose(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    real: torch.Tensor,
    rule: Rule,
    router: Router,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.choose` in one launch. `real` must not be None, and is read on the device only.

    With `counts` one program more than rows is launched, which counts: the others do not wait for it.
    The launch is the same for a captured graph and outside: nothing but the pointers differs, so what a warm-up run
    compiled serves the capture.
    """
    rows, experts = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    width = router.top_k + router.shared
    weights = torch.empty((rows, width), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, width), dtype=torch.int32, device=logits.device)
    if rows == 0:
        return weights, ids
    block_n = triton.next_power_of_2(experts)
    _oea_kernel[(rows + (counts is not None),)](
        logits,
        logits if bias is None else bias,
        real,
        weights,
        ids,
        real if counts is None else counts,
        rows,
        logits.stride(0),
        1.0 if rule.p is None else rule.p,
        router.scale,
        router.shared_weight,
        N=experts,
        K=router.top_k,
        K0=rule.k0,
        K_MAX=router.top_k if rule.k_max is None else rule.k_max,
        RANK_CAP=rule.rank_cap or 0,
        LEAST=rule.least,
        MOST=rule.most,
        SHARED=router.shared,
        SOFTMAX=router.scoring == "softmax",
        HAS_BIAS=bias is not None,
        HAS_P=rule.p is not None,
        RENORMALIZE=router.renormalize,
        COUNT=counts is not None,
        BLOCK_M=max(1, min(triton.next_power_of_2(rows), _BLOCK_KEYS // block_n)),
        BLOCK_N=block_n,
        BLOCK_K=triton.next_power_of_2(width),
        LOWEST=_LOWEST,
        num_warps=4,
    )
    return weights, ids
