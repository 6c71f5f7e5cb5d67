"""How fast the host computes, beside cycles that may have waited for it.

On machines that share their cores a scheduler's Python takes now 1 and now 1.6 times as long, for seconds or minutes.
A cycle that the GPU limits does not notice; one that waits for the host is longer by as much, and a patch that was on
in a slow minute looks slow. A loop that is always the same tells the two apart.
"""

from __future__ import annotations

import time

_ADDITIONS = 20_000
_LOOPS = 5


def loops() -> list[float]:
    """Milliseconds that a fixed loop of Python (20,000 additions) took, five times, in this process."""
    taken = []
    for _ in range(_LOOPS):
        begun = time.perf_counter()
        total = 0
        for number in range(_ADDITIONS):
            total += number
        taken.append(round((time.perf_counter() - begun) * 1e3, 4))
    return taken
