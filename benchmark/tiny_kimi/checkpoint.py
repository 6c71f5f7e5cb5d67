"""Configurations of the target and the draft, and their checkpoint layouts.

The target is trained as `transformers`' `DeepseekV3ForCausalLM` and stored as `KimiK25ForConditionalGeneration`:
language weights under `language_model.`, one tensor an expert, plus a vision tower and projector.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from benchmark.tiny_kimi import tokenizer as tok

# What the default draft reads: OUTPUTS of these layers. Upstream adds 1 because the first id is 1, and captures the
# inputs of layers 2, 6 and 9. In every list of this package -1 stands for the embedding's output.
AUX_LAYER_IDS = (1, 5, 8)
EMBEDDING_OUTPUT = -1
DRAFT_VOCAB_SIZE = 3072

# Every attention dimension differs from every other (also the sums that are stored side by side: 80, 88, 104), so that
# code which mixes two of them up cannot run, or cannot be right.
TEXT_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": tok.VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 640,
    "moe_intermediate_size": 112,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 96,
    "kv_lora_rank": 72,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 32,
    "v_head_dim": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    # The library's latent norms always use 1e-6; upstream's use this value.
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "pad_token_id": tok.PAD_ID,
    "bos_token_id": tok.BOS_ID,
    "eos_token_id": tok.IM_END_ID,
}
VISION_CONFIG: dict[str, Any] = {
    "patch_size": 14,
    "init_pos_emb_height": 16,
    "init_pos_emb_width": 16,
    "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 144,
    "merge_kernel_size": [2, 2],
    "video_attn_type": "spatial_temporal",
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger",
    "mm_hidden_size": 64,
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
    "text_hidden_size": TEXT_CONFIG["hidden_size"],
    # The names of Kimi's own configuration; upstream reads some sizes by one name and some by the other.
    "vt_hidden_size": 64,
    "vt_intermediate_size": 144,
    "vt_num_attention_heads": 4,
    "vt_num_hidden_layers": 2,
}
TARGET_CONFIG: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "ignore_index": -100,
    "media_placeholder_token_id": tok.MEDIA_PAD_ID,
    "use_unified_vision_chunk": True,
    "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "pad_token_id": tok.PAD_ID,
    "bos_token_id": tok.BOS_ID,
    "eos_token_id": tok.IM_END_ID,
    "text_config": TEXT_CONFIG,
    "vision_config": VISION_CONFIG,
}
DRAFT_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": tok.VOCAB_SIZE,
    "draft_vocab_size": DRAFT_VOCAB_SIZE,
    "hidden_size": 256,
    "target_hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "pad_token_id": tok.PAD_ID,
    "bos_token_id": tok.BOS_ID,
    "eos_token_id": tok.IM_END_ID,
}
# Hotter, a model this small loses its thread; it is what a request gets that names no temperature.
GENERATION_CONFIG = {
    "do_sample": True,
    "temperature": 0.3,
    "bos_token_id": tok.BOS_ID,
    "eos_token_id": [tok.IM_END_ID, tok.EOS_ID],
    "pad_token_id": tok.PAD_ID,
}
IMAGE_PROCESSOR_CONFIG = {
    "processor_class": "Kimi_K25Processor",
    "image_processor_type": "Kimi_K25ImageProcessor",
    "patch_size": 14,
    "merge_size": 2,
    "max_patches": 1024,
    # In patches, not pixels.
    "size": {"max_height": 64, "max_width": 64},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def text_config() -> DeepseekV3Config:
    """The text model's configuration as the library's own class."""
    return DeepseekV3Config.from_dict(json.loads(json.dumps(TEXT_CONFIG)))


def draft_config(layer_ids: Sequence[int] = AUX_LAYER_IDS) -> dict[str, Any]:
    """Configuration of a draft that reads the outputs of `layer_ids` (-1: the embedding), in that order.

    A list that upstream's own rule misreads also says which convention it is in.
    """
    eagle: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": list(layer_ids), "use_aux_hidden_state": True}
    if layer_ids[0] != 1 or EMBEDDING_OUTPUT in layer_ids:
        eagle["eagle_aux_hidden_state_layer_convention"] = "layer-output"
    return {**DRAFT_CONFIG, "eagle_config": eagle}


def draft_layer_ids(folder: Path) -> tuple[int, ...]:
    """The layer outputs that the draft in `folder`, written by `save_draft`, reads."""
    config = json.loads((folder / "config.json").read_text())
    return tuple(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def to_kimi_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename a `DeepseekV3ForCausalLM` state to Kimi's names, taking the stacked experts apart."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        prefix = f"language_model.{name.rsplit('.', 1)[0]}"
        for expert, weight in enumerate(tensor if ".experts." in name else ()):
            if name.endswith(".gate_up_proj"):
                gate, up = weight.chunk(2)
                renamed[f"{prefix}.{expert}.gate_proj.weight"] = gate
                renamed[f"{prefix}.{expert}.up_proj.weight"] = up
            else:
                renamed[f"{prefix}.{expert}.down_proj.weight"] = weight
        if ".experts." not in name:
            renamed[f"language_model.{name}"] = tensor
    return renamed


def from_kimi_names(state: dict[str, Tensor], stacked: bool = True) -> dict[str, Tensor]:
    """The inverse of `to_kimi_names`; vision weights are left out.

    Args:
        stacked: experts as one tensor of all, which transformers 5 has; transformers 4 has one each, as Kimi has.
    """
    text = {
        name.removeprefix("language_model."): tensor
        for name, tensor in state.items()
        if name.startswith("language_model.")
    }
    moe = range(TEXT_CONFIG["first_k_dense_replace"], TEXT_CONFIG["num_hidden_layers"])
    for layer in moe if stacked else ():
        prefix = f"model.layers.{layer}.mlp.experts"
        experts = [
            {part: text.pop(f"{prefix}.{expert}.{part}_proj.weight") for part in ("gate", "up", "down")}
            for expert in range(TEXT_CONFIG["n_routed_experts"])
        ]
        text[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([e["gate"], e["up"]]) for e in experts])
        text[f"{prefix}.down_proj"] = torch.stack([e["down"] for e in experts])
    return text


def untrained_vision_weights(seed: int = 0) -> dict[str, Tensor]:
    """Random weights, float32, for the vision tower and projector, under Kimi's checkpoint names."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = VISION_CONFIG["hidden_size"], VISION_CONFIG["intermediate_size"]
    merged = hidden * VISION_CONFIG["merge_kernel_size"][0] * VISION_CONFIG["merge_kernel_size"][1]
    weights: dict[str, Tensor] = {}

    def layer(name: str, *shape: int) -> None:
        weights[f"{name}.weight"] = torch.randn(*shape, generator=generator) * 0.02
        weights[f"{name}.bias"] = torch.zeros(shape[0])

    def norm(name: str) -> None:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = torch.ones(hidden), torch.zeros(hidden)

    patch = VISION_CONFIG["patch_size"]
    layer("vision_tower.patch_embed.proj", hidden, 3, patch, patch)
    grid = (VISION_CONFIG["init_pos_emb_height"], VISION_CONFIG["init_pos_emb_width"], hidden)
    weights["vision_tower.patch_embed.pos_emb.weight"] = torch.randn(*grid, generator=generator) * 0.02
    for index in range(VISION_CONFIG["num_hidden_layers"]):
        block = f"vision_tower.encoder.blocks.{index}"
        norm(f"{block}.norm0")
        norm(f"{block}.norm1")
        layer(f"{block}.wqkv", 3 * hidden, hidden)
        layer(f"{block}.wo", hidden, hidden)
        layer(f"{block}.mlp.fc0", inner, hidden)
        layer(f"{block}.mlp.fc1", hidden, inner)
    norm("vision_tower.encoder.final_layernorm")
    norm("mm_projector.pre_norm")
    layer("mm_projector.proj.0", merged, merged)
    layer("mm_projector.proj.2", VISION_CONFIG["text_hidden_size"], merged)
    return weights


