"""Captured states where upstream's own loop over the layers collects them in a list (0.5.9, ``models/deepseek_v2.py``).

Before layer ``i`` runs the loop adds up ``hidden_states + residual``. Layer 0 has no residual yet, so that capturing
the embedding's output ends in a TypeError; and where a layer leaves its all-reduce to the norm of the next one, the sum
is that of one rank. Here the embedding's output is added apart, and a layer whose output is captured reduces by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def set_up(model: Any, layers: Sequence[int]) -> None:
    """Tell a ``DeepseekV2Model`` what to capture.

    Args:
        layers: layer whose input each state is, in the draft's order; 0 is the embedding's output.
    """
    distinct = sorted(set(layers))
    model.layers_to_capture = [layer for layer in distinct if layer > 0]
    model.captures_embedding = distinct[0] == 0
    model.captured_order = None if list(layers) == distinct else [distinct.index(layer) for layer in layers]
    for index, layer in enumerate(model.layers):
        layer.output_is_captured = index + 1 in distinct


def add_embedding(model: Any, states: list[torch.Tensor], hidden_states: torch.Tensor) -> None:
    """Append the embedding's output where it is captured: the first of all states.

    Args:
        states: what this forward has captured; still empty.
        hidden_states: (tokens, hidden size), the input of layer 0, image features included.
    """
    if getattr(model, "captures_embedding", False):
        # It becomes the residual, which later layers add to in place.
        states.append(hidden_states.clone())


def in_list_order(model: Any, states: list[torch.Tensor]) -> list[torch.Tensor]:
    """The states, which come in the order of the layers, as the draft's list names them, repeats included."""
    order = getattr(model, "captured_order", None)
    return states if order is None else [states[place] for place in order]


def is_captured(layer: Any) -> bool:
    """Whether this ``DeepseekV2DecoderLayer``'s output is captured, so that it must be complete."""
    return getattr(layer, "output_is_captured", False)
