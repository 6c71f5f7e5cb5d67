"""Which batch sizes run from CUDA graphs: captures more where some up to the request limit would not, and tells.

``SGLANG_PATCHES_VERIFY_GRAPH`` says how far to go:

- ``auto`` (default): capture more sizes where memory allows, tell what stays uncovered;
- ``require``: the same, and start-up fails if anything stays uncovered;
- ``report``: upstream's sizes, only told.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from sglang_patches import lane
from sglang_patches.runtime import _outcome
from sglang_patches.runtime.eagle_verify_cuda_graph import reasons, slice_policy, slice_timing
from sglang_patches.runtime.eagle_verify_cuda_graph.counting import PATCH, contained, speaks, tell_passes
from sglang_patches.runtime.eagle_verify_cuda_graph.reasons import Phase, Reason
from sglang_patches.runtime.eagle_verify_cuda_graph.sizes import GROWTHS, affordable, cost, sizes_up_to

VARIABLE = "SGLANG_PATCHES_VERIFY_GRAPH"
MODES = ("auto", "require", "report")
# Algorithms whose worker is EAGLEWorkerV2, all three phases of which are counted.
COUNTED = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
# No size above this is added: each costs about a second of start-up in each phase.
MAX_ADDED_SIZE = 256
# Share of the free memory that added sizes may take; the rest is for prefill activations.
MEMORY_SHARE = 0.1

logger = logging.getLogger("sglang_patches")

_REMEDY = (
    f"Set {VARIABLE}=auto to start all the same, lower --max-running-requests, or let graphs be captured: no "
    "--disable-cuda-graph, a larger --cuda-graph-max-bs-decode, a GPU attention backend."
)


class GraphsRequired(ValueError):
    """``SGLANG_PATCHES_VERIFY_GRAPH=require`` and a speculative forward would run without a CUDA graph."""


@dataclass
class Plan:
    """The sizes added to upstream's in this process, and what capturing them cost (the sizes of all phases together).

    Attributes:
        limit: requests that can run at once on this rank.
        estimated_mib: what capturing them was expected to take (`cost`).
        seconds, mib: of capturing the added sizes; larger static buffers are not in ``mib``.
        left_out: why sizes up to ``limit`` were not all added; empty if they were.
    """

    limit: int
    added: tuple[int, ...] = ()
    estimated_mib: float = 0.0
    seconds: float = 0.0
    mib: float = 0.0
    left_out: str = ""


@dataclass
class _State:
    plan: Plan | None = None
    decided: bool = field(default=False)


_state = _State()


def mode() -> str:
    """The value of the variable; ValueError naming the known ones for any other."""
    value = os.environ.get(VARIABLE, "auto")
    if value not in MODES:
        raise ValueError(f"{VARIABLE}={value!r} is not known; it can be {', '.join(MODES)}. Unset it for auto.")
    return value


def check_arguments(server_args: Any) -> None:
    """Refuse what ``require`` can never get, before any weight is loaded; called while arguments are resolved.

    A prefill node of a disaggregated server is not refused: it runs none of the three phases.

    Raises:
        ValueError: the variable has an unknown value.
        GraphsRequired: mode ``require`` on a CPU, with decode graphs switched off, or with a speculative algorithm
            whose forwards are not all counted.
    """
    wanted = mode()
    config = lane.here().resolving(server_args)
    algorithm = config.speculative_algorithm
    if algorithm is None:
        _outcome.record(PATCH, "not needed", "this server does not speculate")
        return
    if algorithm not in COUNTED or config.enable_multi_layer_eagle:
        named = f"{algorithm}{' with --enable-multi-layer-eagle' if config.enable_multi_layer_eagle else ''}"
        if wanted == "require":
            raise GraphsRequired(
                f"{PATCH}: {VARIABLE}=require knows the forwards of {', '.join(COUNTED)} with a single-layer draft, "
                f"and this server speculates with {named}. Set {VARIABLE}=auto."
            )
        _outcome.record(PATCH, "not needed", f"not all forwards of {named} are counted, and no sizes are added")
        return
    if wanted != "require" or config.disaggregation_mode == "prefill":
        return
    off = Reason.CPU if config.device == "cpu" else reasons.off_reason(lane.here().resolutions(server_args))
    if off is not None:
        limit = config.max_running_requests
        phases = [phase for phase in Phase if phase is not Phase.DRAFT_DECODE or config.speculative_num_steps > 1]
        raise _refusal({phase: [(1, limit, off)] for phase in phases})


# By phase, ranges of batch sizes without a graph: (first, last, why); last is None where the limit is not known yet.
Gaps = Mapping[Phase, list[tuple[int, int | None, Reason]]]


def _refusal(gaps: Gaps) -> GraphsRequired:
    return GraphsRequired(
        f"{PATCH}: {VARIABLE}=require, but these speculative forwards would run without a CUDA graph: {_told(gaps)}. "
        + _REMEDY
    )


def _range(first: int, last: int | None) -> str:
    if last is None:
        return f"{first} and above"
    return str(first) if first == last else f"{first}-{last}"


def _told(gaps: Gaps) -> str:
    return "; ".join(
        f"{phase} batch size {_range(first, last)}: {reason}"
        for phase, ranges in gaps.items()
        for first, last, reason in ranges
    )


def _decide(model_runner: Any) -> None:
    """Add sizes to upstream's resolved configuration, once a process, with the same result on all ranks.

    All readers of ``cuda_graph_config.decode`` then agree: the three graph runners, shared logits buffer, workspaces.
    """
    if _state.decided or model_runner.is_draft_worker:
        return
    from sglang.srt.utils.common import get_available_gpu_memory

    _state.decided = True
    context = lane.here().runtime_context()
    spec = context.get_spec()
    if spec.speculative_algorithm not in COUNTED or spec.enable_multi_layer_eagle or mode() == "report":
        return
    if _only_prefills():
        return
    decode = lane.here().decode_graph_config(model_runner)
    largest = max(decode.bs)
    limit = int(model_runner.req_to_token_pool.size)
    if largest >= limit:
        return
    plan, moe = Plan(limit), context.get_exec().moe
    _state.plan = plan
    for blocked, why in (
        (spec.speculative_adaptive, "adaptive speculation chooses its own sizes"),
        (getattr(model_runner, "lora_manager", None) is not None, "LoRA buffers are made for upstream's sizes"),
        (moe.moe_a2a_backend != "none", f"dispatch buffers of --moe-a2a-backend {moe.moe_a2a_backend}"),
        (lane.here().has_paged_experts(), "paged experts cap the captured sizes"),
    ):
        if blocked:
            plan.left_out = why
            return
    free = get_available_gpu_memory(
        model_runner.device,
        model_runner.gpu_id,
        distributed=slice_policy.several_ranks(),
        cpu_group=context.get_parallel().world_group.cpu_group,
    )
    target = min(limit, max(MAX_ADDED_SIZE, largest))
    if target < limit:
        plan.left_out = f"sizes above {target} are not added"
    price = functools.partial(
        cost,
        largest=largest,
        layers=lane.here().layers_of(model_runner),
        tokens=lane.here().verify_width(model_runner),
        vocabulary=model_runner.model_config.vocab_size,
    )
    alignment = lane.here().graph_size_alignment(model_runner)
    every = context.get_exec().graph.disable_cuda_graph_padding
    growths = GROWTHS[:1] if every else GROWTHS
    choices = [sizes_up_to(largest, target, alignment, every, growth) for growth in growths]
    sizes = affordable(choices, free * 1024 * MEMORY_SHARE, price)
    reached = max(sizes, default=largest)
    if reached < target:
        plan.left_out = (
            f"{free:.2f} GiB of GPU memory are free, and {MEMORY_SHARE:.0%} of it pays for sizes up to {reached}"
        )
    plan.added, plan.estimated_mib = tuple(sizes), price(sizes)
    decode.bs = sorted({*decode.bs, *plan.added})
    decode.max_bs = max(decode.bs)


def _only_prefills() -> bool:
    """Whether this is a prefill node of a disaggregated server, on which no speculative forward is counted."""
    return bool(lane.here().runtime_context().get_disagg().disaggregation_mode == "prefill")


def cover_running_requests(get_sizes: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates ``get_batch_sizes_to_capture(model_runner, ...)``, which every graph runner asks for its sizes."""

    @functools.wraps(get_sizes)
    def wrapper(model_runner: Any, *args: Any, **named: Any) -> Any:
        contained("extend", _decide, model_runner)
        return get_sizes(model_runner, *args, **named)

    return wrapper


