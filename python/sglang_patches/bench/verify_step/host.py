"""How fast the host computes, beside cycles that may have waited for it.

On machines that share their cores a scheduler's Python takes now 1 and now 1.6 times as long, for seconds or minutes.
A cycle that the GPU limits does not notice; one that waits for the host is longer by as much, and a patch that was on
in a slow minute looks slow. A loop that is always the same tells the two apart. It tells how fast the core is between
the cycles; other work on the same cores takes them away for moments, which it sees where they fall into it.
"""

from __future__ import annotations

import time

# Some 20 ms, in one piece: what takes the core away does so for a few milliseconds at a time, which the middle of many
# short loops would not see.
_ADDITIONS = 600_000


def loop() -> float:
    """Milliseconds that a fixed loop of Python (600,000 additions) takes now, in this process."""
    begun = time.perf_counter()
    total = 0
    for number in range(_ADDITIONS):
        total += number
    return round((time.perf_counter() - begun) * 1e3, 3)
