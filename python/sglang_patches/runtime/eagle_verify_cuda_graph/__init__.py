"""Patch ``eagle-verify-cuda-graph``: speculative forwards run from CUDA graphs; of one that does not, it tells why.

`note_verify`, `note_draft` and `note_draft_extend` are called by upstream where it has decided about one forward;
`coverage` adds captured sizes and checks them at start; a verify above the largest of them is replayed in slices where
that was measured to be faster (`slices`, `slice_policy`, `slice_timing`); `counting` keeps the counts, `phase_times`
the time that phases take, and both go to ``/metrics``. Nothing here may cost a request: what fails is counted
(``failures_inside``) and upstream's path goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_patches import lane
from sglang_patches.runtime.eagle_verify_cuda_graph import reasons, slice_policy
from sglang_patches.runtime.eagle_verify_cuda_graph.counting import contained, passes
from sglang_patches.runtime.eagle_verify_cuda_graph.coverage import (
    audit,
    capture_added,
    check_arguments,
    cover_running_requests,
)
from sglang_patches.runtime.eagle_verify_cuda_graph.phase_times import export_passes, times
from sglang_patches.runtime.eagle_verify_cuda_graph.reasons import Path, Phase, Reason
from sglang_patches.runtime.eagle_verify_cuda_graph.slice_policy import replay_slices

if TYPE_CHECKING:
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

__all__ = [
    "audit",
    "capture_added",
    "check_arguments",
    "cover_running_requests",
    "export_passes",
    "note_draft",
    "note_draft_extend",
    "note_verify",
    "replay_slices",
    "times",
]


def note_verify(target_worker: TpModelWorker, batch: ForwardBatch, graph: Any) -> None:
    """Count one target verify. `graph`: truthy where upstream decided to replay a graph."""
    contained("count", _count_verify, target_worker, batch, graph)


def note_draft(worker: EagleDraftWorker, batch: ForwardBatch, graph: Any) -> None:
    """Count one draft decode (all its steps together)."""
    contained("count", _count_draft, worker, batch, graph)


def note_draft_extend(worker: EagleDraftWorker, batch: ForwardBatch, graph: Any) -> None:
    """Count one draft extend after a verify (the one after a prefill is part of the prefill)."""
    contained("count", _count_extend, worker, batch, graph)


def _count_verify(target_worker: Any, batch: Any, graph: Any) -> None:
    model_runner = target_worker.model_runner
    runner = lane.here().verify_runner(model_runner)
    if not graph and slice_policy.taken(model_runner, batch):
        return  # counted once `replay_slices` knows how it ran
    _count(Phase.VERIFY, runner, batch, graph, model_runner, None, reasons.declined_verify)


def _count_draft(worker: Any, batch: Any, graph: Any) -> None:
    if worker.speculative_num_steps <= 1:
        return  # a draft of one step samples from the last draft extend: no forward
    seed_missing = lane.here().reuses_dsa_seed(worker) and batch.spec_info.dsa_topk_indices is None

    def declined(runner: Any, declined_batch: Any) -> Reason:
        return reasons.declined_draft(runner, declined_batch, seed_missing)

    draft_runner = lane.here().draft_runner(worker)
    _count(Phase.DRAFT_DECODE, worker.cuda_graph_runner, batch, graph, draft_runner, worker, declined)


def _count_extend(worker: Any, batch: Any, graph: Any) -> None:
    runner = worker.cuda_graph_runner_for_draft_extend
    draft_runner = lane.here().draft_runner(worker)
    _count(Phase.DRAFT_EXTEND, runner, batch, graph, draft_runner, worker, reasons.declined_extend)


def _count(
    phase: Phase, runner: Any, batch: Any, graph: Any, model_runner: Any, worker: Any, declined: reasons.Declined
) -> None:
    if batch.forward_mode.is_idle():
        return  # a data-parallel rank without requests computes nothing
    if graph:
        path, reason = Path.GRAPH, reasons.replayed(runner, batch)
    elif hasattr(runner, "capture_bs"):  # None or upstream's EagerRunner where nothing was captured
        path, reason = Path.EAGER, declined(runner, batch)
    else:
        reason = reasons.missing(phase, model_runner, worker)
        path = Path.CPU if reason is Reason.CPU else Path.EAGER
    passes.add(phase, path, reason, batch.batch_size)
