"""Shows how far a run is, what it does now, and the time left: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar


class Progress(AbstractContextManager["Progress"]):
    """Turns done of those expected; the time left is by the mean of the turns measured in this run."""

    def __init__(self, quiet: bool = False) -> None:
        self.total = 0
        self.done = 0
        self._quiet = quiet
        self._took: list[float] = []
        self._started = 0.0
        self._phase = ""
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
        )
        on_screen = sys.stderr.isatty() and not quiet
        self._bar = Bar(*columns, console=Console(stderr=True)) if on_screen else None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=None, left="")
        return self

    def __exit__(self, *failure: Any) -> None:
        if self._bar is not None:
            self._bar.stop()

    def left(self) -> float | None:
        """Seconds left, as far as can be told."""
        if not self._took or not self.total:
            return None
        running = time.monotonic() - self._started if self._started else 0.0
        return max(0.0, (self.total - self.done) * sum(self._took) / len(self._took) - running)

    def begin(self, what: str) -> None:
        """A turn is going to be measured."""
        self._started = time.monotonic()
        self._what = what
        self.phase("starting the server")

    def phase(self, text: str) -> None:
        """What the turn does now; equal texts in a row are shown once where lines are shown."""
        if self._bar is not None:
            left = self.left()
            self._bar.update(
                self._task,
                total=self.total or None,
                completed=self.done,
                description=f"{self._what}: {text}",
                left="" if left is None else f"{_minutes(left)} left",
            )
        elif not self._quiet and text.partition(",")[0] != self._phase.partition(",")[0]:
            print(f"  {self._what}: {text}", file=sys.stderr, flush=True)
        self._phase = text

    def end(self, said: str) -> None:
        """The turn is measured and kept."""
        self._took.append(time.monotonic() - self._started)
        self._started = 0.0
        self.done += 1
        left = self.left()
        more = "" if left is None or self.done >= self.total else f", {_minutes(left)} left"
        line = f"{self.done}/{self.total or '?'} {self._what}: {said}{more}"
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
            self.phase("done")
        elif not self._quiet:
            print(line, file=sys.stderr, flush=True)

    def say(self, line: str) -> None:
        """A remark."""
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        elif not self._quiet:
            print(line, file=sys.stderr, flush=True)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
