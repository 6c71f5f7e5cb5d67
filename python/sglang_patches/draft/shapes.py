"""The tensors that upstream's two EAGLE-3 draft classes load, by name and shape, from the draft's configuration.

``LlamaForCausalLMEagle3`` (``models/llama_eagle3.py``) and ``Eagle3DeepseekV2ForCausalLM``
(``models/kimi_k25_eagle3.py``) of upstream 0.5.23. Other classes are left to `accounting`, which watches them load.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

Shapes = dict[str, tuple[int, ...]]

LLAMA = "LlamaForCausalLMEagle3"
MLA = "Eagle3DeepseekV2ForCausalLM"
_OLD_NAMES = {"midlayer.": "layers.0.", "aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1"}
_OLD_NAMES["aux_norm_high"] = "fc_norm.2"


def value(config: Any, key: str, default: Any = None) -> Any:
    """`key` of a configuration (object or dict), else of its nested ``text_config``; null counts as absent."""
    for source in (config, _get(config, "text_config")):
        found = _get(source, key)
        if found is not None:
            return found
    return default


def _get(config: Any, key: str) -> Any:
    return config.get(key) if isinstance(config, dict) else getattr(config, key, None)


def layer_ids(draft: Any) -> tuple[list[int] | None, str]:
    """The ids of the target layers the draft wants, and the key that names them (None: no key does)."""
    nested = _get(value(draft, "eagle_config"), "eagle_aux_hidden_state_layer_ids")
    if nested is not None:
        return list(nested), "eagle_config.eagle_aux_hidden_state_layer_ids"
    top = value(draft, "eagle_aux_hidden_state_layer_ids")
    return (list(top) if top is not None else None), "eagle_aux_hidden_state_layer_ids"


def takes_states(draft: Any) -> bool:
    """Whether the draft is fed captured states of several layers (``use_aux_hidden_state``, true where unsaid)."""
    return _get(value(draft, "eagle_config"), "use_aux_hidden_state") is not False


def states(draft: Any) -> tuple[int, str]:
    """How many captured states the draft concatenates, and what says so."""
    number = value(draft, "num_aux_hidden_states")
    if number is not None:
        return int(number), "num_aux_hidden_states"
    ids, key = layer_ids(draft)
    return (len(ids), key) if ids else (3, "the default, since no key names the layers")


@dataclass(frozen=True)
class Sizes:
    """Sizes that a draft's tensors follow from: its own and its target's hidden size, and its captured states."""

    hidden: int
    target_hidden: int
    states: int

    @classmethod
    def of(cls, draft: Any) -> Sizes:
        hidden = int(value(draft, "hidden_size"))
        return cls(hidden, int(value(draft, "target_hidden_size", hidden)), states(draft)[0])


def canonical(name: str, architecture: str) -> str:
    """The name upstream's loader gives a checkpoint's tensor; only the Llama draft takes names with ``model.``."""
    for old, new in _OLD_NAMES.items():
        if old in name:
            name = name.replace(old, new)
    return name.removeprefix("model.") if architecture == LLAMA else name


def expected(draft: Any, architecture: str) -> Shapes | None:
    """Canonical name -> shape of every tensor the draft needs, `lm_head`, `embed_tokens` and `optional` ones aside.

    None for an architecture not known here.
    """
    if architecture not in (LLAMA, MLA):
        return None
    sizes = Sizes.of(draft)
    hidden, wide = sizes.hidden, sizes.states * sizes.target_hidden
    table: Shapes = {"norm.weight": (hidden,)}
    table["fc.weight"] = (hidden, wide)
    if value(draft, "bias", False):
        table["fc.bias"] = (hidden,)
    if value(draft, "fc_norm") or value(draft, "use_aux_norm", False):
        table |= {f"fc_norm.{i}.weight": (sizes.target_hidden,) for i in range(sizes.states)}
    before = _get(value(draft, "eagle_config"), "norm_before_fc")
    if architecture == LLAMA and (value(draft, "norm_before_fc", False) if before is None else before):
        table["input_norm.weight"] = (wide,)
    for layer in range(int(value(draft, "num_hidden_layers"))):
        attention = _mla(draft, hidden) if architecture == MLA else _gqa(draft, hidden, layer)
        table |= {f"layers.{layer}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        table |= {f"layers.{layer}.mlp.{name}.weight": shape for name, shape in _mlp(draft, hidden).items()}
        if architecture == LLAMA and (value(draft, "attention_bias", False) or value(draft, "bias", False)):
            # Upstream makes this one (models/llama.py), and replaces the projections before it by ones without.
            table[f"layers.{layer}.self_attn.o_proj.bias"] = (hidden,)
        norms = ["hidden_norm", "post_attention_layernorm"]
        # Later layers have no embedding input, so their input_layernorm does nothing.
        norms += ["input_layernorm"] if layer == 0 else []
        table |= {f"layers.{layer}.{norm}.weight": (hidden,) for norm in norms}
    return table


# Projections that some checkpoints store as one, by rows in this order.
_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.fused_qkv_a_proj_with_mqa": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def as_stored(table: Shapes, there: Container[str]) -> Shapes:
    """`table` (of `expected`) with projections as one where the names `there` have them as one and not apart."""
    table = dict(table)
    for layer in layers_in(list(table)):
        for whole, parts in _FUSED.items():
            names = [f"layers.{layer}.{part}.weight" for part in parts]
            fused = f"layers.{layer}.{whole}.weight"
            if fused in there and all(name in table for name in names) and not any(name in there for name in names):
                shapes = [table.pop(name) for name in names]
                table[fused] = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    return table


def optional(draft: Any) -> frozenset[str]:
    """Canonical names of parameters that upstream's class has and this draft may lack.

    A draft without captured states takes the target's last hidden state: ``fc`` is in no computation, and upstream
    applies ``hidden_norm`` with the weight it was made with, 1.
    """
    return frozenset() if takes_states(draft) else frozenset({"fc.weight", "fc.bias", "layers.0.hidden_norm.weight"})


# Where tensor parallelism on a CPU does not divide a size, upstream raises it in the configuration in memory, fills the
# tensors up with zeros as it loads them, and keeps the checkpoint's own size by another key (configs/update_config.py).
_BEFORE_PADDING = {
    "num_attention_heads": "original_num_attention_heads",
    "num_key_value_heads": "original_total_num_kv_heads",
    "intermediate_size": "original_intermediate_size",
    "intermediate_size_mlp": "original_intermediate_size_mlp",
}


def _stored(draft: Any, key: str, default: Any = None) -> int:
    """A size as the checkpoint's tensors have it."""
    return int(value(draft, _BEFORE_PADDING.get(key, key), value(draft, key, default)))


