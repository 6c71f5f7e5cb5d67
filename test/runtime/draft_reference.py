"""An EAGLE-3 draft's forward in plain torch, from the paper and the trainers' sources: the reference for upstream's."""

from __future__ import annotations

import torch

Tensors = dict[str, torch.Tensor]
_EPS, _THETA = 1e-6, 10000.0


def inputs(states: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids int64 ``[24]``, and captured states float32 ``[24, states * 256]``."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 4096, (24,), generator=generator)
    return ids, torch.randn(24, 6 * 256, generator=generator)[:, : states * 256].contiguous()


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _EPS) * weight


def _rotated(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    angle = torch.outer(torch.arange(x.shape[1]), _THETA ** (-torch.arange(half) / half))
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def logits(
    draft: Tensors, embedding: torch.Tensor, states: int, after_norm: bool = False, fused: bool = True
) -> Tensors:
    """``logits`` and ``best`` of a draft with names ``layers.N.`` (and ``hidden_norm`` in later layers, too).

    Args:
        embedding: float ``[target vocabulary, 256]``.
        after_norm: the residual begins after ``hidden_norm`` (``norm_before_residual``).
        fused: False: the states are the draft's own and pass neither norms nor ``fc``.
    """
    draft = {name: tensor.float() for name, tensor in draft.items()}
    ids, x = inputs(states)
    if fused:
        if "input_norm.weight" in draft:
            x = _norm(x, draft["input_norm.weight"])
        if "fc_norm.0.weight" in draft:
            chunks = enumerate(x.chunk(states, -1))
            x = torch.cat([_norm(chunk, draft[f"fc_norm.{i}.weight"]) for i, chunk in chunks], -1)
        x = x @ draft["fc.weight"].T
    number = 0
    while f"layers.{number}.mlp.up_proj.weight" in draft:
        layer = {
            name.removeprefix(f"layers.{number}."): tensor
            for name, tensor in draft.items()
            if name.startswith(f"layers.{number}.")
        }
        normed = _norm(x, layer["hidden_norm.weight"])
        taken = normed
        if number == 0:
            x = normed if after_norm else x
            taken = torch.cat([_norm(embedding.float()[ids], layer["input_layernorm.weight"]), normed], -1)
        q, k, v = (
            (taken @ layer[f"self_attn.{part}_proj.weight"].T).view(len(ids), -1, 64).transpose(0, 1) for part in "qkv"
        )
        k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (_rotated(k), v))
        mixed = torch.nn.functional.scaled_dot_product_attention(_rotated(q), k, v, is_causal=True)
        mixed = mixed.transpose(0, 1).reshape(len(ids), -1) @ layer["self_attn.o_proj.weight"].T
        x = x + mixed + layer.get("self_attn.o_proj.bias", torch.zeros(()))
        y = _norm(x, layer["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(y @ layer["mlp.gate_proj.weight"].T)
        x = x + (gate * (y @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
        number += 1
    found = _norm(x, draft["norm.weight"]) @ draft["lm_head.weight"].T
    return {"logits": found, "best": found.argmax(-1)}
