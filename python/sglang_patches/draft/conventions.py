"""In which conventions EAGLE-3 drafts are published, and how each is said in upstream's words.

Each entry has its source in ``docs/patches/llama-eagle3-draft-loading.md``. What no source establishes is not here: a
name that is not known stays as it is, and whoever loads the draft refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_patches.draft.checkpoint import TensorInfo
from sglang_patches.draft.keys import IDS, malformed
from sglang_patches.draft.shapes import LLAMA, MLA, layer_ids, takes_states, value

# As trainers and vLLM's registry call the two architectures that upstream has.
ARCHITECTURES = {
    LLAMA: LLAMA,
    "Eagle3LlamaForCausalLM": LLAMA,  # AngelSlim, vLLM
    "Eagle3Speculator": LLAMA,  # speculators' configuration class
    "Eagle3DraftModel": LLAMA,  # speculators' model class
    MLA: MLA,  # ModelOpt, lightseek, vLLM
    "Eagle3DeepseekV3ForCausalLM": MLA,  # vLLM
    "DeepseekV3ForCausalLMEagle3": MLA,  # SpecForge
}
# TorchSpec's own training format, which has other names (``kv_a_proj``) and another rotation.
_TORCHSPEC_MLA = "DeepSeekForCausalLMEagle3"
_SPECULATORS = "speculators_model_type"
# What speculators leave out of ``transformer_layer_config`` (a difference to the class) is transformers' default.
_LLAMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip
_OF_SPECULATORS = (
    "draft_vocab_size", "target_hidden_size", "norm_before_fc", "fc_norm", "norm_output", "num_aux_hidden_states",
    IDS, "eagle_config", "quantization_config", "torch_dtype", "dtype", "tie_word_embeddings", _SPECULATORS,
    "speculators_config", "speculators_version",
)  # fmt: skip


@dataclass
class Reading:
    """A draft's configuration in upstream's words.

    Attributes:
        config: the whole of it.
        changed: the keys of it that are new or have another value than in ``config.json``.
        told: what was read in another way than upstream alone would, for people.
        refused: why no configuration of upstream's says it.
        nested: see `nested`.
    """

    config: dict[str, Any]
    changed: dict[str, Any] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    nested: bool = False

    def change(self, told: str, **keys: Any) -> None:
        self.changed |= keys
        self.config |= keys
        self.told.append(told)


def architecture(raw: Mapping[str, Any]) -> str | None:
    """Upstream's class for the draft with this ``config.json``; None for what is no EAGLE-3 draft known here."""
    if raw.get(_SPECULATORS) is not None:
        return LLAMA if "transformer_layer_config" in raw else None
    said = _said(raw)
    if said == "LlamaForCausalLM" and "draft_vocab_size" in raw:
        return LLAMA  # EAGLE's own
    return MLA if said == _TORCHSPEC_MLA else ARCHITECTURES.get(said)


def _said(raw: Mapping[str, Any]) -> str:
    """The first of ``architectures``; empty where there is none."""
    names = raw.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def nested(raw: Mapping[str, Any]) -> bool:
    """Whether upstream finds no model in this ``config.json`` unless it is rewritten (speculators' format)."""
    return raw.get(_SPECULATORS) is not None


def read_config(raw: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None) -> Reading:
    """The configuration of a draft (see `architecture`), by its ``config.json`` and the headers of its weights.

    Args:
        tensors: None where the weights are not on this machine, or no safetensors: then only names of keys are read.
    """
    said = _said(raw)
    reading = Reading(dict(raw), nested=nested(raw), refused=list(malformed(raw)))
    if reading.refused:
        return reading
    if reading.nested:
        _speculators(raw, reading)
    elif said == _TORCHSPEC_MLA:
        reading.refused.append(
            f"config.json architectures is {said}, TorchSpec's format for training: it rotates the halves of a head as "
            "Llama does, where upstream's MLA draft rotates pairs. Give a draft that was exported for serving "
            f"({MLA})"
        )
    wanted = architecture(raw)
    if wanted == MLA and value(raw, "norm_before_residual", False):
        reading.refused.append(
            "config.json norm_before_residual is true, expected false or no such key: upstream's MLA draft adds the "
            "residual from before hidden_norm, and would draft noise. Give a draft that was trained so"
        )
    if wanted != said:
        reading.change(f"architecture {said or 'none'} as {wanted}", architectures=[wanted])
    if (value(raw, "eagle_config") or {}).get("return_hidden_post_norm") and not value(raw, "norm_output"):
        reading.change("eagle_config.return_hidden_post_norm as norm_output", norm_output=True)
    ids, key = layer_ids(reading.config)
    if ids and not key.startswith("eagle_config") and value(reading.config, "num_aux_hidden_states") is None:
        reading.change(f"{len(ids)} captured states, by {key} at top level", num_aux_hidden_states=len(ids))
    if tensors is not None:
        _states(reading, view(tensors), tensors)
    _head(reading, tensors)
    return reading


