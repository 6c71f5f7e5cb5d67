"""Patch ``deepseek-v2-embedding-capture``: layer ids mean what the operator says, and every legal one is captured.

Four hooks, in the order in which a server's start meets them:

1. `settles_draft_ids` (``configs/model_config.py``) finds out what is asked for (`layer_ids.read_request`) and writes
   the list into the draft's ``eagle_config``, the one place from which upstream sizes ``fc`` and its buffers. So the
   draft and the capture cannot disagree about the number of states.
2. `attach` (``model_runner_components/spec_aux_hidden_state.py``) hands the request to the target, and refuses a list
   that cannot be right before weights are read.
3. `takes_layer_ids` (``DeepseekV2ForCausalLM.set_eagle3_layers_to_capture``) resolves it, refuses what would fail at
   the first request, and records what is captured.
4. `collector_for` (``DeepseekV2Model.forward``) keeps the list's order.

The states themselves are read by upstream's boundary of the layer that takes them in
(``layers/layer_boundary/stage.py``, ``_prepare_attention``), also the embedding's, as the input of layer 0. That place
is right, and embedding again is not: the text model of Kimi-K2.5 gets ``input_embeds`` with image features in it and no
``input_ids``. The boundary reads the residual *after* ``prepare`` has completed whatever sum the layer before left
undone (an all-reduce fused with the norm, a MoE finalize handoff, a declared sum of row-parallel shards), so no rank
sees a partial sum; the embedding is reduced in `VocabParallelEmbedding.forward`, except where attention inputs are
scattered, which upstream switches off under EAGLE-3 (``adapters/attention.py``). And it copies at once into the packed
buffer, so that a captured graph replays the copy, and later layers may reuse the residual's storage.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from sglang_patches import lane
from sglang_patches.runtime import _outcome, _ranks
from sglang_patches.runtime.deepseek_v2_embedding_capture import in_loop
from sglang_patches.runtime.deepseek_v2_embedding_capture.in_loop import add_embedding, in_list_order, is_captured
from sglang_patches.runtime.deepseek_v2_embedding_capture.layer_ids import (
    CONVENTION_KEY,
    ENV_CONVENTION,
    ENV_IDS,
    IDS_KEY,
    LayerIdError,
    LayerIds,
    Request,
    Resolved,
    own_lists,
    read_request,
    resolve,
)

PATCH = "deepseek-v2-embedding-capture"
__all__ = [
    "LayerIdError",
    "add_embedding",
    "attach",
    "collector_for",
    "in_list_order",
    "is_captured",
    "sets_layers",
    "settles_draft_ids",
    "takes_layer_ids",
]

# Targets whose language model sets its layers through `takes_layer_ids`. All others are left to upstream.
_TARGETS = {
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "KimiK25ForConditionalGeneration",
    "MistralLarge3ForCausalLM",
}
# What every target of upstream 0.5.23 captures, and every draft is sized for, where nobody names layers.
_UPSTREAM_STATES = 3


def settles_draft_ids(config_draft_model: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``ModelConfig._config_draft_model``: an EAGLE-3 draft's configuration names the ids that will be used.

    Raises:
        LayerIdError: see `read_request`; or ids that are not as many as the states the draft takes.
    """

    @functools.wraps(config_draft_model)
    def settled(self: Any) -> None:
        config_draft_model(self)
        if not self.is_draft_model or lane.here().algorithm_of(self) != "EAGLE3":
            return
        eagle = getattr(self.hf_config, "eagle_config", None)
        if isinstance(eagle, dict) and not eagle.get("use_aux_hidden_state", True):
            # Such a draft has no layers to name, and its exporter (ModelOpt) writes an empty list.
            self.aux_layer_request = Request(None, "use_aux_hidden_state")
            return
        request = read_request(self.hf_config, self.model_override_args, os.environ)
        self.aux_layer_request = request
        if request.ids is not None:
            _check_count(self.hf_config, request)
            self.hf_config.eagle_config = {**(eagle or {}), IDS_KEY: list(request.ids)}

    return settled


