"""Whether the keys of a ``config.json`` that are read here hold what they should, so that no reader has to ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

IDS = "eagle_aux_hidden_state_layer_ids"
# In upstream's order (utils/hf_transformers/common.py, CONTEXT_LENGTH_KEYS).
LENGTHS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
_MOST_LAYERS, _MOST = 10_000, 1_000_000_000
_SIZES = (
    "vocab_size", "draft_vocab_size", "hidden_size", "target_hidden_size", "intermediate_size", "intermediate_size_mlp",
    "num_attention_heads", "num_key_value_heads", "head_dim", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
_COUNTS = ("num_hidden_layers", "num_aux_hidden_states")
_OBJECTS = ("eagle_config", "rope_scaling", "rope_parameters", "text_config", "transformer_layer_config")


def _integer(most: int) -> Callable[[Any], bool]:
    return lambda found: isinstance(found, int) and not isinstance(found, bool) and 1 <= found <= most


def _positive(found: Any) -> bool:
    return isinstance(found, int | float) and not isinstance(found, bool) and found > 0


def _list_of(kind: type) -> Callable[[Any], bool]:
    return lambda found: isinstance(found, list) and all(type(one) is kind for one in found)


_WANTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "architectures": ("a list of names", _list_of(str)),
    IDS: ("a list of integers", _list_of(int)),
    "factor": ("a number above 0", _positive),
    "model_type": ("a name", lambda found: isinstance(found, str)),
    **dict.fromkeys(_SIZES, (f"an integer from 1 to {_MOST}", _integer(_MOST))),
    **dict.fromkeys(_COUNTS, (f"an integer from 1 to {_MOST_LAYERS}", _integer(_MOST_LAYERS))),
    **dict.fromkeys(LENGTHS, ("a number above 0", _positive)),
    **dict.fromkeys(_OBJECTS, ("an object", lambda found: isinstance(found, dict))),
}


def malformed(config: Mapping[str, Any], inside: str = "") -> Iterator[str]:
    """What is wrong with each key that is here and not null, nested objects included; a null counts as absent."""
    for key, (wanted, fits) in _WANTED.items():
        found = config.get(key)
        if found is None:
            continue
        if not fits(found):
            yield f"config.json {inside}{key} is {_short(found)}, expected {wanted}"
        elif key in _OBJECTS:
            yield from malformed(found, f"{inside}{key}.")


def absent(config: Mapping[str, Any], keys: Iterable[str]) -> Iterator[str]:
    """Those of `keys` that are not here, each with its remedy."""
    for key in keys:
        if config.get(key) is None:
            yield f"config.json has no {key}, expected {_WANTED[key][0]}: add it, or download the model again"


def _short(found: Any) -> str:
    told = repr(found)
    return told if len(told) <= 60 else told[:57] + "..."
