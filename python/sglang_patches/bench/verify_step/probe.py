"""Runs inside the scheduler process: times the parts of each cycle, and can force them off their CUDA graphs.

A cycle of EAGLE-3 is draft decode, verify, sampling, draft extend; *sampling* is all that follows the target's forward
inside upstream's verify: choosing tokens, accepting, committing (`eagle_worker_common.run_eagle_verify`). Without
speculation a cycle is decode and sampling. CUDA events are recorded on the stream that computes, at the edges of each
part; they cost about a microsecond each and change nothing else. So a part's time is from when the GPU reached its
beginning until it reached its end, waits for the host within it included, and the *host gap* of a cycle is its time
(from one first part's beginning to the next one's) less its parts: the GPU waiting, or doing the scheduler's own small
copies, between parts. On a CPU, where work is synchronous, the clock is the host's.

Eager means that ``can_run_graph`` of all graph runners answers no, which is how upstream itself leaves its graphs: the
same process, weights and memory then run both ways in turn.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_patches.bench import routers, values
from sglang_patches.bench.verify_step import host, kernels, reading

#: Parts of a cycle in their order, with speculation and without; the last part of a cycle is its host gap.
SPECULATIVE = ("draft_decode", "verify", "sampling", "draft_extend")
PLAIN = ("decode", "sampling")
#: What upstream's methods cover; sampling lies at the end of verify or of decode.
_TIMED = {SPECULATIVE: ("draft_decode", "verify", "draft_extend"), PLAIN: ("decode",)}


_has_cuda = functools.cache(torch.cuda.is_available)


class _Events:
    """CUDA events that are made once and used again: making one costs more host time than recording it."""

    def __init__(self) -> None:
        self._made: list[Any] = []
        self._used = 0

    def record(self) -> Any:
        """The next event, recorded on the current stream."""
        if self._used == len(self._made):
            self._made.append(torch.cuda.Event(enable_timing=True))
        event = self._made[self._used]
        self._used += 1
        event.record()
        return event

    def reuse(self) -> None:
        """All events are free."""
        self._used = 0


_events = _Events()


def _mark() -> Any:
    return _events.record() if _has_cuda() else time.perf_counter()


def _milliseconds(start: Any, end: Any) -> float:
    return (end - start) * 1e3 if isinstance(start, float) else float(start.elapsed_time(end))


def _synchronize() -> None:
    if _has_cuda():
        torch.cuda.synchronize()


class Probe:
    """The cycles recorded since `begin`."""

    def __init__(self) -> None:
        self.eager = False
        self.on = False
        self.parts: tuple[str, ...] = SPECULATIVE
        self.routing: reading.Routing | None = None
        self.profile: kernels.Profile | None = None
        # (method, batch size, start, start of sampling, end); a prefill is ("break", 0, None, None, None)
        self._marks: list[tuple[str, int, Any, Any, Any]] = []
        self._sampling: Any = None
        self._graphs: dict[str, list[int]] = {}
        self._inside = 0  # batch size of the part that runs
        self._host = 0.0

    def begin(self, eager: bool) -> None:
        """Forget what was recorded and record from here on, with graphs or without."""
        _synchronize()
        _events.reuse()
        self._marks = []
        self._graphs = {}
        self._host = host.loop()
        self.eager = eager
        self.on = True

    def interrupt(self) -> None:
        """Note a prefill: the cycle around it is no sample."""
        if self.on:
            self._marks.append(("break", 0, None, None, None))
            self._enter("prefill", 0)

    def sampling(self) -> None:
        """Note that the target's forward is over and choosing tokens begins; after a prefill it is no part."""
        if self._inside:
            self._sampling = _mark()
            self._enter("sampling", self._inside)

    def _enter(self, part: str, batch_size: int) -> None:
        if self.profile is not None:
            self.profile.enter(part, batch_size)

    def answered(self, runner: str, yes: bool) -> None:
        """Note what a graph runner said within a part."""
        if self._inside:
            counts = self._graphs.setdefault(runner, [0, 0])
            counts[0] += yes
            counts[1] += 1

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a worker's method ``(self, batch, ...)`` that is one part of a cycle."""

        @functools.wraps(call)
        def wrapper(worker: Any, batch: Any, *args: Any, **named: Any) -> Any:
            if not self.on or batch.forward_mode.is_idle():
                return call(worker, batch, *args, **named)
            if self.routing is not None:
                self.routing.enter(part, batch)
            size, start, self._sampling = len(batch.seq_lens), _mark(), None
            self._enter(part, size)
            self._inside = size
            result = call(worker, batch, *args, **named)
            self._inside = 0
            self._marks.append((part, size, start, self._sampling, _mark()))
            self._enter("host_gap", size)
            if self.routing is not None:
                self.routing.leave()
            return result

        return wrapper

    def take(self, batch_size: int) -> dict[str, Any]:
        """Whole cycles of this batch size since `begin`, those next to a prefill or another batch size left out.

        Returns: ``ms`` (milliseconds by part, host gap and cycle, an entry a cycle), ``graphs`` (by graph runner,
        how often it said in any part that it has a graph, and how often it was asked) and ``host_ms`` (`host.loop`
        right before the cycles and right after).
        """
        _synchronize()
        self.on = False
        timed = _TIMED[self.parts]
        columns: dict[str, list[float]] = {name: [] for name in (*self.parts, "host_gap", "cycle")}
        for at in range(len(self._marks) - len(timed)):
            window = self._marks[at : at + len(timed) + 1]
            if tuple(mark[0] for mark in window) != (*timed, timed[0]):
                continue
            if any(mark[1] != batch_size for mark in window):
                continue
            parts: dict[str, float] = {}
            for name, _, start, sampling, end in window[:-1]:
                parts[name] = _milliseconds(start, end if sampling is None else sampling)
                if sampling is not None:
                    parts["sampling"] = _milliseconds(sampling, end)
            if parts.keys() != set(self.parts):
                continue  # sampling was put off
            cycle = _milliseconds(window[0][2], window[-1][2])
            for name, value in (*parts.items(), ("host_gap", cycle - sum(parts.values())), ("cycle", cycle)):
                columns[name].append(round(value, 4))
        return {"ms": columns, "graphs": self._graphs, "host_ms": [self._host, host.loop()]}