def _check_count(config: Any, request: Request) -> None:
    """The draft's own files tell how many states its ``fc`` takes; another list may name others, but as many."""
    assert request.ids is not None
    constant = lane.here().draft_states
    if constant is not None and len(request.ids) != constant:
        raise LayerIdError(
            f"{request.ids_from} names {len(request.ids)} layers, {list(request.ids)}, but drafts take {constant} "
            "hidden states in this upstream release, whatever their files say. Name as many layers, or serve it "
            "with a later release."
        )
    taken = {source: len(ids) for source, ids in own_lists(config)}
    if len(set(taken.values())) > 1:
        # The operator's list decides between them (without one, `read_request` has refused).
        taken = {}
    if getattr(config, "num_aux_hidden_states", None) is not None:
        taken["the draft's num_aux_hidden_states"] = int(config.num_aux_hidden_states)
    for source, count in taken.items():
        if count != len(request.ids):
            raise LayerIdError(
                f"{request.ids_from} names {len(request.ids)} layers, {list(request.ids)}, but the draft takes {count} "
                f"hidden states (by {source}). Name {count} layers."
            )


def attach(config: Any, draft_model_config: Any, target_model_config: Any) -> None:
    """Hand what is asked for to the target: upstream passes ``eagle_aux_hidden_state_layer_ids`` on as it is.

    A target that has a rule of its own (most of upstream's add 1 to each id) gets what upstream alone would hand to it,
    or the operator's list as it is.

    Args:
        config: upstream's ``SpecAuxHiddenStateConfig`` of the target.

    Raises:
        LayerIdError: a list that this target cannot serve.
    """
    request: Request | None = getattr(draft_model_config, "aux_layer_request", None)
    if request is None:
        return
    if not config.eagle_use_aux_hidden_state:
        _outcome.record(PATCH, "not needed", "the draft takes no auxiliary hidden states (use_aux_hidden_state: false)")
        return
    architectures = set(target_model_config.hf_config.architectures or ())
    if not architectures & _TARGETS:
        _leave_to_upstream(config, request, ", ".join(sorted(architectures)))
        return
    if request.remark and _ranks.is_first():
        _outcome.logger.warning("sglang-patches: %s: %s", PATCH, request.remark)
    resolve(request, target_model_config.hf_text_config.num_hidden_layers)
    config.eagle_aux_hidden_state_layer_ids = None if request.ids is None else LayerIds(request)


def _leave_to_upstream(config: Any, request: Request, architecture: str) -> None:
    handed = request.ids if request.by_operator else request.upstream_ids
    if handed is None and request.ids is not None and len(request.ids) != _UPSTREAM_STATES:
        raise LayerIdError(
            f"{request.ids_from} names {len(request.ids)} layers, {list(request.ids)}, but upstream does not read that "
            f"key for {architecture} and captures {_UPSTREAM_STATES} layers of its own choice. Set {ENV_IDS} to the "
            f"list as {architecture} counts it."
        )
    # Replaced by `takes_layer_ids` if the target turns out to use it.
    _outcome.record(
        PATCH,
        "not needed",
        f"{architecture} sets its layers by upstream's rule, not by a convention",
        ids=None if handed is None else list(handed),
    )
    config.eagle_aux_hidden_state_layer_ids = None if handed is None else list(handed)


