"""In which order `nccl tune` measures, without processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from sglang_patches.nccl import tune
from sglang_patches.nccl.candidates import AS_IT_COMES, Candidate
from sglang_patches.nccl.group import Job, Outcome
from sglang_patches.nccl.settings import Settings

NAMES = (AS_IT_COMES, *(f"setting-{index}" for index in range(7)))
ROUNDS = 6


class NoGroup:
    """Stands in for `group.Group`: measures nothing, well."""

    def __init__(self, job: Job, folder: Path, environment: Mapping[str, str]) -> None:
        self.job = job

    def prepare(self, timeout: float) -> None:
        pass

    def run(self, timeout: float) -> Outcome:
        return Outcome("measured", "", 0.0, [{"sizes": {"nccl": {"1": {"us": [1.0, 2.0]}}}}])

    def end(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "Group", NoGroup)


def orders(seed: int, ahead: int) -> list[list[str]]:
    """The names of each round, as they were run."""
    plan = tune.Plan(Job("nccl", 1, (), (1,), 8), tuple(map(Candidate, NAMES)), ROUNDS, seed=seed, ahead=ahead)
    runs = tune.measure(plan, Settings({}, {})).runs
    assert [run.round for run in runs] == sorted(run.round for run in runs)
    found = [[run for run in runs if run.round == number] for number in range(ROUNDS)]
    for turn in found:
        assert [run.order for run in turn] == list(range(len(turn)))
    return [[run.candidate for run in turn] for turn in found]


@pytest.mark.parametrize("ahead", [1, 3])
def test_every_round_has_every_candidate_once_in_an_order_of_its_own(ahead: int) -> None:
    found = orders(seed=1, ahead=ahead)
    assert all(sorted(turn) == sorted(NAMES) for turn in found)
    # Of six draws from 40,320 orders two alike would be strange, and so would a baseline always in one place.
    assert len({tuple(turn) for turn in found}) == ROUNDS
    assert len({turn.index(AS_IT_COMES) for turn in found}) > 1


def test_the_order_follows_the_seed_alone() -> None:
    assert orders(1, ahead=1) == orders(1, ahead=3)
    assert orders(1, ahead=1) != orders(2, ahead=1)
