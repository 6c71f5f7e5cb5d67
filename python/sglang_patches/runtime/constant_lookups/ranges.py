"""A named range costs the same whether a profiler records it or not; without one, it is left out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def only_while_recorded(ranged: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate what ``torch.profiler.record_function(name)`` has decorated.

    The range is opened while any of torch's profilers runs that would see it: in this thread or in all (kineto, the
    legacy one, one that is asked for from outside), NVTX and ITT emission, and torch's CUPTI monitor.
    """
    bare = getattr(ranged, "__wrapped__", None)
    if bare is None:
        return ranged
    from torch.autograd import profiler

    enabled = profiler.torch.autograd._profiler_enabled

    @functools.wraps(bare)
    def method(*args: Any, **named: Any) -> Any:
        if enabled() or profiler._active_cupti_profiler_observer is not None:
            return ranged(*args, **named)
        return bare(*args, **named)

    return method
