"""Copies of the bundled draft, edited: what a tester of drafts needs."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sglang.srt.configs.model_config import ModelConfig

MODELS = Path(__file__).parents[1] / "models"
TARGET, DRAFT = MODELS / "tiny-kimi", MODELS / "tiny-kimi-eagle3"
# How upstream's ``ModelConfig`` is told, where it is, that a draft is EAGLE-3's.
EAGLE3: dict[str, Any] = (
    {"speculative_algorithm": "EAGLE3"} if "speculative_algorithm" in inspect.signature(ModelConfig).parameters else {}
)
Tensors = dict[str, torch.Tensor]
Edit = Callable[[Tensors], None]


REMOVED = object()


def unchanged(tensors: Tensors) -> None:
    """The bundled draft's tensors as they are."""


def write_draft(folder: Path, config: dict[str, Any] | None = None, edit: Edit = unchanged) -> Path:
    """The bundled draft in `folder`: keys of `config` set or REMOVED, tensors edited in place; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = json.loads((DRAFT / "config.json").read_text())
    for key, wanted in (config or {}).items():
        if wanted is REMOVED:
            settings.pop(key, None)
        else:
            settings[key] = wanted
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = load_file(DRAFT / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def served(target: Path, draft: Path | None = None) -> SimpleNamespace:
    """Of upstream's ``ServerArgs`` what says which models are served; with a draft, by EAGLE-3."""
    return SimpleNamespace(
        model_path=str(target),
        revision=None,
        download_dir=None,
        speculative_algorithm="EAGLE3" if draft else None,
        speculative_draft_model_path=str(draft) if draft else None,
        speculative_draft_model_revision=None,
    )


def without(*names: str) -> Edit:
    """Remove tensors."""

    def edit(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return edit


def setting(**given: torch.Tensor | Callable[[Tensors], torch.Tensor]) -> Edit:
    """Set tensors, by name with ``__`` for a dot, to a tensor or to what a function makes of all of them."""

    def edit(tensors: Tensors) -> None:
        for name, made in given.items():
            tensors[name.replace("__", ".")] = made if isinstance(made, torch.Tensor) else made(tensors)

    return edit


def renamed(rename: Callable[[str], str]) -> Edit:
    """Rename every tensor."""

    def edit(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[rename(name)] = tensors.pop(name)

    return edit


def mla_draft(folder: Path, config: dict[str, Any] | None = None, edit: Edit = unchanged) -> Path:
    """A random draft of upstream's MLA class for the bundled target, of the shapes its configuration gives."""
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v3", "dtype": "bfloat16",
        "vocab_size": 4096, "draft_vocab_size": 4096, "hidden_size": 256, "intermediate_size": 320,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 40,
        "kv_lora_rank": 48, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "rope_theta": 50000.0, "tie_word_embeddings": False,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "mscale": 1.0,
                         "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0},
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 8], "use_aux_hidden_state": True},
    }  # fmt: skip
    settings |= config or {}
    (folder / "config.json").write_text(json.dumps(settings))
    shapes = {
        "fc.weight": (256, 768), "norm.weight": (256,), "lm_head.weight": (4096, 256),
        "layers.0.input_layernorm.weight": (256,), "layers.0.hidden_norm.weight": (256,),
        "layers.0.post_attention_layernorm.weight": (256,), "layers.0.self_attn.q_a_proj.weight": (40, 512),
        "layers.0.self_attn.q_a_layernorm.weight": (40,), "layers.0.self_attn.q_b_proj.weight": (4 * 40, 40),
        "layers.0.self_attn.kv_a_proj_with_mqa.weight": (48 + 16, 512),
        "layers.0.self_attn.kv_a_layernorm.weight": (48,), "layers.0.self_attn.kv_b_proj.weight": (4 * 44, 48),
        "layers.0.self_attn.o_proj.weight": (256, 80), "layers.0.mlp.gate_proj.weight": (320, 256),
        "layers.0.mlp.up_proj.weight": (320, 256), "layers.0.mlp.down_proj.weight": (256, 320),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder
