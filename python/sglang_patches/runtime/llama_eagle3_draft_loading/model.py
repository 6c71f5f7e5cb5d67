"""What upstream's two draft classes lack, besides loading."""

from __future__ import annotations

import functools
from typing import Any

import torch

from sglang_patches.draft import conventions, shapes
from sglang_patches.draft.shapes import value
from sglang_patches.runtime import _outcome
from sglang_patches.runtime.llama_eagle3_draft_loading.loading import Loading
from sglang_patches.runtime.llama_eagle3_draft_loading.reading import PATCH, refuse

_APPLIED = "the draft was read by its own convention"
_STATES = 3  # what upstream's targets capture where no key names layers


def takes_every_convention(cls: Any) -> Any:
    """Decorate upstream's ``LlamaForCausalLMEagle3`` and ``Eagle3DeepseekV2ForCausalLM``.

    Its ``load_weights`` then takes tensors in every convention known (`Loading`) and raises DraftContractError for a
    draft that is not whole; ``set_embed`` leaves an embedding of the draft's own.

    That is the loading at start. Updates of a running server (``/update_weights_from_disk``, ``_from_tensor``,
    ``_from_distributed``, ``_from_ipc``) reach ``load_weights``, too, in pieces and with the target's tensors among
    them, since upstream hands one payload to target and draft: these are upstream's, unread and unjudged.
    """
    init, load, set_embed, set_both = cls.__init__, cls.load_weights, cls.set_embed, cls.set_embed_and_head

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.own_embedding = self.joined_to_target = False
        after = bool(value(self.config, "norm_before_residual", False))
        if after and isinstance(getattr(self.model, "layers", None), torch.nn.ModuleList):
            self.model.layers[0].norm_before_residual = True
        _check_states(self.config)

    @functools.wraps(load)
    def load_weights(self: Any, weights: Any) -> None:
        if self.joined_to_target:
            load(self, weights)
            return
        loading = Loading(self)
        load(self, loading.given(weights))
        reasons = loading.reasons()
        path = str(getattr(self.config, "_name_or_path", "") or "")
        if reasons:
            refuse(path, reasons)
        self.own_embedding = "embed_tokens.weight" in loading.stored
        _record(self, loading, reasons, path)

    @functools.wraps(set_embed)
    def set_embed_unless_own(self: Any, embed: torch.Tensor) -> None:
        self.joined_to_target = True
        if not _keeps_own(self, embed):
            set_embed(self, embed)

    @functools.wraps(set_both)
    def set_head_and_embed_unless_own(self: Any, embed: torch.Tensor, head: torch.Tensor) -> None:
        self.joined_to_target = True
        if _keeps_own(self, embed):
            del self.lm_head.weight
            self.lm_head.weight = head
        else:
            set_both(self, embed, head)

    cls.__init__, cls.load_weights = __init__, load_weights
    cls.set_embed, cls.set_embed_and_head = set_embed_unless_own, set_head_and_embed_unless_own
    return cls


def _check_states(config: Any) -> None:
    """Layers that only the top-level key names are captured by patch deepseek-v2-embedding-capture alone."""
    ids, key = shapes.layer_ids(config)
    if shapes.takes_states(config) and ids and not key.startswith("eagle_config") and len(ids) != _STATES:
        refuse(
            str(getattr(config, "_name_or_path", "")),
            [
                f"config.json names {len(ids)} layers, {ids}, by {key} at top level, which upstream does not capture: "
                f"it captures {_STATES} of its own choice. Turn patch deepseek-v2-embedding-capture on, which reads "
                f"that key, or name the layers by eagle_config.{conventions.IDS}"
            ],
        )


