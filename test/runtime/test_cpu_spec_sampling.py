"""cpu-spec-sampling: seeds, filters and draws."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_requests import OFF, filtered_reference, params, rejects, request
from scipy import stats

from sglang_patches.runtime import cpu_spec_sampling as css

# --- seeds ---------------------------------------------------------------------------------------------------------


def test_uniforms_are_a_function_of_seed_and_position() -> None:
    seeds = torch.tensor([7, 7, -7, 7, 2**63 - 1, -(2**63)])
    positions = torch.tensor([1, 2, 1, 1, 1, 1])
    u = css.uniforms(seeds, positions)
    assert u[0] == u[3]
    assert len(set(u.tolist())) == 5
    assert torch.equal(u, css.uniforms(seeds, positions))


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_uniforms_are_uniform_and_uncorrelated(vary: str) -> None:
    n = 4000
    run, same = torch.arange(n), torch.full((n,), 42)
    u = css.uniforms(run, same) if vary == "seed" else css.uniforms(same, run)
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-4
    assert abs(stats.pearsonr(u[1:].numpy(), u[:-1].numpy()).statistic) < 4 / n**0.5


def test_request_seeds() -> None:
    reqs: Any = [request(sampling_seed=-3), request(), request(sampling_seed=2**63 - 1), request()]
    drawn = css.request_seeds(reqs, "cpu", None)
    assert drawn is not None
    assert drawn[[0, 2]].tolist() == [-3, 2**63 - 1]
    again = css.request_seeds(reqs, "cpu", None)
    assert again is not None
    assert drawn[1] != drawn[3]
    assert drawn[1] != again[1]
    upstream = torch.tensor([1, 2, 3, 4])
    assert css.request_seeds(reqs, "cpu", upstream) is upstream
    assert css.request_seeds(reqs, "cuda", None) is None


def test_choices_of_a_seeded_request_differ_and_leave_the_shared_parameters_alone() -> None:
    shared = params(sampling_seed=5)
    choices: list[Any] = [SimpleNamespace(sampling_params=shared) for _ in range(4)]
    for index, choice in enumerate(choices):
        css.seed_choice(choice, index)
    seeds = [choice.sampling_params.sampling_seed for choice in choices]
    assert seeds[0] == shared.sampling_seed == 5
    assert len(set(seeds)) == 4
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    unseeded: Any = SimpleNamespace(sampling_params=params())
    css.seed_choice(unseeded, 3)
    assert unseeded.sampling_params.sampling_seed is None


# --- filters and draws ---------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(1, 12) | st.just(OFF),
    st.sampled_from([0.1, 0.5, 0.77, 0.95, 1.0]),
    st.sampled_from([0.0, 0.05, 0.3, 1.0]),
)
def test_filters(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    gen = torch.Generator().manual_seed(seed)
    probs = torch.softmax(torch.randn(3, 11, generator=gen) * 2, -1)
    weights, ids = css.filter_sorted(
        probs, torch.full((3,), top_k), torch.full((3,), top_p, dtype=torch.float64), torch.full((3,), min_p).double()
    )
    for row in range(3):
        got = {t: w for t, w in zip(ids[row].tolist(), weights[row].tolist(), strict=True) if w}
        assert got == filtered_reference(probs[row].double().tolist(), top_k, top_p, min_p)


def test_no_token_is_lost_to_rounding_when_top_p_is_off() -> None:
    probs = torch.full((1, 100_000), 1.0001e-5)  # sums to 1.0001
    weights, _ = css.filter_sorted(probs, torch.tensor([OFF]), torch.ones(1), torch.zeros(1))
    assert (weights > 0).all()


@pytest.mark.parametrize("seeded", [False, True])
def test_draws_follow_the_weights(seeded: bool) -> None:
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 0.5, 0.0, 5.5, 0.0])
    n = 20_000
    seeds = torch.randint(-(2**62), 2**62, (n,), generator=torch.Generator().manual_seed(1)) if seeded else None
    torch.manual_seed(1)
    tokens = css.draw(weights.expand(n, -1), seeds, torch.arange(n) % 7)
    counts = Counter(tokens.tolist())
    assert not rejects(counts, {i: w / 10 for i, w in enumerate(weights.tolist())})
    assert rejects(counts, dict(enumerate([0.0, 0.28, 0.0, 0.12, 0.05, 0.0, 0.55, 0.0])))


def test_what_a_seed_yields_does_not_depend_on_the_batch() -> None:
    gen = torch.Generator().manual_seed(0)
    probs = torch.softmax(torch.randn(5, 500, generator=gen), -1)
    seeds, positions = torch.arange(5), torch.arange(5) + 10
    alone = css.sample(probs, seeds, positions)
    top_ks = torch.tensor([OFF, 3, OFF, 1, OFF])
    top_ps = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.4])
    mixed = css.sample_filtered(probs, top_ks, top_ps, torch.zeros(5), seeds, positions)
    assert isinstance(mixed, torch.Tensor)
    assert mixed[[0, 2]].tolist() == alone[[0, 2]].tolist()
    assert mixed[3] == probs[3].argmax()


def test_filtered_result_describes_the_sample() -> None:
    probs = torch.softmax(torch.randn(6, 50, generator=torch.Generator().manual_seed(2)), -1)
    result = css.sample_filtered(
        probs,
        torch.full((6,), 4),
        torch.ones(6),
        torch.zeros(6),
        torch.arange(6),
        torch.arange(6),
        return_filtered=True,
    )
    assert isinstance(result, tuple)
    tokens, weights, ids, chosen = result
    assert ((weights > 0).sum(-1) == 4).all()
    assert torch.equal(chosen, probs.gather(1, tokens.long().view(-1, 1)).view(-1))
    assert ((ids == tokens.view(-1, 1)) & (weights > 0)).any(-1).all()
