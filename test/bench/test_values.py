"""bench/values.py: weights drawn so that what goes into a layer with a variance of 1 comes out with it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Parameter

from sglang_patches.bench import values


def bare(kind: Any, **weights: torch.Tensor) -> Any:
    """A module of upstream's class without its constructor, which wants a running server's settings."""
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    for name, weight in weights.items():
        module.register_parameter(name, Parameter(weight, requires_grad=False))
    return module


class Model(torch.nn.Module):
    """A text model of upstream's kinds of weights, as its dummy weights are."""

    def __init__(self, embedding: torch.Tensor | None = None) -> None:
        from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
        from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        super().__init__()

        def dummy(*shape: int) -> torch.Tensor:
            return torch.empty(*shape).uniform_(-1e-3, 1e-3)

        self.embed = bare(VocabParallelEmbedding, weight=dummy(512, 256) if embedding is None else embedding)
        self.linear = bare(torch.nn.Linear, weight=dummy(128, 1024), bias=dummy(128))
        self.norm = bare(torch.nn.RMSNorm, weight=dummy(256))
        self.head = bare(ParallelLMHead, weight=dummy(512, 256))
        packed = torch.zeros(4, 16, 32, dtype=torch.int32)
        indices = torch.zeros(4, 0, dtype=torch.int32)
        self.whole_experts = bare(FusedMoE, w13_weight=dummy(4, 64, 256))
        self.experts = bare(
            FusedMoE, w13_weight_packed=packed, w13_weight_scale=dummy(4, 8, 32), w13_weight_g_idx=indices
        )
        self.derived = 0

    def post_load_weights(self) -> None:
        """Upstream derives from ``kv_b_proj`` here."""
        self.derived += 1


def test_weights_are_drawn_to_keep_a_variance_of_one() -> None:
    torch.manual_seed(0)
    target = Model()
    scale = target.experts.w13_weight_scale.clone()
    draft = Model(target.embed.weight.data)
    own = torch.nn.ModuleList([target])  # a wrapper, as Kimi-K2.5's is
    # 7 of the target, of which the draft shares its embedding.
    assert values.draw([own, draft]) == 7 + 6
    for model in (target, draft):
        assert abs(float(model.embed.weight.std()) - 1) < 0.02
        assert abs(float(model.linear.weight.std()) * 1024**0.5 - 1) < 0.02
        assert abs(float(model.head.weight.std()) * 256**0.5 - 1) < 0.02
        assert abs(float(model.whole_experts.w13_weight.std()) * 256**0.5 - 1) < 0.02
        assert bool((model.norm.weight == 1).all())
        assert not model.linear.bias.any()
        assert len(model.experts.w13_weight_packed.unique()) > 1000
        assert model.derived == 1
    assert torch.equal(target.experts.w13_weight_scale, scale), "an expert's scales keep what upstream gave them"
    assert not torch.equal(target.linear.weight, draft.linear.weight)
    again = Model()
    values.draw([again])
    for (name, one), (_, other) in zip(target.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, other) or "scale" in name, name
