"""What the planted patches do to `EAGLEWorkerV2.verify`: imported by the servers under test, shipped nowhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

Verify = Callable[..., Any]

# What a slow verify pass waits: so many seconds, which scatter less than the passes of a busy machine do (the bundled
# model's cycle takes about 40 ms), or so many times this process' fastest pass, which is more on a slow machine.
WAIT, TIMES = 0.15, 5.0

_present: set[str] = set()


def _slowed(verify: Verify, applies: Callable[[], bool]) -> Verify:
    fastest = float("inf")

    @wraps(verify)
    def slow(*args: Any, **kwargs: Any) -> Any:
        nonlocal fastest
        began = time.perf_counter()
        result = verify(*args, **kwargs)
        fastest = min(fastest, time.perf_counter() - began)
        if applies():
            time.sleep(max(WAIT, TIMES * min(fastest, WAIT)))  # bounded: the first pass of all may take a second
        return result

    return slow


def slow_alone(verify: Verify) -> Verify:
    """Slow by itself."""
    return _slowed(verify, lambda: True)


def slow_left(verify: Verify) -> Verify:
    """Slow together with `slow_right` only: this half is just there."""
    _present.add("left")
    return verify


def slow_right(verify: Verify) -> Verify:
    """The half that waits, if the other is there."""
    return _slowed(verify, lambda: "left" in _present)
