"""Greedy decoding by `transformers` from the committed checkpoint: what a server's output is compared with."""

from __future__ import annotations

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
