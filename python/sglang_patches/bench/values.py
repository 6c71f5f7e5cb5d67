"""Runs inside the scheduler process: random weights with which a token depends on all tokens before it.

Upstream's dummy weights lie within 1e-3 of zero, norms too, so that what a layer adds vanishes beside the embedding:
the next token depends on the current one alone, whatever attention reads, and greedy answers are cycles of two tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def draw(models: Iterable[Any]) -> int:
    """Draw the weights of these models from normal distributions, in every process the same.

    Matrices get a standard deviation of 1 / sqrt(inputs), so that what goes in with a variance of 1 comes out with it;
    routers, too, without a correction bias; embeddings 1; norms are 1 and biases 0. Packed experts get random integers,
    which upstream leaves as the memory was; their scales stay. In place, so that captured graphs see it; what
    upstream derives from ``kv_b_proj`` when it loads a model (`DeepseekV2WeightLoaderMixin.post_load_weights`) is
    derived again. A weight that two models share is drawn once.

    Returns: number of weights drawn.
    """
    import torch
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    seen: set[int] = set()
    for model in models:
        for module in model.modules():
            experts = isinstance(module, FusedMoE)
            for name, weight in module.named_parameters(recurse=False):
                of_expert = experts and weight.dim() == 3 and "weight" in name and "scale" not in name
                packed = of_expert and weight.dtype == torch.int32
                drawn = packed or (weight.is_floating_point() and (of_expert or not experts))
                if weight.data_ptr() in seen or not drawn:
                    continue
                seen.add(weight.data_ptr())
                generator = torch.Generator(weight.device).manual_seed(len(seen))
                embeds = isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
                if packed:
                    weight.data.random_(-(2**31), 2**31 - 1, generator=generator)
                elif weight.dim() < 2:
                    weight.data.fill_(1.0 if name.endswith("weight") else 0.0)
                else:
                    deviation = 1.0 if embeds else 1 / math.sqrt(weight.shape[-1])
                    weight.data.normal_(0, deviation, generator=generator)
        for module in model.modules():
            if hasattr(module, "post_load_weights"):
                module.post_load_weights()
    return len(seen)