probe = Probe()


def install(plain: bool) -> None:
    """Wrap upstream's workers and graph runners, and give the scheduler the method that `engine` calls by RPC.

    Args:
        plain: the engine runs without speculation.
    """
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.runner import DecodeCudaGraphRunner
    from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner
    from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner

    if plain:
        probe.parts = PLAIN
        _install_plain()
    else:
        _install_speculative()
    for runner in (DecodeCudaGraphRunner, EAGLEDraftCudaGraphRunner, EAGLEDraftExtendCudaGraphRunner):
        runner.can_run_graph = _unless_eager(runner.can_run_graph)
    Scheduler.verify_step = _answer


def _install_speculative() -> None:
    from sglang.srt.speculative import eagle_worker_common
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker, EAGLEWorkerV2

    EagleDraftWorker.draft = probe.timed("draft_decode", EagleDraftWorker.draft)
    # In its place where nothing is drafted.
    trivial = EAGLEWorkerV2._build_trivial_verify_input
    EAGLEWorkerV2._build_trivial_verify_input = probe.timed("draft_decode", trivial)
    EAGLEWorkerV2.verify = probe.timed("verify", EAGLEWorkerV2.verify)
    extend = EagleDraftWorker._draft_extend_for_decode
    EagleDraftWorker._draft_extend_for_decode = probe.timed("draft_extend", extend)
    EAGLEWorkerV2._forward_prefill_batch = _before(probe.interrupt, EAGLEWorkerV2._forward_prefill_batch)
    eagle_worker_common.eagle_sample = _before(probe.sampling, eagle_worker_common.eagle_sample)