def _record(model: Any, loading: Loading, reasons: list[str], path: str) -> None:
    config = model.config
    told = [*(getattr(config, "draft_reading", None) or {}).get("told", []), *loading.told]
    if value(config, "norm_before_residual", False) and loading.kind == shapes.LLAMA:
        told.append("the residual after the norm")
    if shapes.takes_states(config) and _as_wide_as_its_own(model.model, shapes.Sizes.of(config).hidden):
        told.append("captured states as wide as the draft's own, told apart by the forward")
    figures = {
        "draft": path,
        "architecture": loading.kind,
        "tensors": len(loading.stored),
        "read_as": told,
        "embedding": "own" if model.own_embedding else "target",
        "head": "tied"
        if value(config, "tie_word_embeddings", False)
        else ("target" if model.load_lm_head_from_target else "own"),
    }
    if reasons:
        _outcome.record(PATCH, "failed", "the draft is not whole, and served all the same", **figures)
    elif told:
        _outcome.record(PATCH, "applied", _APPLIED, **figures)
    else:
        _outcome.record(PATCH, "not needed", "the draft is in upstream's own convention", **figures)


def _keeps_own(model: Any, embed: torch.Tensor) -> bool:
    """Whether the draft's embedding is its own: it came with one, which is not the target's (`embed`).

    Each rank judges its own rows. Where they are the target's it makes no difference which of the two it keeps.
    """
    if not model.own_embedding:
        return False
    own = model.model.embed_tokens.weight
    same = own.shape == embed.shape and torch.equal(own.data, embed.data.to(own.dtype))
    entry = _outcome.outcomes().get(PATCH)
    if entry is None:
        return not same
    figures = {key: found for key, found in entry.items() if key not in ("result", "detail")}
    if same:
        _outcome.record(PATCH, entry["result"], entry["detail"], **{**figures, "embedding": "target"})
    elif entry["result"] != "failed":
        # Upstream alone would have replaced it.
        figures["read_as"] = [*figures["read_as"], "its own embedding"]
        _outcome.record(PATCH, "applied", _APPLIED, **figures)
    return not same


def _as_wide_as_its_own(model: Any, hidden: int) -> bool:
    """Whether captured states are as wide as the draft's own hidden state; `model` as for `projected`."""
    wide = model.fc.in_features if isinstance(model.fc, torch.nn.Linear) else model.fc.input_size
    return bool(wide == hidden)


def residual_of(layer: Any, residual: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    """The first decoder layer's residual: `normed` for a draft trained so (``norm_before_residual``, speculators).

    Args:
        residual, normed: float ``[tokens, hidden size]``, the projected states before and after ``hidden_norm``.
    """
    return normed if getattr(layer, "norm_before_residual", False) else residual


def projected(model: Any, hidden: torch.Tensor, embeds: torch.Tensor, batch: Any) -> torch.Tensor:
    """The target's captured states after norms and ``fc``, where they are as wide as the draft's own hidden state.

    Upstream tells the two apart by their width alone, so a draft of one captured state would never project it. They
    differ by the forward, too: a draft decodes from its own states only, and extends from the target's only.

    Args:
        model: upstream's ``LlamaModel`` or ``Eagle3MLAModel`` of a draft.
        hidden: float ``[tokens, states * target hidden size]``, or the draft's own, ``[tokens, hidden size]``.
        embeds: float ``[tokens, hidden size]``.
        batch: upstream's ``ForwardBatch``.
    """
    if not _as_wide_as_its_own(model, embeds.shape[-1]) or not len(hidden) or not shapes.takes_states(model.config):
        return hidden
    if batch.forward_mode.is_decode_or_idle():
        return hidden
    if getattr(model, "input_norm", None) is not None:
        hidden = model.input_norm(hidden)
    if model.fc_norm is not None:
        chunks = hidden.chunk(model.num_aux_hidden_states, dim=-1)
        hidden = torch.cat([norm(chunk) for norm, chunk in zip(model.fc_norm, chunks, strict=True)], dim=-1)
    hidden = model.fc(hidden)
    return model._fc_gatherer(hidden[0]) if isinstance(hidden, tuple) else hidden