def capture_added(capture: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates ``capture_one_shape(self, size, ...)`` of the three runners: measures what an added size costs, and
    does without it where its capture fails (upstream's own sizes fail start-up, as before).

    With several ranks a failure stays one: the others may have captured the size, and would then wait for this rank.
    """

    @functools.wraps(capture)
    def wrapper(self: Any, size: int, *args: Any, **named: Any) -> Any:
        plan = _state.plan
        if plan is None or size not in plan.added:
            return capture(self, size, *args, **named)
        started, before = time.perf_counter(), contained("measure", _free_mib, self)
        try:
            captured = capture(self, size, *args, **named)
        except RuntimeError as error:  # torch's out-of-memory error is one
            if slice_policy.several_ranks():
                raise
            contained("capture", _do_without, self, size, error)
            captured = lane.here().no_graph
        after = contained("measure", _free_mib, self)
        plan.seconds += time.perf_counter() - started
        if before is not None and after is not None:
            plan.mib += before - after
        return captured

    return wrapper


def _do_without(runner: Any, size: int, error: RuntimeError) -> None:
    # Upstream captures over a reversed copy of this list, so taking one out disturbs no loop.
    runner.capture_bs = [other for other in runner.capture_bs if other != size]
    runner.max_bs = max(runner.capture_bs)
    assert _state.plan is not None
    _state.plan.left_out = f"capturing size {size} failed: {str(error).splitlines()[0]}"
    raise error  # to be counted and logged by `contained`


def _free_mib(runner: Any) -> float:
    return float(runner.device_module.mem_get_info()[0]) / 2**20


def _runners(worker: Any) -> dict[Phase, tuple[Any, Any]]:
    """By phase that this ``EAGLEWorkerV2`` runs: (graph runner or None, model runner)."""
    target = worker.target_worker.model_runner
    found = {Phase.VERIFY: (lane.here().verify_runner(target), target)}
    draft = lane.here().draft_worker(worker)
    if draft is not None:
        draft_runner = lane.here().draft_runner(draft)
        if worker.speculative_num_steps > 1:
            found[Phase.DRAFT_DECODE] = (draft.cuda_graph_runner, draft_runner)
        found[Phase.DRAFT_EXTEND] = (draft.cuda_graph_runner_for_draft_extend, draft_runner)
    return found


def gaps(worker: Any) -> dict[Phase, list[tuple[int, int | None, Reason]]]:
    """By phase, the ranges (first, last, reason) of batch sizes up to the request limit that have no graph."""
    limit = int(worker.target_worker.model_runner.req_to_token_pool.size)
    found: dict[Phase, list[tuple[int, int | None, Reason]]] = {}
    for phase, (runner, model_runner) in _runners(worker).items():
        if hasattr(runner, "capture_bs"):
            by_size = [(size, reasons.for_size(runner, size)) for size in range(1, limit + 1)]
            if phase is Phase.VERIFY:
                by_size = [(size, Reason.SLICED if slice_policy.covers(runner, size) else why) for size, why in by_size]
        else:
            why = reasons.missing(phase, model_runner, lane.here().draft_worker(worker))
            by_size = [(size, why) for size in range(1, limit + 1)]
        for reason, group in groupby(by_size, key=lambda entry: entry[1]):
            if reason not in (Reason.CAPTURED, Reason.PADDED, Reason.SLICED):
                sizes = [size for size, _ in group]
                found.setdefault(phase, []).append((sizes[0], sizes[-1], reason))
    return found


def _tell(worker: Any) -> None:
    if not speaks():
        return
    plan = _state.plan or Plan(int(worker.target_worker.model_runner.req_to_token_pool.size))
    figures: dict[str, Any] = {"mode": mode(), "max_running_requests": plan.limit}
    if _only_prefills():
        detail = "a prefill node runs no verify and no draft decode (after a change of role only the counts tell)"
        _outcome.record(PATCH, "not needed", detail, **figures)
        return
    if plan.added:
        figures["added_sizes"] = list(plan.added)
        figures["added_seconds"] = round(plan.seconds, 1)
        figures["added_mib"] = round(plan.mib)
        figures["estimated_mib"] = round(plan.estimated_mib)
    if plan.mib > plan.estimated_mib:
        logger.warning(
            "sglang-patches: %s: capturing sizes %s took %.0f MiB of GPU memory, more than the estimated %.0f; if "
            "memory runs out while serving, lower --mem-fraction-static or set %s=report",
            PATCH,
            ", ".join(map(str, plan.added)),
            plan.mib,
            plan.estimated_mib,
            VARIABLE,
        )
    figures |= slice_policy.figures()
    result, detail = _judge(gaps(worker), plan, ", ".join(_runners(worker)))
    _outcome.record(PATCH, result, detail, **figures)


def _judge(found: Gaps, plan: Plan, phases: str) -> tuple[_outcome.Result, str]:
    """Result and detail of the outcome, by what has no graph."""
    if not found:
        return "applied", f"every batch up to {plan.limit} requests has a CUDA graph in {phases}"
    ranges = [entry for entries in found.values() for entry in entries]
    without = f"without a CUDA graph: {_told(found)}" + (f" ({plan.left_out})" if plan.left_out else "")
    if all(why is Reason.BATCH_TOO_LARGE and first > MAX_ADDED_SIZE for first, _, why in ranges):
        # As far as this patch goes; a limit of thousands is seldom reached, and the counts tell if it is.
        covered = min(first for first, _, _ in ranges) - 1
        return "applied", f"every batch up to {covered} requests has a CUDA graph in {phases}; {without}"
    expected = {why for _, _, why in ranges} <= {Reason.CPU, Reason.OFF_BY_FLAG}
    return "not needed" if expected else "failed", without


def _forget_failed(worker: Any) -> None:
    """Take out what `capture_added` gave upstream for a size whose capture failed: it looks up graphs by size."""
    nothing = lane.here().no_graph
    if nothing is None:
        return
    for runner, _ in _runners(worker).values():
        for size in [size for size, graph in getattr(runner, "graphs", {}).items() if graph is nothing[0]]:
            del runner.graphs[size], runner.output_buffers[size]


def audit(init_cuda_graphs: Callable[..., None]) -> Callable[..., None]:
    """Decorates ``EAGLEWorkerV2.init_cuda_graphs``, after which all graphs of the worker exist.

    From then on no sizes are added: graphs captured later (a prefill node that becomes a decode node) have the sizes
    that were asked for. Raises `GraphsRequired` in mode ``require`` if a batch size up to the request limit has no
    graph in some phase, but on a prefill node.
    """

    @functools.wraps(init_cuda_graphs)
    def wrapper(self: Any) -> None:
        init_cuda_graphs(self)
        _state.decided = True
        _forget_failed(self)
        tell_passes(slice_policy.figures)
        if mode() != "report" and not _only_prefills():
            slice_timing.decide(self)
        if mode() == "require" and not _only_prefills():
            found = gaps(self)
            if found:
                raise _refusal(found)
        contained("audit", _tell, self)

    return wrapper
