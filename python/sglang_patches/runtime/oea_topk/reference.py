"""The rule in PyTorch: what a CPU server runs, and what the Triton kernel is held to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_patches.runtime.oea_topk.settings import Rule

#: What a not-a-number ranks as, as in upstream's router (``kernels/ops/moe/moe_fused_gate.py``): behind all numbers.
WORST = -1e30


@dataclass(frozen=True)
class Router:
    """How a layer's router scores, and what becomes of its weights.

    Attributes:
        top_k: routed experts a token.
        scoring: ``sigmoid`` (rank by score + bias, weight by the score) or ``softmax`` (no bias).
        renormalize: divide a token's weights by their sum.
        scale: factor on the weights of routed experts; 1.0 where upstream applies it later.
        shared: columns that follow the routed ones, for shared experts: ids from the number of experts on.
        shared_weight: weight in those columns.
    """

    top_k: int
    scoring: str = "sigmoid"
    renormalize: bool = True
    scale: float = 1.0
    shared: int = 0
    shared_weight: float = 1.0


def scores(logits: torch.Tensor, bias: torch.Tensor | None, router: Router) -> tuple[torch.Tensor, torch.Tensor]:
    """What experts are ranked by, and their weights before renormalisation: both float32 ``[tokens, experts]``."""
    logits = logits.float()
    if router.scoring == "softmax":
        ranked, weights = logits, logits.softmax(-1)
    else:
        weights = logits.sigmoid()
        ranked = weights if bias is None else weights + bias.float()
    return torch.where(ranked.isnan(), WORST, ranked), weights


def choose(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    real: torch.Tensor | None,
    rule: Rule,
    router: Router,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each token by opportunistic expert activation.

    Equal scores rank by the lower id first. A slot that stays free gets weight 0 and another expert of the union, for
    which nothing is loaded; a union smaller than ``top_k`` is filled up with the lowest ids, the same ones for all
    tokens, because upstream's expert kernels want the experts of a token to be different. So a layer loads the union,
    or ``top_k`` where that is more. Rows of padding get experts of the union only.

    Args:
        logits: ``[tokens, experts]``, any floating dtype; rows of padding are the last.
        bias: ``[experts]``, added for ranking only.
        real: int32 scalar, rows that are no padding; None: all. It is never read on the host.
        counts: int64 ``[3]``, added to where the rule holds: different experts of the real rows, those of their own
            top-k, and 1.

    Returns:
        Weights, float32 ``[tokens, top_k + shared]``, and ids, int32 of that shape, a token's best expert first.
    """
    rows, experts = logits.shape
    top_k, device = router.top_k, logits.device
    ranked, weights = scores(logits, bias, router)
    order = ranked.argsort(dim=-1, descending=True, stable=True)
    by_rank = weights.gather(1, order)
    count = torch.tensor(rows, device=device) if real is None else real.reshape(()).clamp(max=rows)
    is_real = torch.arange(rows, device=device) < count
    holds = (count >= rule.least) & (count <= rule.most)

    own = _own(by_rank, rule, top_k)
    own = torch.where(is_real, own, 0)
    ranks = torch.arange(experts, device=device)
    base = ranks < own[:, None]
    union = torch.zeros_like(base).scatter_(1, order, base).any(0)
    may = union[order]
    if rule.rank_cap is not None:
        may &= (ranks < rule.rank_cap) | ~is_real[:, None]
    taken = base | may
    k_max = top_k if rule.k_max is None else rule.k_max
    taken &= taken.cumsum(1) <= k_max
    taken = torch.where(holds, taken, ranks < top_k)

    # By slot: ranks that were taken, then others of the union, then what is left by its id.
    spare = torch.where(union[order], experts + ranks, 2 * experts + order)
    picked = torch.where(taken, ranks, spare).argsort(dim=-1)[:, :top_k]
    filled = taken.gather(1, picked)
    ids = order.gather(1, picked)
    if counts is not None:
        distinct = [_distinct(each, is_real, experts) for each in (ids, order[:, :top_k])]
        counts += torch.stack([*distinct, torch.ones_like(distinct[0])]) * holds
    chosen = torch.where(filled, by_rank.gather(1, picked), 0.0)
    if router.renormalize:
        total = chosen.sum(-1, keepdim=True)
        chosen = chosen / torch.where(total > 0, total, 1.0)
    chosen = chosen * router.scale
    if router.shared:
        columns = torch.arange(experts, experts + router.shared, device=device).expand(rows, -1)
        ids = torch.cat([ids, columns], 1)
        chosen = torch.cat([chosen, torch.full_like(columns, router.shared_weight, dtype=chosen.dtype)], 1)
    return chosen, ids.int()


def _distinct(ids: torch.Tensor, is_real: torch.Tensor, experts: int) -> torch.Tensor:
    """How many different experts real rows have, int64 scalar."""
    seen = torch.zeros(len(ids), experts, dtype=torch.bool, device=ids.device)
    return seen.scatter_(1, ids, is_real[:, None].expand_as(ids)).any(0).sum()


def _own(by_rank: torch.Tensor, rule: Rule, top_k: int) -> torch.Tensor:
    """How many experts of its own each token keeps, ``[tokens]``."""
    own = torch.full_like(by_rank[:, 0], rule.k0, dtype=torch.int64)
    if rule.p is None:
        return own
    # One expert after the other, as the kernel adds: the last bit decides where a share is met exactly.
    before = torch.zeros_like(by_rank[:, 0])
    sums = []
    for rank in range(top_k):
        sums.append(before)
        before = before + by_rank[:, rank]
    short = torch.stack([each < before * rule.p for each in sums], 1)
    return torch.minimum(own, short.sum(1)).clamp(min=1)
