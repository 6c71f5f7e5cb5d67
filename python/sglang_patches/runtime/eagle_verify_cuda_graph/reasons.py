"""Why a speculative forward ran from a CUDA graph, or did not.

Upstream 0.5.23 decides it with one boolean; the conditions behind it are evaluated again here, in upstream's order, at
the moment of the decision, and the first that declined is the reason. Places in upstream: ``can_run_graph`` of
``DecodeCudaGraphRunner`` (verify), ``EAGLEDraftCudaGraphRunner`` and ``EAGLEDraftExtendCudaGraphRunner``;
``capture_decode_graph`` and ``EagleDraftWorker._capture_cuda_graphs``, which decide whether there is a runner at all;
and the resolution hooks in ``arg_groups/`` that switch decode graphs off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any

from sglang_patches import lane


class Phase(StrEnum):
    """A speculative forward: one of each makes a cycle (a draft of one step has no draft-decode forward)."""

    VERIFY = "verify"
    DRAFT_DECODE = "draft_decode"
    DRAFT_EXTEND = "draft_extend"


class Path(StrEnum):
    """How a forward ran."""

    GRAPH = "graph"
    EAGER = "eager"
    CPU = "cpu"


class Reason(StrEnum):
    """Label ``reason`` of ``sglang:spec_forward_total``; the member's comment says what upstream looked at."""

    # Path "graph".
    CAPTURED = "captured"  # a graph of exactly this batch size
    PADDED = "padded"  # a graph of the next larger captured size
    SLICED = "sliced"  # several graphs, one after the other: above the largest captured size (this patch's doing)
    # Path "cpu".
    CPU = "cpu"  # a CPU has no CUDA graphs; upstream's CPU graphs take plain decode only
    # Path "eager", for every batch: decode graphs were switched off while arguments were resolved.
    OFF_BY_FLAG = (
        "off_by_flag"  # --disable-cuda-graph, --disable-decode-cuda-graph, --cuda-graph-backend-decode/-config
    )
    OFF_ATTENTION_BACKEND = "off_attention_backend"  # --attention-backend torch_native or flex_attention
    OFF_DEEPEP_NORMAL = "off_deepep_normal"  # --deepep-mode normal
    OFF_PD_PREFILL = "off_pd_prefill"  # --disaggregation-mode prefill
    OFF_TENSOR_DUMP = "off_tensor_dump"  # --debug-tensor-dump-output-folder, --msprobe-dump-config
    OFF_KV_SHARDING = "off_kv_sharding"  # --enable-kv-cache-sharding with speculation
    OFF_MULTI_ITEM = "off_multi_item"  # --enable-mis
    OFF_OTHER = "off_other"  # any other resolution hook (XPU default, diffusion LLM, expert pack, model capability)
    # Path "eager", for every batch: decode graphs are on, but nothing was captured for this phase.
    NO_RUNNER_MODEL = "no_runner_model"  # not a generation model, or --model-impl mindspore
    NO_RUNNER_PLATFORM = "no_runner_platform"  # an out-of-tree platform without graph capture
    EXTEND_SWITCHED_OFF = "extend_switched_off"  # SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH
    EXTEND_NO_BACKEND = "extend_no_backend"  # no attention backend for draft extend
    EXTEND_ATTENTION_BACKEND = "extend_attention_backend"  # its attention backend is not in upstream's list
    # Path "eager", for this batch.
    REPLACE_EMBEDS = "replace_embeds"  # token embeddings are overridden
    RAGGED = "ragged"  # ragged verify: no layout, backend without it, or more tokens or requests than captured
    WIDTH = "width"  # tokens per request differ from the captured width (adaptive speculation)
    BATCH_TOO_LARGE = "batch_too_large"  # above the largest captured size
    SIZE_NOT_CAPTURED = "size_not_captured"  # --disable-cuda-graph-padding and not a captured size
    DP_RANK = "dp_rank"  # a data-parallel rank is not decoding, or votes against graphs
    DP_DRAFT = "dp_draft"  # a data-parallel rank's draft state does not fit the draft graph
    ENCODER_LENS = "encoder_lens"  # encoder-decoder model with a request without encoder input
    TWO_BATCH_OVERLAP = "two_batch_overlap"  # two-batch overlap is on and cannot take this batch
    NGRAM_WIDTH = "ngram_width"  # n-gram drafts of unequal length
    DSA_SEED = "dsa_seed"  # sparse attention's index seed from draft extend is missing
    OTHER = "other"  # declined by none of the above: upstream has a condition that this module does not know


# Who switched decode graphs off, by the name under which the resolution hook declares it.
_OFF_BY_HOOK = {
    "_parse_cuda_graph_config": Reason.OFF_BY_FLAG,
    "_handle_attention_backend_compatibility": Reason.OFF_ATTENTION_BACKEND,
    "_handle_a2a_moe": Reason.OFF_DEEPEP_NORMAL,
    "_apply_cuda_graph_disaggregation_roles": Reason.OFF_PD_PREFILL,
    "_handle_other_validations": Reason.OFF_TENSOR_DUMP,
    "handle_kv_cache_sharding": Reason.OFF_KV_SHARDING,
    "_handle_multi_item_scoring": Reason.OFF_MULTI_ITEM,
}

# (graph runner, declined batch) -> why.
Declined = Callable[[Any, Any], Reason]