def _gqa(draft: Any, hidden: int, layer: int) -> Shapes:
    heads = _stored(draft, "num_attention_heads")
    kv_heads = _stored(draft, "num_key_value_heads", heads)
    head_dim = int(value(draft, "head_dim", hidden // heads))
    entering = 2 * hidden if layer == 0 else hidden
    return {
        "q_proj": (heads * head_dim, entering),
        "k_proj": (kv_heads * head_dim, entering),
        "v_proj": (kv_heads * head_dim, entering),
        "o_proj": (hidden, heads * head_dim),
    }


def _mla(draft: Any, hidden: int) -> Shapes:
    heads, q_rank, kv_rank, nope, rope, v_dim = (
        _stored(draft, key)
        for key in (
            "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        )
    )  # fmt: skip
    # Not as one tensor, as upstream itself keeps them: its loader waits for both halves, and drops the whole.
    return {
        "q_a_proj": (q_rank, 2 * hidden),
        "q_a_layernorm": (q_rank,),
        "q_b_proj": (heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa": (kv_rank + rope, 2 * hidden),
        "kv_a_layernorm": (kv_rank,),
        "kv_b_proj": (heads * (nope + v_dim), kv_rank),
        "o_proj": (hidden, heads * v_dim),
    }


def _mlp(draft: Any, hidden: int) -> Shapes:
    key = "intermediate_size_mlp" if value(draft, "model_type") == "llama4_text" else "intermediate_size"
    inner = _stored(draft, key)
    return {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}


# Not for upstream to take: the mask beside d2t, rotary tables that it computes, the verifier's own of `speculators`.
_IDLE = re.compile(r"(^|\.)(t2d|inv_freq|cos_cached|sin_cached)$|rotary_emb\.|(^|\.)verifier_")
_TAKEN = re.compile(
    r"(^|\.)(d2t|lm_head\.weight|embed_tokens\.weight)$|\.(qkv_proj|gate_up_proj)\.|\.input_layernorm\.weight$"
)


def idle(name: str) -> bool:
    """Whether nobody needs to take this tensor."""
    return _IDLE.search(name) is not None


def taken_or_idle(name: str, biases: bool = True) -> bool:
    """Whether a draft may have this tensor beside those of `expected`; `biases`: any bias may be."""
    return idle(name) or _TAKEN.search(name) is not None or (biases and name.endswith(".bias"))


def layers_in(names: list[str]) -> set[int]:
    """Numbers of the decoder layers that canonical tensor names belong to."""
    return {int(found[1]) for name in names if (found := re.match(r"(?:model\.)?layers\.(\d+)\.", name))}
