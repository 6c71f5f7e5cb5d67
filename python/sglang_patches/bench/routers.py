"""Runs inside the scheduler process: routers of a model with random weights that send tokens to different experts."""

from __future__ import annotations

from typing import Any


def draw(model: Any) -> int:
    """Draw each router's weights from a normal distribution, by layer the same in every process, and set its bias to 0.

    Upstream's dummy routers send every token to the same experts: norms are as small as all weights, so the correction
    bias decides. Drawn ones spread unlike tokens evenly, 4 tokens over 31 of 384 experts, 8 a token: as much as a
    decode step of so many requests can read. Tokens that a random draft drafts are alike, so a verify of them reads
    fewer. In place, so that captured graphs see it.

    Returns: number of routers, upstream's ``MoEGate`` modules.
    """
    import torch
    from sglang.srt.models.deepseek_v2 import MoEGate

    gates = [module for module in model.modules() if isinstance(module, MoEGate)]
    for number, gate in enumerate(gates):
        gate.weight.data.copy_(torch.randn(gate.weight.shape, generator=torch.Generator().manual_seed(number)))
        if gate.e_score_correction_bias is not None:
            gate.e_score_correction_bias.data.zero_()
    return len(gates)
