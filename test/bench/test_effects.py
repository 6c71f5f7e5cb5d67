"""Effects recovered from simulated turns, and how often their intervals hold."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from sglang_patches.bench.design import Design, fraction, full, order
from sglang_patches.bench.effects import Effects, Observation, fit
from sglang_patches.errors import PatchError
from sglang_patches.student import Floats

PLANTED = {"a": 0.9, "c": 1.05, "a x b": 0.94}  # ratios


def simulated(
    design: Design,
    planted: Mapping[str, float],
    rounds: int,
    seed: int,
    spread: float = 0.02,
    drift: float = 0.0,
    heavy: bool = False,
) -> list[Observation]:
    """Turns whose factors do what is planted, and a level of each round's own."""
    random = np.random.default_rng(seed)
    settings = design.levels > 0
    found = []
    served = 0
    for at, runs in enumerate(order(design, rounds, seed)):
        level = math.log(90) + random.normal(0, 0.05)
        for position, run in enumerate(runs):
            log = level + drift * served
            for name, ratio in planted.items():
                on = [bool(settings[run, design.factors.index(factor)]) for factor in name.split(" x ")]
                # A main effect is there where its factor is on, an interaction where both are.
                log += math.log(ratio) * all(on)
            noise = random.standard_t(3) / math.sqrt(3) if heavy else random.normal()
            found.append(Observation(at, position, run, math.exp(log + spread * noise)))
            served += 1
    return found


def fitted(design: Design, seen: list[Observation], **options: float) -> Effects:
    return fit(design, seen, figure="tokens_per_s", higher_is_better=True, **options)


def test_without_noise_effects_are_exact() -> None:
    design = full("abc")
    seen = [
        Observation(o.round, o.position, o.run, o.value)
        for o in simulated(design, PLANTED, rounds=2, seed=1, spread=0, drift=-0.003)
    ]
    found = fitted(design, seen)
    by_name = {effect.name: effect for effect in found.effects}
    # Averaged over b, of which a's interaction is there half of the time.
    assert by_name["a"].ratio == pytest.approx(0.9 * 0.94**0.5)
    assert by_name["b"].ratio == pytest.approx(0.94**0.5)
    assert by_name["c"].ratio == pytest.approx(1.05)
    assert by_name["a x b"].ratio == pytest.approx(0.94)
    assert by_name["a x c"].ratio == pytest.approx(1)
    assert {name: effect.verdict for name, effect in by_name.items()} == {
        "a": "SLOWER", "b": "SLOWER", "c": "FASTER", "a x b": "SLOWER", "a x c": "SAME", "b x c": "SAME",
    }  # fmt: skip
    assert found.drift == pytest.approx(math.exp(-0.003) - 1)
    assert found.freedom == 16 - 2 - 6 - 1
    assert found.residual == pytest.approx(0, abs=1e-9)
    assert json.loads(json.dumps(found.document(), allow_nan=False))["effects"][0]["verdict"] == "SLOWER"


def test_planted_effects_are_found_at_two_percent_noise_and_lower_is_better_turns_them() -> None:
    design = full("abc")
    seen = simulated(design, {"a": 0.9}, rounds=4, seed=2)
    verdicts = {effect.name: effect.verdict for effect in fitted(design, seen).effects}
    assert verdicts.pop("a") == "SLOWER"
    assert set(verdicts.values()) <= {"SAME", "AMBIGUOUS"}
    turned = fit(design, seen, figure="verify_ms", higher_is_better=False)
    assert turned.effects[0].verdict == "FASTER"
    assert turned.residual == pytest.approx(0.02, rel=0.4)


def test_in_a_fraction_an_alias_carries_the_effect_and_is_named() -> None:
    design = fraction("abcd", 2)
    found = fitted(design, simulated(design, {"c x d": 1.1}, rounds=2, seed=3, spread=0))
    effect = next(effect for effect in found.effects if effect.name == "a x b")
    assert effect.aliases == ("c x d",)
    assert effect.ratio == pytest.approx(1.1)
    # c and d, each on in half of the runs with the other one, are not disturbed by it.
    assert {e.name: round(e.ratio, 6) for e in found.effects if e.kind == "main"} == {
        "a": 1.0, "b": 1.0, "c": round(1.1**0.5, 6), "d": round(1.1**0.5, 6),
    }  # fmt: skip


@pytest.mark.parametrize("heavy", [False, True], ids=["normal", "heavy tails"])
@pytest.mark.parametrize(
    ("factors", "of", "rounds", "drift"),
    [("ab", 1, 2, 0.0), ("ab", 1, 3, -0.003), ("abc", 1, 2, -0.005), ("abcd", 2, 3, 0.002)],
)
def test_intervals_hold_as_often_as_they_say(factors: str, of: int, rounds: int, drift: float, heavy: bool) -> None:
    design, trials = fraction(factors, of), 300
    single, together = 0, 0
    for seed in range(trials):
        effects = fitted(design, simulated(design, {}, rounds, seed, drift=drift, heavy=heavy)).effects
        single += sum(effect.low <= 1 <= effect.high for effect in effects)
        together += all(effect.low_adjusted <= 1 <= effect.high_adjusted for effect in effects)
    # Effects of one run share their residual, so the allowance is that of the runs: 3.1 binomial standard deviations.
    allowed = 3.1 * math.sqrt(0.05 * 0.95 / trials)
    assert single / trials / len(design.terms) >= 0.95 - allowed
    assert together / trials >= 0.95 - allowed
    if not heavy and (factors, drift) != ("ab", -0.003):
        assert single / trials / len(design.terms) <= 0.95 + allowed  # no wider than they must be


