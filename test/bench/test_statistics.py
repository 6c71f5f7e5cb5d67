"""Verdicts against differences known in advance; how often they are wrong, by simulation.

A rate of 1,000 simulated runs may exceed the stated 5 % by what chance explains: 3.1 binomial standard deviations,
which a right method passes 999 times in 1,000. Seeds are fixed, so that a run of these tests says the same as the last.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from sglang_patches.bench import statistics
from sglang_patches.bench.statistics import Comparison, compare
from sglang_patches.errors import PatchError
from sglang_patches.student import ratio_of

Noise = Callable[[np.random.Generator], float]

RUNS = 1000
STATED = 0.05
ALLOWED = STATED + 3.1 * math.sqrt(STATED * (1 - STATED) / RUNS)

#: Relative noise of a turn, and drift from turn to turn.
NOISES: dict[str, tuple[Noise, float]] = {
    "0.5 %": (lambda random: random.normal(0, 0.005), 0),
    "2 %": (lambda random: random.normal(0, 0.02), 0),
    "4 %": (lambda random: random.normal(0, 0.04), 0),
    "drift of 1 % a turn": (lambda random: random.normal(0, 0.005), -0.01),
    "drift of 0.1 % a turn": (lambda random: random.normal(0, 0.02), -0.001),
    "heavy tails": (lambda random: 0.01 * random.standard_t(2), 0),
    "lopsided": (lambda random: -0.02 * random.exponential(), 0),
    "two modes": (lambda random: random.normal(0, 0.003) - 0.03 * (random.random() < 0.5), 0),
    "now and then 10 % slower": (lambda random: random.normal(0, 0.005) - 0.1 * (random.random() < 0.1), 0),
}


def turns(
    random: np.random.Generator, noise: Noise, drift: float, rounds: int = 4, ratio: float = 1.0, orders: str = "ab ba"
) -> tuple[list[float], list[float]]:
    """Tokens per second of both arms' turns, served one after another; B's are `ratio` times A's."""
    figures: dict[str, list[float]] = {"a": [], "b": []}
    served = 0
    for block in range(rounds):
        for arm in orders.split()[block % 2]:
            figures[arm].append(90 * (ratio if arm == "b" else 1) * math.exp(drift * served + noise(random)))
            served += 1
    return figures["a"], figures["b"]


def verdicts(name: str, rounds: int = 4, ratio: float = 1.0, orders: str = "ab ba", runs: int = RUNS) -> Counter[str]:
    random = np.random.default_rng(2)
    pairs = (turns(random, *NOISES[name], rounds, ratio, orders) for _ in range(runs))
    return Counter(compare(*pair, higher_is_better=True, seed=at).verdict for at, pair in enumerate(pairs))


def wrong(found: Counter[str]) -> float:
    return (found["FASTER"] + found["SLOWER"]) / found.total()


@pytest.mark.parametrize("name", NOISES)
def test_four_rounds_of_the_same_are_told_apart_no_more_often_than_stated(name: str) -> None:
    assert wrong(verdicts(name)) <= ALLOWED


@pytest.mark.parametrize("rounds", [2, 3, 8])
@pytest.mark.parametrize("name", ["2 %", "heavy tails", "lopsided"])
def test_neither_are_fewer_rounds_or_more(name: str, rounds: int) -> None:
    assert wrong(verdicts(name, rounds)) <= ALLOWED


def test_without_noise_to_speak_of_the_same_is_told_to_be_the_same() -> None:
    assert verdicts("0.5 %", rounds=8)["SAME"] > 0.7 * RUNS


def test_a_percentile_bootstrap_alone_would_fail_these_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    def percentile(logs: np.ndarray, confidence: float, comparisons: int, seed: int) -> tuple[float, float]:
        drawn = np.random.default_rng(seed).choice(logs, (500, len(logs))).mean(axis=1)
        low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
        return ratio_of(low), ratio_of(high)

    monkeypatch.setattr(statistics, "_bounds", percentile)
    assert wrong(verdicts("2 %")) > 2 * ALLOWED


def test_a_drift_would_fool_an_order_that_does_not_alternate() -> None:
    assert wrong(verdicts("drift of 1 % a turn", orders="ab ab")) > 2 * ALLOWED


@pytest.mark.parametrize("seed", range(10))
def test_default_against_default_is_never_faster_or_slower(seed: int) -> None:
    a, b = turns(np.random.default_rng(seed), *NOISES["drift of 0.1 % a turn"])
    assert compare(a, b, higher_is_better=True, seed=seed).verdict in ("SAME", "AMBIGUOUS")


def test_a_planted_slow_down_of_10_percent_is_slower() -> None:
    found = verdicts("2 %", ratio=0.9)
    assert found["SLOWER"] > 0.97 * RUNS
    assert found["FASTER"] == found["SAME"] == 0
    times = [[1000 / tokens for tokens in arm] for arm in turns(np.random.default_rng(1), *NOISES["2 %"], ratio=0.9)]
    slower = compare(times[0], times[1], higher_is_better=False)
    assert slower.verdict == "SLOWER"
    assert slower.ratio == pytest.approx(1 / 0.9, rel=0.03)
    assert compare(times[1], times[0], higher_is_better=False).verdict == "FASTER"


