"""Progress lines with rate and time left."""

from __future__ import annotations

import time


class Progress:
    """Prints at most one line in `every` seconds, and how long the whole took."""

    def __init__(self, name: str, unit: str, every: float = 5.0) -> None:
        self.name, self.unit, self.every = name, unit, every
        self.started = self.printed = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started

    def update(self, done: float, fraction: float, note: str = "") -> None:
        """Report `done` units, `fraction` (0 to 1) of the work."""
        if time.perf_counter() - self.printed >= self.every:
            self.printed = time.perf_counter()
            left = self.elapsed * (1 - fraction) / max(fraction, 1e-9)
            rate = done / self.elapsed
            print(f"{self.name}: {fraction:4.0%} {rate:,.0f} {self.unit}/s, {left:.0f} s left {note}", flush=True)

    def finish(self, done: float) -> None:
        """Print the total."""
        print(f"{self.name}: {done:,.0f} {self.unit} in {self.elapsed:.1f} s", flush=True)
