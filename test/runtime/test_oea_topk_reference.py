"""oea-topk: the rule against a loop over tokens written from the paper."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oea_paper import naive
from sglang.srt.layers.moe import topk as upstream

from sglang_patches.runtime.oea_topk import reference
from sglang_patches.runtime.oea_topk.reference import Router
from sglang_patches.runtime.oea_topk.settings import Rule


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor | None, int, Rule, Router]:
    rows, experts = draw(st.integers(1, 64)), draw(st.integers(8, 384))
    top_k = draw(st.integers(1, 8))
    k0 = draw(st.integers(1, top_k))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(rows, experts, generator=seed) * draw(st.sampled_from([0.1, 1.0, 4.0]))
    if draw(st.booleans()):  # a few values only: ties everywhere, also at the edge of every set
        logits = logits.round()
    scoring = draw(st.sampled_from(["sigmoid", "softmax"]))
    bias = None
    if scoring == "sigmoid":
        bias = torch.randn(experts, generator=seed).round(decimals=1) * draw(st.sampled_from([0.0, 0.3]))
    least = draw(st.integers(1, 4))
    rule = Rule(
        k0=k0,
        k_max=draw(st.none() | st.integers(k0, top_k)),
        rank_cap=draw(st.none() | st.integers(k0, experts)),
        # No share that a sum of few equal weights meets exactly: there the last bit decides.
        p=draw(st.none() | st.sampled_from([0.137, 0.493, 0.871])),
        least=least,
        most=draw(st.integers(max(least, 16), 64)),
    )
    scale = draw(st.sampled_from([1.0, 2.827]))
    router = Router(top_k, scoring, draw(st.booleans()), scale, draw(st.integers(0, 2)), shared_weight=0.354)
    return logits, bias, draw(st.integers(0, rows)), rule, router


@settings(max_examples=100, deadline=None)
@given(cases())
def test_the_reference_is_the_paper(case: tuple[torch.Tensor, torch.Tensor | None, int, Rule, Router]) -> None:
    logits, bias, real, rule, router = case
    counts = torch.tensor([100, 200, 300])
    weights, ids = reference.choose(logits, bias, torch.tensor(real, dtype=torch.int32), rule, router, counts)
    experts, top_k = logits.shape[1], router.top_k
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    told = naive(*case)
    union = {expert for slots in told for expert, _ in slots}
    for row, slots in enumerate(told):
        chosen = ids[row, :top_k].tolist()
        assert chosen[: len(slots)] == [expert for expert, _ in slots]
        torch.testing.assert_close(weights[row, : len(slots)], torch.tensor([weight for _, weight in slots]))
        # A free slot loads nothing that is not loaded anyway, and adds nothing; upstream wants different experts.
        assert len(set(chosen)) == top_k
        assert not weights[row, len(slots) : top_k].any()
        assert ids[row, top_k:].tolist() == list(range(experts, experts + router.shared))
        assert weights[row, top_k:].tolist() == pytest.approx([0.354] * router.shared)
    loaded = set(ids[:, :top_k].flatten().tolist())
    assert loaded == union if len(union) >= top_k else union < loaded and len(loaded) == top_k
    added = [0, 0, 0]
    if rule.least <= real <= rule.most:
        alone = naive(logits, bias, real, replace(rule, least=1000), router)  # never holds: their own top-k
        added = [len(loaded), len({expert for slots in alone[:real] for expert, _ in slots}), 1]
    assert counts.tolist() == [100 + added[0], 200 + added[1], 300 + added[2]]


@settings(max_examples=60, deadline=None)
@given(cases())
def test_padding_never_enters_the_union_and_loads_nothing(case: Any) -> None:
    logits, bias, real, rule, router = case
    count = torch.tensor(real, dtype=torch.int32)
    weights, ids = reference.choose(logits, bias, count, rule, router)
    other = logits.clone()
    other[real:] = torch.randn(other[real:].shape) * 9
    changed_weights, changed = reference.choose(other, bias, count, rule, router)
    assert torch.equal(ids[:real], changed[:real])
    assert torch.equal(weights[:real], changed_weights[:real])
    if rule.least <= real <= rule.most:
        loaded = set(ids[:real, : router.top_k].flatten().tolist())
        assert set(changed[real:, : router.top_k].flatten().tolist()) <= loaded


@settings(max_examples=100, deadline=None)
@given(cases())
@example((torch.zeros(3, 8), torch.zeros(8), 3, Rule(k0=2), Router(2)))
def test_all_of_ones_own_is_upstreams_choice(case: Any) -> None:
    logits, bias, _, rule, router = case
    rule = replace(rule, k0=router.top_k, k_max=None, rank_cap=None, p=None)
    weights, ids = reference.choose(logits, bias, None, rule, replace(router, shared=0))
    if router.scoring == "sigmoid":
        expected, theirs = upstream.biased_grouped_topk_impl._torchdynamo_orig_callable(
            logits, logits, bias, router.top_k, router.renormalize, 1, 1, 0, router.scale, True
        )
        ranked = logits.sigmoid() + bias
    else:
        expected, theirs = upstream.fused_topk_torch_native(logits, logits, router.top_k, router.renormalize)
        expected, ranked = expected * router.scale, logits
    # PyTorch chooses any of equals; so what must agree is what was ranked by, and weights where that says which.
    best = torch.gather(ranked, 1, ids.long()).sort(descending=True).values
    assert torch.equal(best, torch.gather(ranked, 1, theirs.long()).sort(descending=True).values)
    for row in range(len(ids)):
        line = ranked[row].topk(router.top_k).values
        if (ranked[row] >= line[-1]).sum() == router.top_k:
            assert sorted(ids[row].tolist()) == sorted(theirs[row].tolist())
            torch.testing.assert_close(
                weights[row][ids[row].argsort()], expected[row][theirs[row].argsort()].float(), rtol=3e-7, atol=0
            )


def test_a_not_a_number_ranks_last() -> None:
    logits = torch.tensor([[math.nan, 1.0, 2.0, -3.0], [4.0, math.nan, 0.0, 1.0]])
    _, ids = reference.choose(logits, torch.zeros(4), None, Rule(k0=1), Router(2))
    assert ids.tolist() == [[2, 0], [0, 2]]
