"""Step 5: train the EAGLE-3 draft on what the target wrote.

The draft's vocabulary is the most frequent tokens of that text. Each batch is run through the saved (rounded) target
for its hidden states and its next-token distributions; the draft is unrolled several steps from every position, its own
output fed back, and matched to the target's distribution over the draft vocabulary (arXiv 2503.01840, section 3.2).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DeepseekV3ForCausalLM

from benchmark.tiny_kimi.checkpoint import (
    AUX_LAYER_IDS,
    DRAFT_VOCAB_SIZE,
    EMBEDDING_OUTPUT,
    TEXT_CONFIG,
    load_text_model,
    save_draft,
)
from benchmark.tiny_kimi.draft_model import Eagle3Draft
from benchmark.tiny_kimi.experts import default_device, mixed_precision, use_all_experts
from benchmark.tiny_kimi.progress import Progress
from benchmark.tiny_kimi.target import learning_rate, optimizer_for
from benchmark.tiny_kimi.tokenizer import SPECIAL_TOKENS

STEP_DECAY = 0.8


class Capture:
    """Collects the outputs of some layers of a target as it runs; -1 is the embedding."""

    def __init__(self, model: DeepseekV3ForCausalLM, layer_ids: Sequence[int] = AUX_LAYER_IDS) -> None:
        self.model = model
        self.layer_ids = layer_ids
        self.outputs: dict[int, Tensor] = {}
        for layer in set(layer_ids):
            module = model.model.embed_tokens if layer == EMBEDDING_OUTPUT else model.model.layers[layer]
            module.register_forward_hook(self._hook(layer))

    def _hook(self, layer: int) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def record(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
            self.outputs[layer] = output

        return record

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Run the target on `ids` (B, T): (B, T, captured * hidden) states, in list order, (B, T, vocab) logits."""
        logits = self.model(input_ids=ids, use_cache=False).logits
        return torch.cat([self.outputs[layer] for layer in self.layer_ids], dim=-1), logits


def choose_vocabulary(generated: np.ndarray, size: int) -> Tensor:
    """(size,) int64, ascending: the special tokens and the most frequent others of `generated`."""
    counts = np.bincount(generated.ravel(), minlength=max(size, int(generated.max()) + 1)).astype(np.int64)
    covered = np.sort(counts)[::-1][:size].sum() / counts.sum()
    print(f"draft: vocabulary of {size} covers {covered:.2%} of the generated tokens", flush=True)
    counts[: len(SPECIAL_TOKENS)] += counts.sum()
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))


def unrolled_loss(step_logits: list[Tensor], target_logits: Tensor, vocabulary: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Loss of an unrolled draft, and each step's rate of agreement with the target's argmax.

    Args:
        step_logits: for each step k, (B, S, draft vocab); slot i's are for token i+2+k.
        target_logits: (B, S + steps, vocab), whose entry i is for token i+1.
        vocabulary: (draft vocab,) target ids.
    """
    loss = target_logits.new_zeros((), dtype=torch.float32)
    agreement = []
    slots = step_logits[0].shape[1]
    for step, logits in enumerate(step_logits):
        wanted = target_logits[:, step + 1 : step + 1 + slots]
        best = wanted.argmax(-1)
        restricted = wanted[..., vocabulary].float()
        # Where the target's choice is outside the draft's vocabulary there is nothing to learn.
        reachable = vocabulary[restricted.argmax(-1)] == best
        cross_entropy = -(restricted.softmax(-1) * F.log_softmax(logits.float(), -1)).sum(-1)
        loss = loss + STEP_DECAY**step * (cross_entropy * reachable).sum() / reachable.sum().clamp(min=1)
        agreement.append((vocabulary[logits.argmax(-1)] == best).float().mean().detach())
    return loss, agreement


def train(arguments: argparse.Namespace) -> tuple[Eagle3Draft, Tensor]:
    """Train a draft; returns it (float32 weights) and its vocabulary."""
    device = default_device()
    torch.manual_seed(2)
    torch.set_float32_matmul_precision("high")
    model = load_text_model(arguments.target, device=device)
    use_all_experts(model)
    capture = Capture(model, arguments.aux_layer_ids)
    generated = np.load(arguments.work / "generated.npy")
    vocabulary = choose_vocabulary(generated, DRAFT_VOCAB_SIZE).to(device)
    data = torch.from_numpy(generated.astype(np.int32)).to(device)
    draft = Eagle3Draft(len(arguments.aux_layer_ids)).to(device)
    with torch.no_grad():
        draft.lm_head.weight.copy_(model.lm_head.weight[vocabulary])
        draft.norm.weight.copy_(model.model.norm.weight)
    optimizer = optimizer_for(draft, arguments.decay)
    progress, tokens, step, note = Progress("draft", "tokens"), 0, 0, ""
    fraction = 0.0
    slots = data.shape[1] - arguments.steps - 1
    while fraction < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(fraction, arguments.lr)
        ids = data[torch.randint(len(data), (arguments.rows,), device=device)].long()
        with mixed_precision(device):
            aux, logits = capture(ids)
            embeds = model.model.embed_tokens(ids[:, 1:]).detach()
            step_logits = draft(aux[:, :slots], embeds[:, : slots + arguments.steps], arguments.steps)
            loss, agreement = unrolled_loss(step_logits, logits, vocabulary)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(draft.parameters(), 0.5)
        optimizer.step()
        tokens += ids.numel()
        step += 1
        if step % 20 == 0:
            note = f"loss {loss.item():.3f} agreement " + " ".join(f"{float(rate):.3f}" for rate in agreement)
        fraction = max(tokens / arguments.tokens, progress.elapsed / arguments.seconds)
        progress.update(tokens, fraction, note)
    progress.finish(tokens)
    print(f"draft: {step} steps, {note}", flush=True)
    return draft, vocabulary


def layer_ids(text: str) -> tuple[int, ...]:
    """`-1,5,8` as numbers.

    Raises:
        argparse.ArgumentTypeError: not a list of numbers, or one that is not a layer of the target.
    """
    count = TEXT_CONFIG["num_hidden_layers"]
    try:
        ids = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as -1,5,8") from None
    # The server cannot capture the last layer's output.
    for layer in ids:
        if not EMBEDDING_OUTPUT <= layer < count - 1:
            raise argparse.ArgumentTypeError(f"{layer} is not from -1 (the embedding) to {count - 2}")
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/tiny-kimi"))
    parser.add_argument("--target", type=Path, default=Path("test/models/tiny-kimi"))
    parser.add_argument("--draft", type=Path, default=Path("test/models/tiny-kimi-eagle3"))
    parser.add_argument(
        "--aux-layer-ids",
        type=layer_ids,
        default=AUX_LAYER_IDS,
        help="layer outputs that the draft reads, -1 for the embedding; write --aux-layer-ids=-1,5,8",
    )
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--tokens", type=float, default=300e6)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5, help="unrolled draft steps")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--decay", type=float, default=0.02)
    arguments = parser.parse_args()
    draft, vocabulary = train(arguments)
    save_draft(draft.state_dict(), vocabulary, arguments.draft, arguments.aux_layer_ids)


if __name__ == "__main__":
    main()
