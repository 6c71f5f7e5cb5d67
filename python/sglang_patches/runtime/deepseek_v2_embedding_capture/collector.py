"""Captured states in the order of the draft's list, repeats included.

Upstream's `AuxHiddenStatePacker` fills its slots in the order of the layers. A draft whose ids are not ascending, or
name a layer twice, was trained on another order of ``fc``'s inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sglang.srt.layers.aux_hidden_states import AuxHiddenStatePacker


class ListOrderPacker(AuxHiddenStatePacker):
    """Takes each distinct layer's state once, ascending, and puts it wherever the list names that layer.

    Args:
        layers: layer whose input each slot holds, in the draft's order.
    """

    _idx: int

    def __init__(self, layers: Sequence[int]) -> None:
        super().__init__(len(layers))
        self._slots = [[i for i, named in enumerate(layers) if named == layer] for layer in sorted(set(layers))]
        self._layers_seen = 0

    def append(self, hidden: torch.Tensor) -> None:
        """Copy ``hidden`` (tokens, hidden size) into its slots of the (tokens, K * hidden size) buffer."""
        slots = self._slots[self._layers_seen]
        written = self._idx
        for slot in slots:
            # Upstream's copies into the slot at this counter, and makes the buffer at the first call.
            self._idx = slot
            super().append(hidden)
        self._layers_seen += 1
        # What `__len__` and `finalize` count.
        self._idx = written + len(slots)