def off_reason(resolutions: Iterable[tuple[str, Mapping[str, Any]]]) -> Reason | None:
    """Which resolution hook switched decode graphs off; None where they are on.

    Args:
        resolutions: upstream's own trail ``server_args._resolved_overrides``: (hook, fields that it decided), in order.
    """
    found: Reason | None = None
    for hook, fields in resolutions:
        config = fields.get("cuda_graph_config")
        if config is None:
            continue
        if config.decode.backend != "disabled":
            found = None
        elif found is None:
            found = _OFF_BY_HOOK.get(hook, Reason.OFF_OTHER)
    return found


def missing(phase: Phase, model_runner: Any, draft_worker: Any = None) -> Reason:
    """Why a phase has no graph runner at all.

    Args:
        model_runner: the ``ModelRunner`` whose forward it is (the target's for verify, else the draft's).
        draft_worker: the ``EagleDraftWorker``; needed for draft extend only.
    """
    upstream = lane.here()
    context = upstream.runtime_context()
    if str(model_runner.device) == "cpu":
        return Reason.CPU
    if upstream.decode_graphs_are_off(model_runner.server_args):
        return off_reason(upstream.resolutions(model_runner.server_args)) or Reason.OFF_OTHER
    if phase is Phase.VERIFY and context.get_disagg().disaggregation_mode == "prefill":
        return Reason.OFF_PD_PREFILL
    if not model_runner.is_generation or context.get_model().model_impl.lower() == "mindspore":
        return Reason.NO_RUNNER_MODEL
    if phase is Phase.DRAFT_EXTEND:
        if not draft_worker.draft_extend_attn_backend:
            return Reason.EXTEND_NO_BACKEND
        if upstream.no_draft_extend_graphs():
            return Reason.EXTEND_SWITCHED_OFF
    if upstream.is_out_of_tree_platform():
        return Reason.NO_RUNNER_PLATFORM
    return Reason.EXTEND_ATTENTION_BACKEND if phase is Phase.DRAFT_EXTEND else Reason.OTHER


def for_size(runner: Any, size: int) -> Reason:
    """What a batch of `size` requests gets from a graph runner, looking at its size alone."""
    if size in runner.capture_bs:
        return Reason.CAPTURED
    if size > runner.max_bs:
        return Reason.BATCH_TOO_LARGE
    return Reason.SIZE_NOT_CAPTURED if runner.disable_padding else Reason.PADDED


def batch_size(runner: Any, batch: Any) -> int:
    """The size by which upstream looks up a graph: the batch's, or the largest of all data-parallel ranks."""
    return lane.here().graph_batch_size(runner, batch)


def replayed(runner: Any, batch: Any) -> Reason:
    """Which kind of graph a batch that runs from one gets."""
    # Ragged graphs are keyed by tokens, so the number of requests does not tell.
    return Reason.CAPTURED if batch_size(runner, batch) in runner.capture_bs else Reason.PADDED


def _wrong_width(runner: Any, batch: Any) -> bool:
    if not lane.here().declines_other_widths:
        return False
    width = getattr(batch.spec_info, "num_tokens_per_req", 0) or 0
    return width > 0 and width != lane.here().captured_width(runner)


def declined_verify(runner: Any, batch: Any) -> Reason:
    """Why ``DecodeCudaGraphRunner.can_run_graph`` declined a target-verify batch."""
    if getattr(batch, "replace_embeds", None) is not None:
        return Reason.REPLACE_EMBEDS
    if getattr(runner, "ragged_verify_mode", None):
        return Reason.DP_RANK if _dp_declines(runner, batch) else Reason.RAGGED
    if _wrong_width(runner, batch):
        return Reason.WIDTH
    size = for_size(runner, batch_size(runner, batch))
    if size in (Reason.BATCH_TOO_LARGE, Reason.SIZE_NOT_CAPTURED):
        return size
    if _dp_declines(runner, batch):
        return Reason.DP_RANK
    if runner.is_encoder_decoder and not bool((batch.encoder_lens > 0).all()):
        return Reason.ENCODER_LENS
    if runner.enable_two_batch_overlap and not batch.can_run_tbo:
        return Reason.TWO_BATCH_OVERLAP
    tokens = batch.batch_size * lane.here().captured_width(runner)
    if runner.model_runner.spec_algorithm.is_ngram() and tokens != batch.input_ids.numel():
        return Reason.NGRAM_WIDTH
    return Reason.OTHER


def declined_draft(runner: Any, batch: Any, seed_missing: bool = False) -> Reason:
    """Why ``EAGLEDraftCudaGraphRunner.can_run_graph``, or ``EagleDraftWorker.draft`` after it, declined a batch.

    Args:
        seed_missing: the worker reuses sparse attention's index and this batch has none (``dsa_topk_indices``).
    """
    reason = _declined_fixed_width(runner, batch)
    vote = lane.here().draft_graph_vote
    if reason is Reason.OTHER and runner.require_mlp_sync and vote is not None and not getattr(batch, vote):
        return Reason.DP_DRAFT
    return Reason.DSA_SEED if reason is Reason.OTHER and seed_missing else reason


def declined_extend(runner: Any, batch: Any) -> Reason:
    """Why ``EAGLEDraftExtendCudaGraphRunner.can_run_graph`` declined a batch."""
    return _declined_fixed_width(runner, batch)


def _declined_fixed_width(runner: Any, batch: Any) -> Reason:
    if _wrong_width(runner, batch):
        return Reason.WIDTH
    size = for_size(runner, batch_size(runner, batch))
    if size in (Reason.BATCH_TOO_LARGE, Reason.SIZE_NOT_CAPTURED):
        return size
    return Reason.DP_RANK if _dp_declines(runner, batch) else Reason.OTHER


def _dp_declines(runner: Any, batch: Any) -> bool:
    return bool(runner.require_mlp_sync and not getattr(batch, lane.here().graph_vote))