@pytest.mark.parametrize(("rounds", "comparisons"), [(3, 1), (4, 1), (4, 8), (10, 1)])
def test_the_smallest_detectable_difference_is_detected_as_often_as_its_power_says(
    rounds: int, comparisons: int
) -> None:
    random, spread, runs = np.random.default_rng(3), 0.02, 1000
    seen = random.normal(0, 1, rounds)
    logs = spread * (seen - seen.mean()) / seen.std(ddof=1)  # a run that saw exactly the spread there is
    told = compare([1.0] * rounds, np.exp(logs).tolist(), higher_is_better=True, comparisons=comparisons)
    found = 0
    for at in range(runs):
        again = np.exp(random.normal(math.log1p(told.smallest_detectable), spread, rounds))
        verdict = compare(
            [1.0] * rounds, again.tolist(), higher_is_better=True, margin=0, comparisons=comparisons, seed=at
        ).verdict
        found += verdict == "FASTER"
    assert found / runs == pytest.approx(0.8, abs=0.05)


def test_more_comparisons_are_wrong_together_no_more_often_than_one() -> None:
    random, figures, any_wrong = np.random.default_rng(4), 5, 0
    for at in range(300):
        pairs = [turns(random, *NOISES["2 %"]) for _ in range(figures)]
        found = [compare(*pair, higher_is_better=True, comparisons=figures, seed=at).verdict for pair in pairs]
        any_wrong += "FASTER" in found or "SLOWER" in found
    assert any_wrong / 300 <= STATED + 3.1 * math.sqrt(STATED * (1 - STATED) / 300)


def test_a_lopsided_spread_widens_the_interval_beyond_students() -> None:
    values = np.exp([0.0, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.3]).tolist()
    found = compare([1.0] * 8, values, higher_is_better=True)
    logs = np.log(values)
    student = math.exp(logs.mean() + 2.364624 * logs.std(ddof=1) / math.sqrt(8))
    assert found.high > 1.01 * student
    assert compare([1.0] * 8, values, higher_is_better=True) == found  # the same seed


@pytest.mark.parametrize(
    ("ratios", "better", "verdict"),
    [
        ([1.0, 1.0], "higher", "SAME"),
        ([1.009, 1.009], "higher", "SAME"),  # excludes 1, but within the margin
        ([1.02, 1.02], "higher", "FASTER"),
        ([1.02, 1.02], "lower", "SLOWER"),
        ([0.98, 0.98], "higher", "SLOWER"),
        ([0.98, 0.98], "lower", "FASTER"),
        ([0.98, 1.02], "higher", "AMBIGUOUS"),
        ([1.02], "higher", "AMBIGUOUS"),  # one round alone
    ],
)
def test_verdicts(ratios: list[float], better: str, verdict: str) -> None:
    found = compare([50.0] * len(ratios), [50 * ratio for ratio in ratios], higher_is_better=better == "higher")
    assert found.verdict == verdict
    assert found.rounds == len(ratios)


def test_what_slows_a_whole_round_cancels() -> None:
    slow = [1.0, 0.5, 0.9, 0.7]
    found = compare([100 * at for at in slow], [110 * at for at in slow], higher_is_better=True)
    assert (found.low, found.ratio, found.high) == pytest.approx((1.1, 1.1, 1.1))


def test_one_round_tells_nothing_and_its_document_is_json() -> None:
    found = compare([1.0], [2.0], higher_is_better=True)
    assert (found.low, found.high, found.smallest_detectable) == (0, math.inf, math.inf)
    document = json.loads(json.dumps(found.document(), allow_nan=False))
    assert (document["low"], document["high"], document["smallest_detectable"]) == (0, None, None)
    assert document["verdict"] == "AMBIGUOUS"
    assert set(document) == set(Comparison.__dataclass_fields__)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_figure_that_has_no_logarithm_is_named(value: float) -> None:
    with pytest.raises(PatchError, match=r"verify_ms of B is \S+ in round 1\n"):
        compare([1.0, 1.0], [1.0, value], higher_is_better=False, figure="verify_ms")
    with pytest.raises(PatchError, match="verify_ms of A is"):
        compare([value], [1.0], higher_is_better=False, figure="verify_ms")


def test_what_cannot_be_compared_is_named() -> None:
    with pytest.raises(PatchError, match="2 rounds of A and 1 of B"):
        compare([1.0, 1.0], [1.0], higher_is_better=True)
    with pytest.raises(PatchError, match="no round"):
        compare([], [], higher_is_better=True)
    for option in ({"margin": 1.5}, {"confidence": 95.0}, {"comparisons": 0}):
        with pytest.raises(PatchError, match=f"{next(iter(option))} is"):
            compare([1.0], [1.0], higher_is_better=True, **option)  # type: ignore[arg-type]
