"""Step 4: let the target write the draft's training text.

Prompts are windows of the training corpus, half plain and half the openings of conversations; half of the rows are
greedy, half sampled. Rows do not stop at an end-of-turn token: what follows one is as much the target's own as what
precedes it. Writes `<work>/generated.npy`, (rows, prompt + new tokens) uint16.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import DeepseekV3ForCausalLM, DynamicCache

from benchmark.tiny_kimi.checkpoint import load_text_model
from benchmark.tiny_kimi.experts import default_device, mixed_precision, use_all_experts
from benchmark.tiny_kimi.progress import Progress
from benchmark.tiny_kimi.target import Batches


@torch.inference_mode()
def extend(model: DeepseekV3ForCausalLM, prompts: Tensor, new_tokens: int, temperatures: Tensor) -> Tensor:
    """Continue `prompts` (B, P) by `new_tokens`; a row whose temperature (B,) is 0 is greedy. Returns (B, P + new)."""
    cache = DynamicCache(config=model.config)
    ids, fed = [prompts], prompts
    for _ in range(new_tokens):
        logits = model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        sampled = torch.multinomial(torch.softmax(logits / temperatures.clamp(min=1e-3)[:, None], dim=-1), 1)
        fed = torch.where(temperatures[:, None] > 0, sampled, logits.argmax(-1, keepdim=True))
        ids.append(fed)
    return torch.cat(ids, dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/tiny-kimi"))
    parser.add_argument("--target", type=Path, default=Path("test/models/tiny-kimi"))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--tokens", type=float, default=8e6, help="new tokens")
    parser.add_argument("--rows", type=int, default=2048, help="rows of a batch")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row, the prompt's included")
    parser.add_argument("--temperature", type=float, default=0.8, help="of the sampled half")
    arguments = parser.parse_args()
    device = default_device()
    torch.manual_seed(1)
    model = load_text_model(arguments.target, device=device)
    use_all_experts(model)
    batches = Batches(arguments.work, device, chat_share=0.5, seed=1)
    temperatures = torch.full((arguments.rows,), arguments.temperature, device=device)
    temperatures[::2] = 0
    progress, produced, written = Progress("generate", "tokens"), 0, []
    fraction = 0.0
    while fraction < 1:
        prompt_length = int(torch.randint(16, 80, ()))
        prompts = batches.next(arguments.rows, prompt_length - 1)
        new_tokens = arguments.length - prompt_length
        with mixed_precision(device):
            written.append(extend(model, prompts, new_tokens, temperatures).cpu())
        produced += arguments.rows * new_tokens
        fraction = max(produced / arguments.tokens, progress.elapsed / arguments.seconds)
        progress.update(produced, fraction)
    progress.finish(produced)
    np.save(arguments.work / "generated.npy", torch.cat(written).numpy().astype(np.uint16))


if __name__ == "__main__":
    main()
