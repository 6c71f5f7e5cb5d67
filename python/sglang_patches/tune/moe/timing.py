"""Microseconds of a call: calls in a row in one captured graph, timed by CUDA events, each on other weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_patches.tune.moe.space import Device

_LEAST_CALLS, _MOST_CALLS = 8, 16
_L2_TIMES = 4


def device() -> Device:
    """Of the current GPU; of a machine without one, figures that let the flow run."""
    if not torch.cuda.is_available():
        return Device(4, 100 << 10, 100 << 10, 1e10, 1 << 20, False)
    told = torch.cuda.get_device_properties(torch.cuda.current_device())
    shared = int(getattr(told, "shared_memory_per_block_optin", 99 << 10))
    shared_all = int(getattr(told, "shared_memory_per_multiprocessor", shared))
    return Device(
        told.multi_processor_count, shared, shared_all, _bandwidth(), int(told.L2_cache_size), told.major >= 9
    )


def _bandwidth() -> float:
    """Bytes a second that a large copy reads and writes.

    Launched, not captured: copies in a graph moved 2.8 TB/s on an H200, launched ones 4.1 to 4.2.
    """
    from sglang_patches.bench.verify_step import reading

    told = reading.copy_bandwidth(torch.device("cuda", torch.cuda.current_device()))
    return told["gb_per_s"] * 1e9


class Replay:
    """A captured graph of calls, or on a CPU the calls themselves. It keeps alive what the calls refer to."""

    def __init__(
        self, calls: Sequence[Callable[[], Any]], run: Callable[[], None], before: Callable[[], None] | None, graph: Any
    ) -> None:
        self._kept, self._calls, self._run, self._before, self._graph = calls, len(calls), run, before, graph

    def us(self, replays: int) -> list[float]:
        """Microseconds a call of each replay; `before` is not in it."""
        if self._graph is None:
            times = []
            for _ in range(replays):
                if self._before:
                    self._before()
                begun = time.perf_counter()
                self._run()
                times.append((time.perf_counter() - begun) * 1e6 / self._calls)
            return times
        # One that does not count: while it runs the host gets ahead, so that no launch is waited for in the others.
        if self._before:
            self._before()
        self._run()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
        for begin, end in events:
            if self._before:
                self._before()
            begin.record()
            self._run()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e3 / self._calls for begin, end in events]


def capture(calls: Sequence[Callable[[], Any]], before: Callable[[], None] | None = None) -> Replay:
    """Run `calls` once, capture them in a row, and replay once, so that the first sample is like the others.

    Args:
        before: what is done before each replay, outside of it.
    """

    def run() -> None:
        for call in calls:
            call()

    if not torch.cuda.is_available():
        return Replay(calls, run, before, None)
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    if before:
        before()
    graph.replay()
    torch.cuda.synchronize()
    return Replay(calls, graph.replay, before, graph)


def calls_for(bytes_a_call: float, l2: int) -> int:
    """Calls in a graph: enough to read several times what the L2 cache holds; on a CPU, to try it, one."""
    if not torch.cuda.is_available():
        return 1
    return min(max(math.ceil(_L2_TIMES * l2 / bytes_a_call), _LEAST_CALLS), _MOST_CALLS)