def _install_plain() -> None:
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.model_runner import ModelRunner

    forward = TpModelWorker.forward_batch_generation
    decode = probe.timed("decode", forward)
    prefill = _before(probe.interrupt, forward)

    @functools.wraps(forward)
    def wrapper(self: Any, batch: Any, *args: Any, **named: Any) -> Any:
        call = decode if batch is not None and batch.forward_mode.is_decode() else prefill
        return call(self, batch, *args, **named)

    TpModelWorker.forward_batch_generation = wrapper
    ModelRunner.sample = _before(probe.sampling, ModelRunner.sample)


def _before(note: Callable[[], None], call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(*args: Any, **named: Any) -> Any:
        note()
        return call(*args, **named)

    return wrapper


def _unless_eager(can_run_graph: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(can_run_graph)
    def wrapper(self: Any, batch: Any) -> Any:
        answer = False if probe.eager else can_run_graph(self, batch)
        probe.answered(type(self).__name__, bool(answer))
        return answer

    return wrapper


def pin(accept_length: float, token_mode: str) -> None:
    """Commit so many tokens a cycle on average from here on, as ``SGLANG_SIMULATE_ACC_LEN`` at start would.

    Upstream reads its own constants again at every verify (`eagle_utils.eagle_sample`), so one engine can be timed at
    several accept lengths. `token_mode` is ``SGLANG_SIMULATE_ACC_TOKEN_MODE``.
    """
    from sglang.srt.speculative import spec_utils

    spec_utils.SIMULATE_ACC_LEN = accept_length
    spec_utils.SIMULATE_ACC_TOKEN_MODE = token_mode


def _answer(
    scheduler: Any,
    do: str,
    out: str,
    eager: bool = False,
    batch_size: int = 0,
    accept_length: float = -1.0,
    token_mode: str = "",
) -> None:
    """RPC of the scheduler; the answer goes to file `out` as JSON, from the first tensor-parallel rank.

    ``draw``: routers (`routers.draw`); ``draw_all``: all weights (`values.draw`). ``pin``: accepted tokens a cycle
    (`pin`). ``facts``: what is served and the copy bandwidth (`reading.facts`). ``begin``, then ``take``: the cycles of
    a batch size. ``count``, then ``counted``: experts routed to and contexts seen, untimed. ``profile``, then
    ``profiled``: kernels.
    """
    from sglang.srt.runtime_context import get_parallel

    result: Any = None
    models = reading.models(scheduler)
    if do == "draw":
        result = routers.draw(models["target"].model)
    elif do == "draw_all":
        result = values.draw(runner.model for runner in models.values())
    elif do == "pin":
        pin(accept_length, token_mode)
    elif do == "facts":
        result = reading.facts(models)
    elif do == "begin":
        probe.begin(eager)
    elif do == "take":
        result = probe.take(batch_size)
    elif do == "count":
        probe.routing = reading.Routing(models)
        probe.begin(eager=True)
    elif do == "counted":
        probe.on = False
        counted, probe.routing = probe.routing, None
        assert counted is not None, "`counted` before `count`"
        result = counted.take(batch_size)
    elif do == "profile":
        probe.begin(eager)
        probe.profile = kernels.Profile()
    elif do == "profiled":
        probe.on = False
        profile, probe.profile = probe.profile, None
        assert profile is not None, "`profiled` before `profile`"
        result = profile.take(probe.parts, batch_size)
    else:
        raise ValueError(
            f"verify_step knows no {do!r}; it knows draw, draw_all, pin, facts, begin, take, count, counted, profile, "
            "profiled"
        )
    if get_parallel().tp_rank == 0:
        Path(out).write_text(json.dumps(result))


def run_speculative(*args: Any, **named: Any) -> Any:
    """Upstream's scheduler process with the probe installed."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    install(plain=False)
    return run_scheduler_process(*args, **named)


def run_plain(*args: Any, **named: Any) -> Any:
    """The same without speculation."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    install(plain=True)
    return run_scheduler_process(*args, **named)
