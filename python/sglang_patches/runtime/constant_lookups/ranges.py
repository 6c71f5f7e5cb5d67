"""A named range costs the same whether a profiler records it or not; without one, it is left out."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

# torch's own question before it tells anyone of a range, ``at::hasCallbacks()`` of ATen/record_function.h. Python has
# none that sees every listener: ``_profiler_enabled`` knows neither profilers of all threads nor execution traces.
_HAS_LISTENERS = "_ZN2at12hasCallbacksEv"


def only_while_recorded(ranged: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate what ``torch.profiler.record_function(name)`` has decorated.

    The range is opened while anyone listens to ranges in this thread, whichever profiler or trace it is and whoever
    started it, or torch's CUPTI monitor runs, which is told by Python.
    """
    bare = getattr(ranged, "__wrapped__", None)
    listened = _listened()
    if bare is None or listened is None:
        return ranged
    from torch.autograd import profiler

    @functools.wraps(bare)
    def method(*args: Any, **named: Any) -> Any:
        if listened() or profiler._active_cupti_profiler_observer is not None:
            return ranged(*args, **named)
        return bare(*args, **named)

    return method


@functools.cache
def _listened() -> Callable[[], bool] | None:
    """Whether this thread's ranges are recorded; None where torch does not tell."""
    import torch

    try:
        # Without giving up the interpreter's lock, which another thread might then keep for milliseconds.
        asks = ctypes.PyDLL(torch._C.__file__)[_HAS_LISTENERS]
    except (OSError, AttributeError):
        return None
    asks.argtypes, asks.restype = [], ctypes.c_bool
    return asks
