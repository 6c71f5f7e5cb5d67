"""The EAGLE-3 draft as a training module, with the unrolled ("training-time test") forward of arXiv 2503.01840.

Its meaning is upstream's `models/llama_eagle3.py`: the target's captured hidden states are reduced by `fc`; the
one decoder layer reads `[input_layernorm(embedding), hidden_norm(hidden)]`, keeps the un-normed hidden state as its
residual, and hands its own un-normed output to the next step; `norm` and `lm_head` give the logits.
Slot i holds the embedding of token i+1 and the target's hidden state of token i, at rotary position i.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.tiny_kimi.checkpoint import AUX_LAYER_IDS, DRAFT_CONFIG


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout. `x` (..., T, head_dim), `positions` (T,)."""
    half = x.shape[-1] // 2
    frequencies = DRAFT_CONFIG["rope_theta"] ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class DraftLayer(nn.Module):
    """The draft's decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        c = DRAFT_CONFIG
        hidden, inner, head_dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
        self.heads, self.kv_heads, self.head_dim = c["num_attention_heads"], c["num_key_value_heads"], head_dim
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(2 * hidden, self.heads * head_dim, bias=False),
                "k_proj": nn.Linear(2 * hidden, self.kv_heads * head_dim, bias=False),
                "v_proj": nn.Linear(2 * hidden, self.kv_heads * head_dim, bias=False),
                "o_proj": nn.Linear(self.heads * head_dim, hidden, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, inner, bias=False),
                "up_proj": nn.Linear(hidden, inner, bias=False),
                "down_proj": nn.Linear(inner, hidden, bias=False),
            }
        )
        self.input_layernorm = nn.RMSNorm(hidden, eps=c["rms_norm_eps"])
        self.hidden_norm = nn.RMSNorm(hidden, eps=c["rms_norm_eps"])
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=c["rms_norm_eps"])

    def forward(self, embeds: Tensor, hidden: Tensor, step: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """One unrolled step for every slot at once.

        A chain that starts at slot i sees step 0's keys of slots 0..i and its own later steps' keys, each one position
        on. `keys` and `values` hold the earlier steps' (B, heads, T, head_dim); this step's are appended.

        Args:
            embeds: (B, T, hidden). hidden: (B, T, hidden), the residual stream. step: 0-based.
        """
        batch, length, _ = hidden.shape
        x = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)
        positions = torch.arange(length, device=hidden.device) + step

        def heads(name: str, count: int) -> Tensor:
            return self.self_attn[name](x).view(batch, length, count, self.head_dim).transpose(1, 2)

        query = rotate(heads("q_proj", self.heads), positions)
        groups = self.heads // self.kv_heads
        keys.append(rotate(heads("k_proj", self.kv_heads), positions).repeat_interleave(groups, dim=1))
        values.append(heads("v_proj", self.kv_heads).repeat_interleave(groups, dim=1))
        scores = query @ keys[0].transpose(-1, -2)
        future = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
        own = [(query * key).sum(-1, keepdim=True) for key in keys[1:]]
        weights = torch.softmax(torch.cat([scores, *own], dim=-1).float() * self.head_dim**-0.5, dim=-1).to(query.dtype)
        attended = weights[..., :length] @ values[0]
        for index, value in enumerate(values[1:]):
            attended = attended + weights[..., length + index, None] * value
        attended = attended.transpose(1, 2).reshape(batch, length, -1)
        hidden = hidden + self.self_attn["o_proj"](attended)
        x = self.post_attention_layernorm(hidden)
        return hidden + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x))


class Eagle3Draft(nn.Module):
    """`LlamaForCausalLMEagle3` without its embedding, which serving takes from the target."""

    def __init__(self, captured: int = len(AUX_LAYER_IDS)) -> None:
        """`captured` is the number of hidden states of the target that it reads."""
        super().__init__()
        hidden = DRAFT_CONFIG["hidden_size"]
        self.fc = nn.Linear(DRAFT_CONFIG["target_hidden_size"] * captured, hidden, bias=False)
        self.midlayer = DraftLayer()
        self.norm = nn.RMSNorm(hidden, eps=DRAFT_CONFIG["rms_norm_eps"])
        self.lm_head = nn.Linear(hidden, DRAFT_CONFIG["draft_vocab_size"], bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, aux: Tensor, embeds: Tensor, steps: int) -> list[Tensor]:
        """Unroll `steps` draft steps from every slot, the true tokens fed at each.

        Args:
            aux: (B, T, captured * hidden), the target's captured hidden states of tokens 0..T-1.
            embeds: (B, T + steps, hidden), the target's embeddings of tokens 1..T+steps.

        Returns:
            For each step k, (B, T, draft vocab) logits; slot i's are for token i+2+k.
        """
        length = aux.shape[1]
        hidden = self.fc(aux)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits = []
        for step in range(steps):
            hidden = self.midlayer(embeds[:, step : step + length], hidden, step, keys, values)
            logits.append(self.lm_head(self.norm(hidden)))
        return logits
