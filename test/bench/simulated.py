"""Turns without servers: a journal whose figures follow from what an arm serves, with noise and drift as asked for."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from sglang_patches.bench.changes import Change, Changes
from sglang_patches.bench.deltas import Subset
from sglang_patches.bench.model import Arm, Turn
from sglang_patches.bench.turns import TurnFailed
from sglang_patches.series import Series


class NamedChanges(Changes):
    """Changes called c0, c1, ...: an arm's spec lists those that it has."""

    def arm(self, name: str, subset: Subset) -> Arm:  # type: ignore[override]
        return Arm(name=name, spec=" ".join(self.list[index].label for index in sorted(subset)) or "good")


def changes(count: int, needs: dict[int, tuple[int, ...]] | None = None) -> NamedChanges:
    """So many changes between `good` and `bad`."""
    listed = tuple(Change("patch", f"c{index}", f"c{index}") for index in range(count))
    every = " ".join(change.label for change in listed)
    return NamedChanges(
        good=Arm(name="good", spec="good"),
        bad=Arm(name="bad", spec=every),
        series=Series("0", Path(), ()),
        list=listed,
        needs=tuple((needs or {}).get(index, ()) for index in range(count)),
    )


class Progress:
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


class Journal:
    """Stands in for `bench.journal.Journal`: `figure` gives, for the indices of the changes on, the true figure.

    Args:
        noise: standard deviation of the figure's logarithm between turns.
        drift: what the logarithm grows by with each turn.
        jump: from which turn on the figure is so many times as large.
        fails: whether the server with these changes fails.
    """

    def __init__(
        self,
        folder: Path,
        figure: Callable[[Subset], float],
        *,
        metric: str = "verify_ms",
        noise: float = 0.0,
        drift: float = 0.0,
        jump: tuple[int, float] = (0, 1.0),
        seed: int = 0,
        fails: Callable[[Subset], bool] = lambda subset: False,
    ) -> None:
        self.folder, self.progress = folder, Progress()
        self.starts: list[Subset] = []
        self.turns: list[Turn] = []
        self.expected: list[int] = []
        self._figure, self._metric, self._noise, self._drift, self._fails = figure, metric, noise, drift, fails
        self._random, self._jump = random.Random(seed), jump

    def expect(self, turns: int) -> None:
        self.expected.append(turns)

    def turn(self, arm: Arm, block: int) -> Turn:
        subset = frozenset(int(word[1:]) for word in arm.spec.split() if word != "good")
        self.starts.append(subset)
        if self._fails(subset):
            raise TurnFailed(f"turn {len(self.turns)} (arm {arm.name}, {arm.spec}): the server ended")
        wobble = self._jump[1] if len(self.turns) >= self._jump[0] else 1.0
        wobble *= 2.718281828459045 ** (self._random.gauss(0, self._noise) + self._drift * len(self.turns))
        turn = Turn(
            index=len(self.turns), block=block, arm=arm.name, ready_s=1.0,
            figures={self._metric: self._figure(subset) * wobble}, output_sha256=None, document=None,
        )  # fmt: skip
        self.turns.append(turn)
        return turn