Noise = Callable[[np.random.Generator, int], Floats]  # of so many turns


def alike(likeness: float) -> Noise:
    """AR(1): turns in a row are that much correlated; 2 % each."""

    def noise(random: np.random.Generator, turns: int) -> Floats:
        found = random.normal(0, 0.02, turns)
        for at in range(1, turns):
            found[at] = likeness * found[at - 1] + math.sqrt(1 - likeness**2) * found[at]
        return found

    return noise


def slow_wave(random: np.random.Generator, turns: int) -> Floats:
    """2 % up and down, of any phase, in a third of the run to twice the run; a turn scatters by 0.5 % about it."""
    cycles = math.exp(random.uniform(math.log(0.5), math.log(3)))
    angle = 2 * math.pi * (cycles * np.arange(turns) / turns + random.uniform())
    return 0.02 * np.sin(angle) + random.normal(0, 0.005, turns)


def steps(random: np.random.Generator, turns: int) -> Floats:
    """5 % faster from some turn on, as after a pause."""
    return 0.05 * (np.arange(turns) >= random.integers(1, turns)) + random.normal(0, 0.01, turns)


def wandering(design: Design, rounds: int, noise: Noise, seed: int) -> Effects:
    """Effects of turns that differ by what the machine does and nothing else; ten runs share an order."""
    values = np.exp(noise(np.random.default_rng(seed), design.runs * rounds))
    places = [(at, *place) for at, runs in enumerate(order(design, rounds, seed // 10)) for place in enumerate(runs)]
    return fitted(design, [Observation(*at, float(value)) for at, value in zip(places, values, strict=True)])


@pytest.mark.parametrize(
    ("factors", "of", "rounds", "noise"),
    [
        ("ab", 1, 3, slow_wave),
        ("ab", 1, 4, alike(0.9)),
        ("abc", 1, 2, slow_wave),
        ("abc", 1, 2, alike(0.9)),
        ("abc", 1, 4, slow_wave),
        ("abcd", 2, 2, alike(0.5)),
        ("abcd", 1, 2, slow_wave),
        ("abcd", 1, 2, steps),
    ],
)
def test_a_machine_that_wanders_feigns_no_effect_more_often_than_is_said(
    factors: str, of: int, rounds: int, noise: Noise
) -> None:
    design, trials = fraction(factors, of), 400
    found = [wandering(design, rounds, noise, seed) for seed in range(trials)]
    wrong = sum(any(not e.low_adjusted <= 1 <= e.high_adjusted for e in one.effects) for one in found)
    assert wrong / trials <= 0.05 + 3.1 * math.sqrt(0.05 * 0.95 / trials)


def test_a_drift_of_each_round_finds_small_effects_on_a_machine_that_wanders() -> None:
    found = [wandering(full("abc"), 4, slow_wave, seed) for seed in range(60)]
    assert {one.freedom for one in found} == {32 - 4 - 6 - 4}
    # One drift for all rounds leaves 1.3 %.
    assert float(np.median([one.effects[0].smallest_detectable for one in found])) < 0.01


def test_the_smallest_detectable_effect_is_found_as_often_as_its_power_says() -> None:
    design, found = full("ab"), 0
    told = []
    for seed in range(300):
        told.append(fitted(design, simulated(design, {}, 4, seed)).effects[0].smallest_detectable)
    for seed in range(300, 600):
        # Residuals scatter about the true 2 %: the median of what runs tell is what the true spread tells.
        planted = {"a": 1 + float(np.median(told))}
        found += fitted(design, simulated(design, planted, 4, seed), margin=0).effects[0].verdict == "FASTER"
    assert found / 300 == pytest.approx(0.8, abs=0.08)


def test_what_cannot_be_fitted_is_refused() -> None:
    design = full("ab")
    seen = simulated(design, {}, 2, 0)
    with pytest.raises(PatchError, match=r"round 1 has runs .*\n  expected   each of the 4 runs once"):
        fitted(design, seen[:-1])
    with pytest.raises(PatchError, match=r"1 round tells 3 effects and nothing of the noise.*\n.*\n.*--rounds 2"):
        fitted(design, seen[:4])
    with pytest.raises(PatchError, match=r"0 rounds .*\n  expected   at least 2 rounds"):
        fitted(design, [])
    with pytest.raises(PatchError, match=r"tokens_per_s is 0\.0 in round 3"):
        fitted(design, [*seen[:3], Observation(0, 3, seen[3].run, 0.0), *seen[4:]])
    with pytest.raises(PatchError, match="confidence is 2"):
        fitted(design, seen, confidence=2)


@pytest.mark.parametrize("rounds", [1, 3])
def test_turns_in_an_order_that_goes_with_the_factors_leave_the_drift_out(rounds: int) -> None:
    """In Yates' order the position is a sum of main effects: there is no telling them from a drift."""
    design = full("abcd")
    random = np.random.default_rng(7)
    seen = [
        Observation(at, run, run, 90 * (0.9 if design.levels[run][0] > 0 else 1) * math.exp(random.normal(0, 0.001)))
        for at in range(rounds)
        for run in range(design.runs)
    ]
    found = fitted(design, seen)
    assert found.drift is None
    assert found.freedom == 16 * rounds - rounds - 10
    assert found.effects[0].ratio == pytest.approx(0.9, rel=0.01)
    assert found.effects[0].verdict == "SLOWER"
