"""Whether a layer's experts may be chosen by the rule in this pass; where not, a word for why."""

from __future__ import annotations

import functools
from typing import Any

from sglang_patches.runtime.oea_topk.reference import Router
from sglang_patches.runtime.oea_topk.settings import Rule

#: Experts of a layer, and slots of a token, that the kernel holds.
MOST_EXPERTS, MOST_SLOTS = 1024, 32


def current_batch() -> Any | None:
    """The `ForwardBatch` of the pass that runs, or None outside of one.

    Upstream's forward context lends its layers a bound method of it, replaced with each pass and each half of a
    two-batch overlap (``model_executor/forward_context.py``); captured graphs are recorded under the same context.
    """
    from sglang.srt.model_executor.forward_context import get_forward_context, has_forward_context

    if not has_forward_context():
        return None
    return getattr(get_forward_context().moe_num_token_non_padded, "__self__", None)


def phase_of(mode: Any) -> str:
    """``decode``, ``verify``, or ``other`` for what the rule is not for."""
    if mode.is_decode():
        return "decode"
    return "verify" if mode.is_target_verify() else "other"


def router_of(config: Any, top_k: int, shared: int, shared_weight: float) -> Router:
    """A layer's `Router`. `config`: upstream's `TopKConfig`, which `why_not_layer` found nothing against."""
    folds = config.apply_routed_scaling_factor_on_output and config.routed_scaling_factor is not None
    return Router(
        top_k=top_k - shared,
        scoring=_scoring(config),
        renormalize=config.renormalize,
        scale=float(config.routed_scaling_factor) if folds else 1.0,
        shared=shared,
        shared_weight=float(shared_weight),
    )


def _scoring(config: Any) -> str:
    # Upstream's biased grouped router uses sigmoid whatever the configuration says.
    return "sigmoid" if config.use_grouped_topk and config.correction_bias is not None else config.scoring_func


def why_not_layer(config: Any, experts: int, device: str, top_k: int, shared: int) -> str:
    """A reason that holds for a layer in every pass, or the empty string."""
    scoring = _scoring(config)
    if device not in ("cpu", "cuda") or _on_rocm():
        return "device"
    if config.custom_routing_function is not None:
        return "custom_routing"
    if scoring not in ("sigmoid", "softmax") or (scoring == "sigmoid" and config.correction_bias is None):
        return "scoring"
    if scoring == "softmax" and (config.correction_bias is not None or shared):
        return "scoring"
    backend = config.runner_backend
    if scoring == "softmax" and not config.renormalize and backend and backend.is_flashinfer_trtllm_routed():
        return "scoring"  # its weights are raw logits
    if config.use_grouped_topk and config.topk_group != config.num_expert_group:
        return "expert_groups"
    if experts > MOST_EXPERTS or top_k > MOST_SLOTS:
        return "too_many_experts"
    return ""


@functools.cache
def _on_rocm() -> bool:
    import torch

    return torch.version.hip is not None


@functools.cache
def why_not_process() -> str:
    """A reason that holds for the whole process, or the empty string."""
    from sglang.srt.environ import envs
    from sglang.srt.layers.moe import get_moe_a2a_backend, is_moe_input_scattered_across_dp_ranks
    from sglang.srt.layers.moe.topk import routing_simulation_enabled
    from sglang.srt.runtime_context import get_parallel

    if routing_simulation_enabled():
        return "simulated_routing"
    if envs.SGLANG_RAGGED_VERIFY_MODE.get() != "static":
        return "ragged_verify"
    parallel = get_parallel()
    # A rank would see its own requests only, or rows of padding between those of several ranks.
    if not get_moe_a2a_backend().is_none() or is_moe_input_scattered_across_dp_ranks():
        return "expert_all_to_all"
    if parallel.attn_dp_size > 1:
        return "dp_attention"
    if parallel.attn_cp_size > 1:
        return "context_parallel"
    return ""


def why_not_batch(batch: Any, rows: int, rule: Rule) -> str:
    """A reason that holds for one pass, or the empty string."""
    if not rule.least <= rows <= rule.most:
        return "outside_window"
    if getattr(batch, "attn_tp_sequence_sharded", False):
        return "sequence_sharded"
    if batch.can_run_tbo or batch.tbo_parent_token_range is not None:
        return "two_batch_overlap"
    return ""