def takes_layer_ids(setter: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``DeepseekV2ForCausalLM.set_eagle3_layers_to_capture(self, layer_ids=None)``.

    A plain list (``--return-aux-hidden-state-layer-ids``) is read by upstream's rule and checked all the same.

    Raises:
        LayerIdError: a layer that does not exist, or that will not be captured as this server is started.
    """

    @functools.wraps(setter)
    def taking(self: Any, layer_ids: list[int] | None = None) -> None:
        if layer_ids is None:
            # Upstream 0.5.9 calls it without ids once more; that does not take back what was asked for.
            layer_ids = getattr(self, "layer_ids_asked", None)
        if isinstance(layer_ids, LayerIds):
            request = layer_ids.request
            self.layer_ids_asked = layer_ids
        else:
            request = Request(None if layer_ids is None else tuple(layer_ids), "upstream's arguments")
        resolved = resolve(request, self.config.num_hidden_layers)
        check_captured(self, resolved)
        setter(self, layer_ids)
        if not self.pp_group.is_last_rank:
            _outcome.record(PATCH, "not needed", "the last pipeline rank captures")
            return
        self.model.layers_to_capture = sorted(set(resolved.layers))
        if lane.here().captures_at_boundary:
            self.model.make_aux_collector = _collector_maker(resolved)
        else:
            in_loop.set_up(self.model, resolved.layers)
        _record(resolved)

    return taking


def sets_layers(model_runner: Any) -> bool:
    """Set the layers of the target before its graphs are captured; True where an EAGLE-3 draft asks for some.

    Upstream 0.5.9 sets the draft's own only after that, so that graphs capture [2, n // 2, n - 3] whatever it says.
    """
    if not model_runner.eagle_use_aux_hidden_state:
        return False
    model_runner.model.set_eagle3_layers_to_capture(model_runner.eagle_aux_hidden_state_layer_ids)
    return True


def check_captured(target: Any, resolved: Resolved) -> None:
    """Refuse, on every rank, layers of the ``DeepseekV2ForCausalLM`` that no forward of this server would capture.

    Raises:
        LayerIdError: a layer on an earlier pipeline rank, or one that two-batch overlap runs, or an order that the
            model's forward cannot keep.
    """
    from sglang.srt.distributed.utils import get_pp_indices
    from sglang.srt.layers.moe.utils import is_tbo_enabled
    from sglang.srt.models.deepseek_v2 import DeepseekV2Model

    stages = target.pp_group.world_size
    first, _ = get_pp_indices(target.config.num_hidden_layers, stages - 1, stages)
    earlier = [name for name, layer in zip(resolved.names(), resolved.layers, strict=True) if layer < first]
    if earlier:
        raise LayerIdError(
            f"{', '.join(earlier)} cannot be captured with --pp-size {stages}: only the last pipeline rank captures, "
            f"and it holds layers {first} to {target.config.num_hidden_layers - 1}. Start with --pp-size 1."
        )
    model = target.model
    overlapped = [
        name
        for name, layer in zip(resolved.names(), resolved.layers, strict=True)
        if layer >= model.first_k_dense_replace > 0
    ]
    if is_tbo_enabled() and overlapped:
        raise LayerIdError(
            f"{', '.join(overlapped)} cannot be captured with --enable-two-batch-overlap: layers from "
            f"{model.first_k_dense_replace} on then run as two overlapped batches, where upstream captures nothing. "
            "Start without --enable-two-batch-overlap."
        )
    ascending = list(resolved.layers) == sorted(set(resolved.layers))
    if not ascending and type(model).forward is not DeepseekV2Model.forward:
        raise LayerIdError(
            f"the order of the ids {list(resolved.asked or ())} cannot be kept by {type(model).__name__}, which has a "
            f"forward of its own. Set {ENV_IDS} to ascending ids without repeats, if the draft was trained so."
        )


def _record(resolved: Resolved) -> None:
    detail = f"captures {', '.join(resolved.names())}"
    figures: dict[str, Any] = {
        "ids": None if resolved.asked is None else list(resolved.asked),
        "convention": resolved.convention,
        "decided_by": resolved.decided_by,
        "layers": resolved.names(),
        "layer_inputs": list(resolved.layers),
        "guessed": resolved.guessed,
    }
    if resolved.guessed:
        turned = resolved.other_reading()
        assert turned is not None
        detail += (
            f"; this is {resolved.decided_by}, and read the other way it would be {', '.join(turned)}: if the accept "
            f"length is low, set {ENV_CONVENTION} or the draft's {CONVENTION_KEY}"
        )
        figures["other_reading"] = turned
    if resolved.remark:
        detail += f"; {resolved.remark}"
        figures["remark"] = resolved.remark
    _outcome.record(PATCH, "applied", detail, **figures)


def _collector_maker(resolved: Resolved) -> Callable[[], Any] | None:
    """What makes a forward's collector; None where upstream's own keeps the order."""
    if list(resolved.layers) == sorted(set(resolved.layers)):
        return None
    from sglang_patches.runtime.deepseek_v2_embedding_capture.collector import ListOrderPacker

    return functools.partial(ListOrderPacker, resolved.layers)


def collector_for(model: Any, upstream: Any) -> Any:
    """What one ``DeepseekV2Model.forward`` collects captured states in; ``upstream`` is its own, still empty packer."""
    make = getattr(model, "make_aux_collector", None)
    return upstream if make is None else make()
