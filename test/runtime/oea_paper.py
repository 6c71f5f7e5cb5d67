"""The rule of oea-topk as a loop over tokens, written from the paper, and the passes that a real model runs with it."""

from __future__ import annotations

import math

import torch

from sglang_patches.runtime.oea_topk import reference
from sglang_patches.runtime.oea_topk.reference import Router
from sglang_patches.runtime.oea_topk.settings import Rule

Choice = list[list[tuple[int, float]]]

RULES = {
    "off": None,
    "all of one's own": Rule(k0=2, least=1),
    "one": Rule(k0=1),
    "none added": Rule(k0=1, k_max=1),
    "rank cap": Rule(k0=1, rank_cap=3),
    "share": Rule(k0=2, p=0.6),
    "too few": Rule(k0=1, least=9),
    "decode only": Rule(k0=1, phases=("decode",)),
}
PREFIX, WIDTH, REQUESTS = 20, 4, 2


def text(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(13, 4096, (count,), generator=generator).tolist()


def naive(logits: torch.Tensor, bias: torch.Tensor | None, real: int, rule: Rule, router: Router) -> Choice:
    """Expert and weight of each slot that is filled, by row: phases 1 and 2 of the paper, one token at a time."""
    rows, experts = logits.shape
    top_k = router.top_k
    k_max = rule.k_max or top_k
    ranked, weights = reference.scores(logits, bias, router)
    rankings = [sorted(range(experts), key=lambda e: (-float(ranked[row, e]), e)) for row in range(rows)]
    if not rule.least <= real <= rule.most:
        picked = [ranking[:top_k] for ranking in rankings]
    else:
        base: list[list[int]] = []
        for row in range(real):
            shares = [float(weights[row, e]) for e in rankings[row][:top_k]]
            own = 1
            while own < rule.k0 and (rule.p is None or math.fsum(shares[:own]) < rule.p * math.fsum(shares)):
                own += 1
            base.append(rankings[row][:own])
        base += [[] for _ in range(real, rows)]
        union = {expert for experts_of in base for expert in experts_of}
        picked = []
        for row, ranking in enumerate(rankings):
            chosen = list(base[row])
            for rank, expert in enumerate(ranking):
                if len(chosen) == k_max:
                    break
                reachable = rule.rank_cap is None or row >= real or rank < rule.rank_cap
                if expert in union and expert not in chosen and reachable:
                    chosen.append(expert)
            picked.append(sorted(chosen, key=ranking.index))
    told = []
    for row, chosen in enumerate(picked):
        each = [float(weights[row, e]) for e in chosen]
        total = (math.fsum(each) or 1.0) if router.renormalize else 1.0
        told.append([(e, w / total * router.scale) for e, w in zip(chosen, each, strict=True)])
    return told
