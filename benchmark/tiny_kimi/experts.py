"""A mixture-of-experts forward for few, small experts: compute all of them, weigh the chosen ones.

Two dense products instead of a loop or a sort over experts; with eight experts of which two are chosen the wasted
arithmetic costs less than the launches it saves.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DeepseekV3ForCausalLM


def all_experts_forward(self: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`DeepseekV3Experts.forward`: hidden (N, H), top_k_index and top_k_weights (N, k) -> (N, H)."""
    count, double_inner, width = self.gate_up_proj.shape
    weights = hidden.new_zeros(len(hidden), count, dtype=top_k_weights.dtype).scatter(1, top_k_index, top_k_weights)
    inner = F.linear(hidden, self.gate_up_proj.reshape(count * double_inner, width)).view(-1, count, double_inner)
    gate, up = inner.chunk(2, dim=-1)
    inner = F.silu(gate) * up * weights[..., None].to(gate.dtype)
    return F.linear(inner.flatten(1), self.down_proj.transpose(0, 1).reshape(width, -1))


def use_all_experts(model: DeepseekV3ForCausalLM) -> None:
    """Make `model` (a `DeepseekV3ForCausalLM`) use `all_experts_forward`."""
    # transformers 5; here, so that lanes with an older one can read the rest.
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("all_experts", all_experts_forward)
    model.config._experts_implementation = "all_experts"


def mixed_precision(device: torch.device) -> torch.autocast:
    """bfloat16 autocast on a GPU; nothing on a CPU, most of which only emulate it."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def default_device() -> torch.device:
    """The first CUDA device if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
