"""bench/routers.py: random routers of upstream's own class spread tokens, where dummy ones send all the same way."""

from __future__ import annotations

import torch

from sglang_patches.bench import routers


class Gates(torch.nn.Module):
    def __init__(self) -> None:
        from sglang.srt.models.deepseek_v2 import MoEGate

        super().__init__()
        for name in ("first", "second"):
            # Without its constructor, which wants a running server's settings.
            gate = MoEGate.__new__(MoEGate)
            torch.nn.Module.__init__(gate)
            gate.weight = torch.nn.Parameter(torch.empty(384, 256).uniform_(-1e-3, 1e-3), requires_grad=False)
            gate.e_score_correction_bias = torch.nn.Parameter(torch.empty(384).uniform_(-1e-3, 1e-3))
            self.add_module(name, gate)

    def weight(self, name: str) -> torch.Tensor:
        return dict(self.named_parameters())[f"{name}.weight"]

    def chosen(self, name: str, hidden: torch.Tensor) -> int:
        gate = getattr(self, name)
        scores = torch.sigmoid(hidden @ gate.weight.T) + gate.e_score_correction_bias
        return len(torch.unique(scores.topk(8).indices))


def test_drawn_routers_choose_apart() -> None:
    torch.manual_seed(0)
    model = Gates()
    # Norms as small as all weights: what a router of a model with random weights sees.
    hidden = torch.randn(64, 256) * 1e-3
    before = model.chosen("first", hidden)
    assert routers.draw(model) == 2
    # 512 choices among 384 experts, were they even, reach 384 * (1 - (1 - 8 / 384)**64) = 284.
    assert before < 100 < 250 < model.chosen("first", hidden) < 310
    assert not torch.equal(model.weight("first"), model.weight("second"))
    assert not dict(model.named_parameters())["first.e_score_correction_bias"].any()
    again = Gates()
    routers.draw(again)
    assert torch.equal(model.weight("first"), again.weight("first"))