def _rounded(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """bfloat16 copies; the router's correction bias stays float32, as in Kimi's checkpoints."""
    return {
        name: tensor.detach()
        .to("cpu", torch.float32 if "e_score_correction_bias" in name else torch.bfloat16)
        .contiguous()
        for name, tensor in state.items()
    }


def save_target(model: DeepseekV3ForCausalLM, folder: Path) -> None:
    """Write weights and configurations of the target; the tokenizer step writes the rest."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {**to_kimi_names(model.state_dict()), **untrained_vision_weights()}
    save_file(_rounded(state), folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", TARGET_CONFIG)
    _write_json(folder / "generation_config.json", GENERATION_CONFIG)
    _write_json(folder / "preprocessor_config.json", IMAGE_PROCESSOR_CONFIG)


def load_text_model(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> DeepseekV3ForCausalLM:
    """Load the text part of a target checkpoint, in evaluation mode.

    Raises:
        RuntimeError: the file lacks a weight of the model, has one too many, or one of another shape.
    """
    model = DeepseekV3ForCausalLM(text_config())
    stacked = any(name.endswith("experts.gate_up_proj") for name in model.state_dict())
    model.load_state_dict(from_kimi_names(load_file(folder / "model.safetensors"), stacked), strict=True)
    return nn.Module.to(model, device=device, dtype=dtype).eval()


def save_draft(
    state: dict[str, Tensor], draft_to_target: Tensor, folder: Path, layer_ids: Sequence[int] = AUX_LAYER_IDS
) -> None:
    """Write a draft.

    Args:
        state: the draft's weights, under the names that upstream's loader takes.
        draft_to_target: (draft vocab,) int64, the target id of each draft id, ascending.
        layer_ids: the layer outputs it reads, as in `draft_config`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = torch.zeros(DRAFT_CONFIG["vocab_size"], dtype=torch.bool)
    kept[draft_to_target] = True
    tables = {"d2t": draft_to_target.cpu() - torch.arange(len(draft_to_target)), "t2d": kept}
    save_file({**_rounded(state), **tables}, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", draft_config(layer_ids))
