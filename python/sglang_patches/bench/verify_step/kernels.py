"""Runs inside the scheduler process: which kernels a cycle launches, and how long each works, by part of the cycle.

Upstream's parts are told apart on the device itself: at every edge a marker kernel (``torch.cuda._sleep``) is put on
the stream, and an operation belongs to the part whose marker started last before it. Profiling slows the host, so these
passes are no timing samples; kernels keep their own duration.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

_MARKER = "spin_kernel"
#: Kernels told of each pass, those of most time.
_KEPT = 40
_NAME_LENGTH = 200


class Profile:
    """Records all work of the device from its making until `take`."""

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available()
        activity = torch.profiler.ProfilerActivity
        self._entered: list[tuple[str, int]] = []
        self._profiler = torch.profiler.profile(activities=[activity.CUDA if self._cuda else activity.CPU])
        self._profiler.start()

    def enter(self, part: str, batch_size: int) -> None:
        """A part of a cycle of this batch size begins, or its ``host_gap``, or ``prefill``."""
        self._entered.append((part, batch_size))
        if self._cuda:
            torch.cuda._sleep(1)

    def take(self, parts: tuple[str, ...], batch_size: int) -> dict[str, Any]:
        """Stop, and tell per cycle of this batch size; prefill and other sizes, as batches begin and end, are left out.

        On a CPU operations cannot be told apart, so those are in the sums.

        Returns: ``cycles``; ``busy`` (milliseconds in which the device did anything, overlaps once); ``operations``;
        ``kernels``: those of most time, each with ``part`` (None where parts could not be told apart), ``name``,
        ``launches`` and ``us`` (microseconds), all per cycle.
        """
        if self._cuda:
            torch.cuda.synchronize()
        self._profiler.stop()
        cycles = sum(part == parts[0] and (size == batch_size or not self._cuda) for part, size in self._entered)
        if self._cuda:
            # Typed as optional, but there once it has stopped.
            recorded: Any = self._profiler.profiler
            events = [
                (event.start_ns(), event.duration_ns(), event.name())
                for event in recorded.kineto_results.events()
                if "CUDA" in str(event.device_type()) and not event.is_user_annotation()
            ]
            told = attribute(sorted(events), self._entered, batch_size)
        else:
            # Operators nest on a CPU: their own time is what the profiler itself works out.
            told = [
                (None, event.key, 0, int(event.self_cpu_time_total * 1e3), int(event.count))
                for event in self._profiler.key_averages()
                if not event.is_user_annotation
            ]
        return {"cycles": cycles, **summary(told, max(cycles, 1))}


def attribute(
    events: list[tuple[int, int, str]], entered: list[tuple[str, int]], batch_size: int
) -> list[tuple[str | None, str, int, int, int]]:
    """Give each operation the part it belongs to, and leave out markers, prefill and cycles of other batch sizes.

    Args:
        events: start (ns), duration (ns) and name of every operation, by start, markers among them.
        entered: part and batch size that each marker said, in order.
        batch_size: the one to keep.

    Returns: part (None for all operations, none left out, where markers are missing), name, start, duration, 1.
    """
    markers = sum(1 for _, _, name in events if _MARKER in name)
    known = markers == len(entered)
    out: list[tuple[str | None, str, int, int, int]] = []
    at = -1
    for start, duration, name in events:
        if _MARKER in name:
            at += 1
            continue
        part, size = entered[at] if known and at >= 0 else (None, None)
        if known and (part == "prefill" or size != batch_size):
            continue
        out.append((part, name, start, duration, 1))
    return out


def summary(told: Iterable[tuple[str | None, str, int, int, int]], cycles: int) -> dict[str, Any]:
    """Sum operations by part and name; see `Profile.take`."""
    launches: dict[tuple[str | None, str], int] = defaultdict(int)
    nanoseconds: dict[tuple[str | None, str], int] = defaultdict(int)
    busy, reached = 0, 0
    for part, name, start, duration, count in told:
        key = (part, name[:_NAME_LENGTH])
        launches[key] += count
        nanoseconds[key] += duration
        busy += max(0, start + duration - max(start, reached)) if start else duration
        reached = max(reached, start + duration)
    longest = sorted(nanoseconds, key=lambda key: -nanoseconds[key])[:_KEPT]
    return {
        "busy": round(busy / 1e6 / cycles, 4),
        "operations": round(sum(launches.values()) / cycles, 1),
        "kernels": [
            {
                "part": key[0],
                "name": key[1],
                "launches": round(launches[key] / cycles, 2),
                "us": round(nanoseconds[key] / 1e3 / cycles, 2),
            }
            for key in longest
        ],
    }
