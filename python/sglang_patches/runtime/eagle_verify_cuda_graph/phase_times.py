"""How long the phases of a speculative cycle take, without waiting for the GPU.

On a GPU two events on the stream enclose a phase; they are read in a later decode step, if the GPU has passed them by
then. On a CPU forwards are done when they return, so the host's clock is right. Measured where metrics are on, by the
rank that speaks for its attention group.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from sglang_patches import lane
from sglang_patches.runtime import _metrics, _ranks
from sglang_patches.runtime.eagle_verify_cuda_graph import counting
from sglang_patches.runtime.eagle_verify_cuda_graph.counting import PATCH, contained
from sglang_patches.runtime.eagle_verify_cuda_graph.reasons import Phase

# Phases that may wait to be read; while so many do, no more are measured (nobody reads, or the GPU is far behind).
MOST_WAITING = 256


class Clock(Protocol):
    """Marks moments of the current stream, and tells later what lay between two of them."""

    name: str

    def mark(self) -> Any:
        """Now, on the stream."""

    def between(self, start: Any, end: Any) -> float | None:
        """Seconds, or None while the stream has not reached `end`."""

    def done(self, *marks: Any) -> None:
        """Marks that are not needed any more."""


class HostClock:
    """Of a device that works while the host waits."""

    name = "host"

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, start: float, end: float) -> float | None:
        return end - start

    def done(self, *marks: float) -> None:
        pass


class DeviceClock:
    """Events on the current stream; none is ever waited for.

    Args:
        make: an event with timing, by default ``torch.cuda.Event``.
    """

    name = "device"

    def __init__(self, make: Callable[[], Any] | None = None) -> None:
        self._make = make or _cuda_event
        self._free: list[Any] = []

    def mark(self) -> Any:
        event = self._free.pop() if self._free else self._make()
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float | None:
        return float(start.elapsed_time(end)) / 1000 if end.query() else None

    def done(self, *marks: Any) -> None:
        self._free.extend(marks)


def _cuda_event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)


class PhaseTimes:
    """The phases of one process that were measured and not yet told.

    Args:
        clock: None where nothing is measured.
    """

    def __init__(self, clock: Clock | None) -> None:
        self.clock = clock
        self._waiting: deque[tuple[Phase, Any, Any]] = deque()

    def start(self) -> Any:
        """The mark at which a phase begins; None where it is not measured."""
        if self.clock is None or len(self._waiting) >= MOST_WAITING:
            return None
        return self.clock.mark()

    def end(self, phase: Phase, start: Any) -> None:
        """The phase that began at `start` has been issued to the device."""
        if self.clock is not None:
            self._waiting.append((phase, start, self.clock.mark()))

    def finished(self) -> list[tuple[Phase, float]]:
        """Phases that the device has gone through since the last call, with their seconds, in order."""
        found: list[tuple[Phase, float]] = []
        while self.clock is not None and self._waiting:
            phase, start, end = self._waiting[0]
            seconds = self.clock.between(start, end)
            if seconds is None:
                break
            self._waiting.popleft()
            self.clock.done(start, end)
            found.append((phase, seconds))
        return found

    def export(self, labels: Mapping[str, Any]) -> None:
        """Tell Prometheus what `finished` gives.

        Args:
            labels: upstream's own, from its metrics collector.
        """
        if self.clock is None:
            return
        for phase, seconds in self.finished():
            child = _metrics.SPEC_PHASE_SECONDS.child(labels, phase=phase.value, clock=self.clock.name)
            child.observe(seconds)


@functools.cache
def phase_times() -> PhaseTimes:
    """This process's, made when the first phase runs: ranks, device and arguments are known then."""
    return PhaseTimes(contained("time", _clock))


def _clock() -> Clock | None:
    context = lane.here().runtime_context()
    if not context.get_observability().enable_metrics or not _ranks.answers():
        return None
    return {"cpu": HostClock, "cuda": DeviceClock}.get(str(context.get_device().device), lambda: None)()


def _start(batch: Any) -> Any:
    return None if batch.forward_mode.is_idle() else phase_times().start()


def times(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a method ``(self, batch, ...)`` of upstream's EAGLE workers that runs the phase `name`.

    A data-parallel rank without requests is not measured: it computes nothing.
    """
    phase = Phase(name)

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(self: Any, batch: Any, *rest: Any, **named: Any) -> Any:
            start = contained("time", _start, batch)
            result = method(self, batch, *rest, **named)
            if start is not None:
                contained("time", phase_times().end, phase, start)
            return result

        return timed

    return decorate


def _export(labels: Mapping[str, Any]) -> None:
    contained("export", counting.passes.export, labels)
    contained("export", phase_times().export, labels)


export_passes = _metrics.on_decode_step(PATCH, _export)
