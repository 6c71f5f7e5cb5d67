"""Step 3: train the target on the encoded corpus.

AdamW on float32 weights under bfloat16 autocast, dropout on what each block adds to the residual stream (the corpus is
small, and is read many times), and DeepSeek-V3's loss-free balancing of experts: the router's correction bias moves
against each expert's load. Ends when `--seconds` or `--tokens` is reached; the learning rate follows whichever is
nearer its end.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DeepseekV3ForCausalLM

from benchmark.tiny_kimi.checkpoint import load_text_model, save_target, text_config
from benchmark.tiny_kimi.experts import default_device, mixed_precision, use_all_experts
from benchmark.tiny_kimi.progress import Progress

CONTEXT = 512
BALANCE_RATE = 1e-3


class Batches:
    """Random windows of the corpus, on the device: plain text, and rows that begin with a conversation."""

    def __init__(self, work: Path, device: torch.device, chat_share: float, seed: int = 0) -> None:
        self.plain = torch.from_numpy(np.load(work / "plain.npy").astype(np.int32)).to(device)
        self.chat = torch.from_numpy(np.load(work / "chat.npy").astype(np.int32)).to(device)
        self.chat_rows = torch.from_numpy(np.load(work / "chat_rows.npy").astype(np.int64)).to(device)
        self.chat_share = chat_share
        self.generator = torch.Generator(device).manual_seed(seed)

    def _starts(self, count: int, limit: int) -> Tensor:
        return torch.randint(limit, (count, 1), generator=self.generator, device=self.plain.device)

    def next(self, rows: int, length: int) -> Tensor:
        """(rows, length + 1) int64 token ids."""
        offsets = torch.arange(length + 1, device=self.plain.device)
        chat_rows = round(rows * self.chat_share)
        plain = self.plain[self._starts(rows - chat_rows, len(self.plain) - length - 1) + offsets]
        usable = int((self.chat_rows < len(self.chat) - length - 1).sum())
        chat = self.chat[self.chat_rows[self._starts(chat_rows, usable)] + offsets]
        return torch.cat([plain, chat]).long()


def add_dropout(model: DeepseekV3ForCausalLM, probability: float) -> None:
    """Drop parts of the embedding and of every block's output while training."""

    def drop(module: nn.Module, _: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return F.dropout(output, probability, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.register_forward_hook(drop)


class Balancer:
    """Loss-free balancing (DeepSeek-V3, arXiv 2412.19437, section 2.1.2): counts choices, then moves the bias."""

    def __init__(self, model: DeepseekV3ForCausalLM) -> None:
        self.gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        self.chosen: dict[nn.Module, Tensor] = {}
        for gate in self.gates:
            gate.register_forward_hook(self._record)

    def _record(self, gate: nn.Module, _: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        self.chosen[gate] = output[2]

    @torch.no_grad()
    def loads(self) -> Tensor:
        """(layers, experts) float32, each expert's share of the last batch's choices."""
        chosen = torch.stack([self.chosen[gate].flatten() for gate in self.gates])
        counts = torch.zeros(len(self.gates), self.gates[0].num_experts, device=chosen.device)
        return counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float32)) / chosen.shape[1]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Raise the bias of the underloaded, lower that of the overloaded."""
        loads = self.loads()
        for gate, move in zip(self.gates, torch.sign(1 / loads.shape[1] - loads) * rate, strict=True):
            gate.e_score_correction_bias += move


def next_token_loss(model: DeepseekV3ForCausalLM, ids: Tensor) -> Tensor:
    """Mean cross-entropy in nats of `ids` (B, T + 1)."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: DeepseekV3ForCausalLM, work: Path, rows: int = 32) -> float:
    """Mean cross-entropy in nats a token of the held-out documents, in windows of `CONTEXT`."""
    device = next(model.parameters()).device
    ids = torch.from_numpy(np.load(work / "held_out.npy").astype(np.int64)).to(device)
    windows = ids.unfold(0, CONTEXT + 1, CONTEXT)
    was_training = model.training
    model.eval()
    total = sum(float(next_token_loss(model, part)) * len(part) for part in windows.split(rows))
    model.train(was_training)
    return total / len(windows)


def learning_rate(fraction: float, peak: float) -> float:
    """2 % linear warm-up, then a half cosine to 2 % of the peak."""
    if fraction < 0.02:
        return peak * max(fraction / 0.02, 1e-3)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (fraction - 0.02) / 0.98)))


def optimizer_for(module: nn.Module, decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms alone."""
    matrices = [parameter for parameter in module.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in module.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)


def train(arguments: argparse.Namespace) -> DeepseekV3ForCausalLM:
    """Train from random weights; returns the model with float32 weights."""
    device = default_device()
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    model = nn.Module.to(DeepseekV3ForCausalLM(text_config()), device)
    use_all_experts(model)
    add_dropout(model, arguments.dropout)
    balancer = Balancer(model)
    batches = Batches(arguments.work, device, arguments.chat_share)
    optimizer = optimizer_for(model, arguments.decay)
    model.train()
    progress, tokens, step, evaluated, last = Progress("target", "tokens"), 0, 0, 0.0, 0.0
    fraction = 0.0
    while fraction < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(fraction, arguments.lr)
        # A few long rows, so that later positions are trained too.
        rows, length = (arguments.rows, CONTEXT) if step % 8 else (max(1, arguments.rows // 2), 2 * CONTEXT)
        ids = batches.next(rows, length)
        with mixed_precision(device):
            loss = next_token_loss(model, ids)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        balancer.step(BALANCE_RATE * (1 - fraction))
        tokens += ids.numel()
        step += 1
        if step % 10 == 0:
            last = loss.item()
        fraction = max(tokens / arguments.tokens, progress.elapsed / arguments.seconds)
        progress.update(tokens, fraction, f"loss {last:.3f}")
        if progress.elapsed - evaluated > arguments.evaluate_every:
            with mixed_precision(device):
                held_out = held_out_loss(model, arguments.work)
            print(f"target: {tokens:,} tokens, loss {last:.3f}, held-out loss {held_out:.3f}", flush=True)
            evaluated = progress.elapsed
    progress.finish(tokens)
    loads = balancer.loads()
    print(f"target: last loss {last:.3f}; expert load {loads.min():.3f} to {loads.max():.3f}", flush=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/tiny-kimi"))
    parser.add_argument("--target", type=Path, default=Path("test/models/tiny-kimi"))
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--tokens", type=float, default=150e6)
    parser.add_argument("--rows", type=int, default=64, help=f"rows of {CONTEXT} tokens in a batch")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--chat-share", type=float, default=0.4)
    parser.add_argument("--evaluate-every", type=float, default=20, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    save_target(train(arguments), arguments.target)
    model = load_text_model(arguments.target, device=default_device())
    use_all_experts(model)
    print(f"target: held-out loss {held_out_loss(model, arguments.work):.4f} as saved, float32", flush=True)


if __name__ == "__main__":
    main()
