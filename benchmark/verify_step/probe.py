"""Runs inside the scheduler process: times the parts of each EAGLE-3 cycle, and can force them off their CUDA graphs.

A cycle is draft decode, verify, draft extend. CUDA events are recorded on the stream that computes, before and after
each part; they cost about a microsecond each and change nothing else. So a part's time is from when the GPU reached
its beginning until it reached its end, waits for the host within it included, and the *host gap* of a cycle is its time
(from one draft decode's beginning to the next one's) less its three parts: the GPU waiting, or doing the scheduler's
own small copies, between parts. How long the GPU computed at all is told by the profiler (`Probe.profile_stop`), in
runs of their own since it slows the host. On a CPU, where work is synchronous, the clock is the host's.

Eager means that ``can_run_graph`` of all three graph runners answers no, which is how upstream itself leaves its
graphs: the same process, weights and memory then run both ways in turn.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PARTS = ("draft_decode", "verify", "draft_extend")


def _mark() -> Any:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(start: Any, end: Any) -> float:
    return (end - start) * 1e3 if isinstance(start, float) else float(start.elapsed_time(end))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Probe:
    """The cycles recorded since `begin`."""

    def __init__(self) -> None:
        self.eager = False
        self.on = False
        self._marks: list[tuple[str, int, Any, Any]] = []  # (part or "break", batch size, start, end)
        self._profiler: Any = None

    def begin(self, eager: bool) -> None:
        """Forget what was recorded and record from here on, with graphs or without."""
        _synchronize()
        self._marks = []
        self.eager = eager
        self.on = True

    def interrupt(self) -> None:
        """Note a prefill: the cycle around it is no sample."""
        if self.on:
            self._marks.append(("break", 0, None, None))

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a worker's method ``(self, batch, ...)`` that is one part of a cycle."""

        @functools.wraps(call)
        def wrapper(worker: Any, batch: Any, *args: Any, **named: Any) -> Any:
            if not self.on or batch.forward_mode.is_idle():
                return call(worker, batch, *args, **named)
            size, start = len(batch.seq_lens), _mark()
            result = call(worker, batch, *args, **named)
            self._marks.append((part, size, start, _mark()))
            return result

        return wrapper

    def take(self) -> list[dict[str, float]]:
        """Whole cycles since `begin`, in milliseconds, those next to a prefill or a change of batch size left out."""
        _synchronize()
        cycles = []
        marks = self._marks
        for at in range(len(marks) - 3):
            window = marks[at : at + 4]
            names = tuple(mark[0] for mark in window)
            if names != (*PARTS, PARTS[0]) or len({mark[1] for mark in window}) > 1:
                continue
            cycle = {name: _milliseconds(start, end) for name, _, start, end in window[:3]}
            cycle["cycle"] = _milliseconds(window[0][2], window[3][2])
            cycle["host_gap"] = cycle["cycle"] - sum(cycle[name] for name in PARTS)
            cycle["batch_size"] = window[0][1]
            cycles.append(cycle)
        self.on = False
        return cycles

    def profile_start(self) -> None:
        """Begin to record all GPU work."""
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profiler.start()

    def profile_stop(self) -> dict[str, float]:
        """Milliseconds a cycle in which the GPU did anything (intervals united), and GPU operations a cycle."""
        _synchronize()
        self._profiler.stop()
        cycles = sum(1 for name, *_ in self._marks if name == "verify")
        events = [e for e in self._profiler.profiler.kineto_results.events() if "CUDA" in str(e.device_type())]
        spans = sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in events)
        busy, reached = 0, 0
        for start, end in spans:
            busy += max(0, end - max(start, reached))
            reached = max(reached, end)
        self.on = False
        return {"cycles": cycles, "busy": busy / 1e6 / max(cycles, 1), "operations": len(spans) / max(cycles, 1)}


probe = Probe()


def install() -> None:
    """Wrap upstream's workers and graph runners, and give the scheduler the methods that `run` calls by RPC."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.runner import DecodeCudaGraphRunner
    from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner
    from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker, EAGLEWorkerV2

    EagleDraftWorker.draft = probe.timed("draft_decode", EagleDraftWorker.draft)
    EAGLEWorkerV2.verify = probe.timed("verify", EAGLEWorkerV2.verify)
    extend = EagleDraftWorker._draft_extend_for_decode
    EagleDraftWorker._draft_extend_for_decode = probe.timed("draft_extend", extend)
    prefill = EAGLEWorkerV2._forward_prefill_batch

    @functools.wraps(prefill)
    def interrupting(self: Any, *args: Any, **named: Any) -> Any:
        probe.interrupt()
        return prefill(self, *args, **named)

    EAGLEWorkerV2._forward_prefill_batch = interrupting
    for runner in (DecodeCudaGraphRunner, EAGLEDraftCudaGraphRunner, EAGLEDraftExtendCudaGraphRunner):
        runner.can_run_graph = _unless_eager(runner.can_run_graph)
    Scheduler.verify_step = _answer


def _unless_eager(can_run_graph: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(can_run_graph)
    def wrapper(self: Any, batch: Any) -> Any:
        return False if probe.eager else can_run_graph(self, batch)

    return wrapper


def _answer(scheduler: Any, do: str, out: str = "", eager: bool = False) -> None:
    """RPC of the scheduler: ``begin``, ``take``, ``profile_start`` or ``profile_stop``; results go to file `out`."""
    from sglang.srt.runtime_context import get_parallel

    result: Any = None
    if do == "begin":
        probe.begin(eager)
    elif do == "take":
        result = probe.take()
    elif do == "profile_start":
        probe.profile_start()
    elif do == "profile_stop":
        result = probe.profile_stop()
    else:
        raise ValueError(f"verify_step knows begin, take, profile_start and profile_stop, got {do!r}")
    if out and get_parallel().tp_rank == 0:
        Path(out).write_text(json.dumps(result))


def run_scheduler(*args: Any, **named: Any) -> Any:
    """Upstream's scheduler process with the probe installed."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    install()
    return run_scheduler_process(*args, **named)
