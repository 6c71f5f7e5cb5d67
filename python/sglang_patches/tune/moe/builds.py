"""Compiles kernels on all cores before any is timed: Triton needs a second for one, a measurement milliseconds.

Each process launches the kernel once on a few experts, so that what lands in Triton's cache on disk is what the timing
process and a server ask for, specialised in the same way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from sglang_patches.tune.moe.geometry import Gemm, Geometry
from sglang_patches.tune.moe.space import Config

Item = tuple[Gemm, Config, int]
_MOST = 24  # processes: each holds a CUDA context of half a gigabyte

_GRACE = 10.0  # seconds for what is being compiled when time is up

_experts: Any = None


def variant(geometry: Geometry, item: Item) -> tuple[Gemm, Config, bool, bool, bool]:
    """What else Triton and upstream compile apart: token counts that share this share the kernel."""
    gemm, config, tokens = item
    count = tokens * geometry.top_k
    room = count if count < geometry.experts + 1 else 0
    room = room * config.block_m if room else count + (geometry.experts + 1) * (config.block_m - 1)
    # 512 rows of input: from there on upstream lets the next kernel start later.
    rows = tokens if gemm == "gate_up" else count
    return gemm, config, count % 16 == 0, (room + 3) // 4 * 4 % 16 == 0, rows <= 512


def _start(geometry: Geometry) -> None:
    global _experts
    import torch

    from sglang_patches.tune.moe.kernel import Experts

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the timing process's, which then ends these
    logging.disable(logging.WARNING)  # what there is to say the timing process says
    _experts = Experts(geometry, torch.device("cuda"), held=geometry.top_k)


def _ready() -> None:
    """Asked of each process at once, so that they import while the timing process does."""


def _build(item: Item) -> str:
    """Empty, or why it cannot run."""
    import torch

    gemm, config, tokens = item
    try:
        work = _experts.works(tokens, config.block_m)[0]
        _experts.call(gemm, config, work, _experts.output(gemm, tokens))
        torch.cuda.synchronize()
    except Exception as error:  # out of shared memory, a tile that the compiler refuses: the next one may do
        return said(error)
    return ""


def said(error: Exception) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {str(error).strip()}".replace("\n", " ")[:300]


class Pool:
    """Processes that compile.

    Args:
        processes: how many; 0 compiles nothing ahead.
    """

    def __init__(self, geometry: Geometry, processes: int) -> None:
        self._geometry = geometry
        self._built: dict[Any, str] = {}
        self._pool: ProcessPoolExecutor | None = None
        if processes:
            self._pool = ProcessPoolExecutor(processes, get_context("spawn"), _start, (geometry,))
            with contextlib.suppress(BrokenProcessPool):
                for _ in range(processes):
                    self._pool.submit(_ready)

    def build(self, items: Iterable[Item], until: float, progress: Callable[[int, int], None]) -> dict[Item, str]:
        """Compile what is not compiled yet, until `until` (`time.monotonic`).

        Returns: for each item that is ready, empty or why it cannot run; nothing of those that time did not reach.
        """
        wanted = {item: variant(self._geometry, item) for item in items}
        if self._pool is None:
            return dict.fromkeys(wanted, "")
        missing = {key: item for item, key in wanted.items() if key not in self._built}
        try:
            waiting = {self._pool.submit(_build, item): key for key, item in missing.items()}
            total = len(waiting)
            while waiting and time.monotonic() < until:
                left = max(until - time.monotonic(), 0.01)
                done, _ = wait(waiting, timeout=min(2.0, left), return_when=FIRST_COMPLETED)
                for future in done:
                    self._built[waiting.pop(future)] = future.result()
                progress(total - len(waiting), total)
        except BrokenProcessPool as error:  # memory, say
            print(f"compiling where it is timed, one by one: {said(error)}", file=sys.stderr, flush=True)
            self._pool = None
            return dict.fromkeys(wanted, "")
        # Those that run already use the GPU: nothing may be timed beside them.
        wait([future for future in waiting if not future.cancel()], timeout=_GRACE)
        return {item: self._built[key] for item, key in wanted.items() if key in self._built}

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def processes() -> int:
    """How many compile at once here: the cores of this process, one left for it."""
    return max(1, min(_MOST, len(os.sched_getaffinity(0)) - 1))
