"""Patch ``oea-topk``: opportunistic expert activation, arXiv 2511.02237. It changes what a model answers.

A decode or verify batch loads every expert that some token of it is routed to. Here each token keeps its ``k0`` best
experts only and takes the rest of its ``k`` from those that the batch loads anyway. `reference` states the rule,
`kernel` is it on a GPU, `settings` its parameters, `eligible` where it can hold, `counting` and `experts` what is told
of it.

Upstream's ``select_experts`` calls `choose`; other ways to choose experts report themselves with `bypassed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sglang_patches.runtime import _metrics, _outcome
from sglang_patches.runtime.oea_topk import eligible, reference, settings
from sglang_patches.runtime.oea_topk.counting import APPLIED, PATCH, Counts
from sglang_patches.runtime.oea_topk.experts import Experts

__all__ = ["before_replay", "bypassed", "check_arguments", "choose", "exports_counts", "register"]

counts = Counts()
experts = Experts()
_exported = _metrics.Exported(_metrics.OEA_PASSES)
_KEY = "oea_topk_layer"
_real: dict[torch.device, torch.Tensor] = {}
_rows: dict[torch.device, torch.Tensor] = {}

Chosen = tuple[torch.Tensor, torch.Tensor]


def _export(labels: Mapping[str, Any]) -> None:
    _exported.export(list(counts.passes.items()), labels)
    experts.export(labels)


exports_counts = _metrics.on_decode_step(PATCH, _export)


def _figures() -> dict[str, Any]:
    told = counts.figures()
    distinct = experts.figures()
    return told | {"experts": distinct} if distinct else told


def check_arguments(arguments: Any) -> None:
    """Refuse, before weights are loaded, settings that cannot be meant.

    Raises:
        BadSetting: a variable of this patch, or an argument that contradicts it.
    """
    rule = settings.rule()
    if rule is None:
        _outcome.record(PATCH, "not needed", f"{settings.PREFIX}K0 is not set: upstream chooses all experts")
        return
    from sglang.srt.arg_groups.model_override_base import resolving_view

    cfg = resolving_view(arguments)  # upstream turns determinism on by itself for some options
    for option, why, implied in (
        (
            "enable_deterministic_inference",
            "a token's experts depend on the batch it is in",
            " and without --rl-on-policy-target, which turns it on",
        ),
        ("enable_torch_compile", "a compiled model has upstream's choice of experts inside", ""),
    ):
        if getattr(cfg, option):
            name = f"--{option.replace('_', '-')}"
            raise settings.BadSetting(
                f"{settings.PREFIX}K0={rule.k0} and {name} contradict each other: {why}. "
                f"Wanted one of the two: unset {settings.PREFIX}K0, or start without {name}{implied}."
            )


def register(layer: Any) -> None:
    """Called at the end of ``__init__`` of upstream's `TopK` and `HashTopK`: a layer that chooses experts.

    Raises:
        BadSetting: the rule wants more experts than the layer has for a token.
    """
    rule = settings.rule()
    if rule is None or layer.is_draft:
        return
    counts.register(layer.layer_id)
    _outcome.live_figures(PATCH, _figures)
    config = getattr(layer, "topk_config", None)
    vars(layer if config is None else config)[_KEY] = layer.layer_id
    if config is None:
        layer.register_forward_pre_hook(lambda module, _: bypassed(module, "hash_routing"))
        return
    top_k = config.top_k - config.num_shared_topk_slots
    rule.check(top_k)
    if rule.changes_nothing(top_k):
        _outcome.record(
            PATCH, "not needed", f"k0={rule.k0} is the model's top-k: upstream chooses all experts", **rule.figures()
        )


def bypassed(config: Any, reason: str) -> None:
    """Experts of a layer are about to be chosen by code that the rule has no place in.

    Args:
        config: the layer's `TopKConfig`, or the layer where it has none.
    """
    if torch.compiler.is_compiling():  # asked first, so that nothing behind it is traced
        return
    rule, layer = settings.rule(), vars(config).get(_KEY)
    batch = None if rule is None or layer is None else eligible.current_batch()
    if rule is None or layer is None or batch is None:
        return
    phase = eligible.phase_of(batch.forward_mode)
    if phase in rule.phases:
        counts.layer(layer, phase, len(batch.input_ids), reason, rule, _capturing())


def choose(
    config: Any,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    real: torch.Tensor | None,
    top_k: int,
    shared: int,
) -> Chosen | None:
    """Weights and ids of a layer's experts by the rule, or None where upstream is to choose them.

    An error here ends the server: were it contained, one rank could go on with other experts than the rest.

    Args:
        config: upstream's `TopKConfig`.
        logits: ``[tokens, experts]``.
        bias: what upstream ranks with: ``[experts]``, None, or ``[tokens, experts]``, which the rule has no place for.
        real: upstream's count of rows that are no padding, where it keeps one.
        top_k, shared: columns that upstream's router is to write, and those of them that are shared experts'.
    """
    if torch.compiler.is_compiling():  # asked first, so that nothing behind it is traced
        return None
    rule = settings.rule()
    if rule is None:
        return None
    layer = vars(config).get(_KEY)
    if layer is None or rule.changes_nothing(top_k - shared):
        return None
    return _choose(rule, layer, config, logits, bias, real, top_k, shared)


def _choose(
    rule: settings.Rule,
    layer: int,
    config: Any,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    real: torch.Tensor | None,
    top_k: int,
    shared: int,
) -> Chosen | None:
    batch = eligible.current_batch()
    phase = "other" if batch is None else eligible.phase_of(batch.forward_mode)
    rows, width = logits.shape
    if phase not in rule.phases or not rows:
        return None
    capturing = _capturing()
    why = (
        "token_bias"
        if bias is not None and bias.ndim != 1
        else eligible.why_not_layer(config, width, logits.device.type, top_k, shared)
        or eligible.why_not_process()
        or eligible.why_not_batch(batch, rows, rule)
    )
    if not why and capturing and real is None and logits.device not in _real:
        why = "no_warm_up"  # what is allocated now would belong to the graph
    if why:
        counts.layer(layer, phase, rows, why, rule, capturing)
        return None
    router = _router(config, top_k, shared)
    place = experts.place(logits.device, phase, capturing) if rule.count else None
    if logits.device.type == "cpu":
        chosen = reference.choose(logits, bias, real, rule, router, place)
    else:
        from sglang_patches.runtime.oea_topk import kernel  # Triton takes a while, and a launcher needs none

        chosen = kernel.choose(logits, bias, _count(logits, real, capturing), rule, router, place)
    counts.layer(layer, phase, rows, APPLIED, rule, capturing)
    return chosen


def _router(config: Any, top_k: int, shared: int) -> reference.Router:
    from sglang.srt.layers.moe.topk import fused_shared_expert_weight

    weight = fused_shared_expert_weight(
        routed_scaling_factor=config.routed_scaling_factor,
        fused_in_topk=bool(config.apply_routed_scaling_factor_on_output),
    )
    return eligible.router_of(config, top_k, shared, weight)


def _count(logits: torch.Tensor, real: torch.Tensor | None, capturing: bool) -> torch.Tensor:
    """The number of rows that are no padding, int32, on the device.

    A captured graph reads one place, which `before_replay` fills. Elsewhere all rows are real unless upstream counts
    them. Every place is aligned alike, because Triton compiles anew for another alignment.
    """
    if real is not None:
        return real
    device = logits.device
    if device not in _real:
        _real[device] = torch.zeros(4, dtype=torch.int32, device=device)
        _rows[device] = torch.arange(settings.MOST_TOKENS + 1, dtype=torch.int32, device=device)[:, None].repeat(1, 4)
    return _real[device] if capturing else _rows[device][logits.shape[0]]


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def before_replay(runner: Any) -> None:
    """Called by upstream's `DecodeCudaGraphRunner` when a batch is in its buffers, before the graph runs.

    Tells the graph how many of its rows are real, by a fill on the stream that it runs on: no wait.
    """
    rule = settings.rule()
    if rule is None or runner.model_runner.is_draft_worker:
        return
    for count in _real.values():
        count.fill_(runner.raw_num_token)
    if not counts.captured:
        return
    experts.begin()
    phase = eligible.phase_of(runner.capture_forward_mode)
    if phase in rule.phases:
        counts.replay(phase, runner.bs * runner.captured_req_width, runner.raw_num_token, rule)
