"""Greedy decoding by `transformers` from the committed checkpoint: what a server's output is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import DeepseekV3ForCausalLM, DynamicCache

from benchmark.tiny_kimi import checkpoint


def load_text_model(path: Path | str, dtype: torch.dtype = torch.float32) -> DeepseekV3ForCausalLM:
    """The text model of the target checkpoint in folder `path`, in evaluation mode, on the CPU."""
    return checkpoint.load_text_model(Path(path), dtype)


@torch.inference_mode()
def greedy(model: DeepseekV3ForCausalLM, ids: list[int], n: int, eos_ids: frozenset[int] = frozenset()) -> list[int]:
    """The `n` tokens that follow `ids`, each the argmax; stops after a token of `eos_ids`."""
    cache = DynamicCache(config=model.config)
    device = next(model.parameters()).device
    produced: list[int] = []
    fed = torch.tensor([ids], device=device)
    while len(produced) < n and not (produced and produced[-1] in eos_ids):
        logits = model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        produced.append(int(logits[0, -1].argmax()))
        fed = torch.tensor([[produced[-1]]], device=device)
    return produced


@torch.inference_mode()
def greedy_each(model: DeepseekV3ForCausalLM, prompts: Sequence[Sequence[int]], n: int) -> list[list[int]]:
    """`greedy` of every prompt, token ids, all in one batch: `n` tokens each, in the time of about two alone."""
    device = next(model.parameters()).device
    longest = max(len(ids) for ids in prompts)
    # Padded on the left, where the mask hides it, so that all prompts end, and go on, at the same place.
    fed = torch.tensor([[0] * (longest - len(ids)) + [*ids] for ids in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts], device=device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    produced: list[torch.Tensor] = []
    while len(produced) < n:
        logits = model(
            input_ids=fed, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
            logits_to_keep=1,
        ).logits  # fmt: skip
        fed, positions = logits[:, -1].argmax(-1, keepdim=True), positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(fed)], 1)
        produced.append(fed)
    return torch.cat(produced, 1).tolist() if produced else [[] for _ in prompts]