def _speculators(raw: Mapping[str, Any], reading: Reading) -> None:
    kind, layer = raw[_SPECULATORS], dict(raw.get("transformer_layer_config") or {})
    if kind != "eagle3":
        reading.refused.append(f"config.json {_SPECULATORS} is {kind!r}, expected 'eagle3'")
    layer.setdefault("model_type", "llama")
    if layer["model_type"] == "llama":
        layer = _LLAMA_DEFAULTS | layer
    outer = {key: raw[key] for key in _OF_SPECULATORS if raw.get(key) is not None}
    # vLLM, for which the format is made, takes an absent key for true.
    before = raw.get("norm_before_residual", True)
    reading.config = {**layer, **outer, "norm_before_residual": before}
    reading.change("speculators' format", **reading.config)


def _states(reading: Reading, names: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> None:
    """The number of captured states where no key tells it."""
    config = reading.config
    fc, ids = names.get("fc.weight"), layer_ids(config)[0]
    if fc is None or ids or value(config, "num_aux_hidden_states") is not None or not takes_states(config):
        return
    each = int(value(config, "target_hidden_size", value(config, "hidden_size", 0)))
    width = (tensors[fc].shape or (0,))[-1]
    if each and width % each == 0 and width != 3 * each:
        reading.refused.append(
            f"tensor {fc} has shape {list(tensors[fc].shape)}, which takes {width // each} captured states of {each}, "
            f"but no key of config.json names the layers: add eagle_config.{IDS}"
        )


def _head(reading: Reading, tensors: Mapping[str, TensorInfo] | None) -> None:
    """Which head: one of its own, the embedding (tied), or the target's (``draft_vocab_size`` null)."""
    config = reading.config
    size, whole = value(config, "draft_vocab_size"), value(config, "vocab_size")
    tied = bool(value(config, "tie_word_embeddings", False))
    head = next((n for n in tensors or () if n == "lm_head.weight" or n.endswith(".lm_head.weight")), None)
    if tied and head is not None:
        reading.change("tie_word_embeddings with a head in the file: that head", tie_word_embeddings=False)
        tied = False
    if size is None and tied:
        reading.change("no draft_vocab_size, tied: the whole vocabulary", draft_vocab_size=whole)
    elif size is None and head is not None and tensors is not None:
        rows = (tensors[head].shape or (0,))[0]
        reading.change(f"no draft_vocab_size: {rows}, the rows of its head", draft_vocab_size=rows)
    elif size is None and "draft_vocab_size" not in config:
        reading.change("no draft_vocab_size and no head: the target's", draft_vocab_size=None)
    elif size == whole and not tied and tensors is not None and not any("lm_head." in name for name in tensors):
        reading.change("no head: the target's", draft_vocab_size=None)


_ONE = (("aux_norm_low", "fc_norm.0"), ("aux_norm_mid", "fc_norm.1"), ("aux_norm_high", "fc_norm.2"))
_FUSED = ("self_attn.fused_qkv_a_proj.", "self_attn.fused_qkv_a_proj_with_mqa.")  # vLLM's and upstream's


def canonical(name: str) -> str:
    """A tensor's name as upstream's two classes know it: ``layers.N.``, without ``model.``."""
    name = name.removeprefix("model.")
    name = re.sub(r"^midlayer\.(?=\d+\.)", "layers.", name)  # several layers, as ModelOpt and TensorRT-LLM have them
    name = re.sub(r"^midlayer\.", "layers.0.", name)
    for old, new in _ONE:
        name = re.sub(rf"^{old}\.", f"{new}.", name)
    return name.replace(*_FUSED)


def view(names: Iterable[str]) -> dict[str, str]:
    """Canonical name -> name in the file. Of two tensors for one parameter the first counts; see `twice`.

    Later layers have one norm before attention. vLLM and speculators call it ``input_layernorm``, as any Llama layer,
    upstream and TensorRT-LLM ``hidden_norm``.
    """
    found: dict[str, str] = {}
    for name in names:
        found.setdefault(canonical(name), name)
    for name in list(found):
        norm = later_norm(name)
        if norm is not None and norm not in found:
            found[norm] = found.pop(name)
    return found


def later_norm(name: str) -> str | None:
    """The name that upstream has for a later layer's ``input_layernorm``; None for any other tensor."""
    later = re.fullmatch(r"layers\.([1-9]\d*)\.input_layernorm\.weight", name)
    return f"layers.{later[1]}.hidden_norm.weight" if later else None


def twice(names: Iterable[str]) -> list[str]:
    """Pairs of tensors that are the same parameter, for messages."""
    first: dict[str, str] = {}
    pairs = []
    for name in names:
        if first.setdefault(canonical(name), name) != name:
            pairs.append(f"{first[canonical(name)]} and {name}")
    return pairs


_SCALES = (".weight_scale", ".weight_scale_inv", ".input_scale")
EIGHT_BITS = ("F8_E4M3", "F8_E5M2")


def scaled(name: str) -> str | None:
    """The weight that a scale is of (``x.weight_scale`` -> ``x.weight``); None for another tensor."""
    return next((name.removesuffix(end) + ".weight" for end in _SCALES if name.endswith(end)), None)


def has_scale(name: str, names: Iterable[str]) -> bool:
    """Whether an 8-bit weight has the scale that it needs to be read."""
    stem = name.removesuffix(".weight")
    return not {f"{stem}.weight_scale", f"{stem}.weight_scale_inv"}.isdisjoint(names)
