"""One tensor-parallel rank's share of Kimi-K2.5 and of its EAGLE-3 draft, to be served with random weights: each
matrix has the shape that one of eight GPUs computes, so one GPU shows a step's time, without the all-reduces between
ranks.

    python -m sglang_patches.bench.shard DIR        # writes DIR/target and DIR/draft: 12 layers, bfloat16
    python -m sglang_patches.bench.shard DIR --layers 61 --weights int4    # the whole of a rank's share, 73 GB
    python -m sglang.launch_server --model-path DIR/target --load-format dummy --attention-backend triton \
      --speculative-algorithm EAGLE3 --speculative-draft-model-path DIR/draft --speculative-num-steps 3 \
      --speculative-eagle-topk 1 --speculative-num-draft-tokens 4

Dimensions are those that Kimi-K2.5's ``config.json`` publishes. Divided by the number of ranks: attention heads, the
intermediate sizes, and the vocabulary. Whole on each rank: hidden size, latent KV, the router and the number of experts
(each rank has a slice of every expert). In bfloat16 one GPU holds fewer layers: 12 of 61, which keeps one dense layer.
``int4`` is the published checkpoint's own format: experts packed to 4 bits with a scale for every 32 weights
(compressed-tensors), all else bfloat16; so one GPU holds all layers. Positions are limited to what is measured; that
changes the length of the rotary table and nothing else.

There is a tokenizer, so that an ordinary server, upstream's bench_serving and its random data set can use it: one word
per id, separated by spaces, so that text and ids turn into each other exactly.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

RANKS = 8
LAYERS = 12
WHOLE = 61
HIDDEN = 7168
HEADS = 64
VOCABULARY = 163840
# 32k of context and what is generated after it.
MAX_POSITIONS = 40960
BOS, EOS, UNKNOWN = 0, 1, 2
#: Formats of the experts' weights.
WEIGHTS = ("bf16", "int4")
# What the published config.json says of its experts; attention, shared experts, dense layer and head stay as they are.
_INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "type": "int",
                "num_bits": 4,
                "strategy": "group",
                "group_size": 32,
                "symmetric": True,
                "dynamic": False,
                "actorder": None,
            },
        }
    },
}


def aux_layers(layers: int) -> tuple[int, int, int]:
    """States after an early, a middle and a late layer, as EAGLE-3 drafts take them."""
    return 2, layers // 2, layers - 3


def _common() -> dict[str, Any]:
    return {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS // RANKS,
        "vocab_size": VOCABULARY // RANKS,
        "intermediate_size": 18432 // RANKS,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }


def target(layers: int = LAYERS, weights: str = "bf16") -> dict[str, Any]:
    """``config.json`` of the target's text model, its experts' weights as one of `WEIGHTS`.

    Raises ValueError for fewer than 6 layers, since a draft takes three of them, or another format.
    """
    if layers < 6 or weights not in WEIGHTS:
        raise ValueError(f"{layers} layers of {weights}: at least 6 layers, and weights {' or '.join(WEIGHTS)}")
    return {
        **({"quantization_config": _INT4} if weights == "int4" else {}),
        **_common(),
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": layers,
        "num_key_value_heads": HEADS // RANKS,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_scaling": None,
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_intermediate_size": 2048 // RANKS,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "ep_size": 1,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
    }


def draft(layers: int = LAYERS) -> dict[str, Any]:
    """``config.json`` of the draft of a target of so many layers: one Llama layer over three captured states.

    Its vocabulary is 32768.
    """
    return {
        **_common(),
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "draft_vocab_size": 32768 // RANKS,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(aux_layers(layers)), "use_aux_hidden_state": True},
    }


def word(token_id: int) -> str:
    """The text of a token id: ``<bos>``, ``<eos>``, ``<unk>``, else ``w`` and the number."""
    return {BOS: "<bos>", EOS: "<eos>", UNKNOWN: "<unk>"}.get(token_id, f"w{token_id}")


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write tokenizer.json and tokenizer_config.json for ids below `vocabulary`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word(token_id): token_id for token_id in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=word(UNKNOWN)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([word(BOS), word(EOS), word(UNKNOWN)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": word(BOS),
        "eos_token": word(EOS),
        "unk_token": word(UNKNOWN),
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def write(folder: Path, layers: int = LAYERS, weights: str = "bf16") -> tuple[Path, Path]:
    """Write both models' configurations and tokenizer below `folder`; returns the folders of target and draft.

    Raises ValueError as `target` does.
    """
    written = []
    for name, config in (("target", target(layers, weights)), ("draft", draft(layers))):
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps(config, indent=1))
        write_tokenizer(place, config["vocab_size"])
        written.append(place)
    return written[0], written[1]


def main() -> None:
    """Command line: write the shard to the folder named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"of the target's {WHOLE}; default {LAYERS}")
    parser.add_argument("--weights", choices=WEIGHTS, default="bf16", help="of the experts; default bf16")
    asked = parser.parse_args()
    try:
        places = write(asked.folder, asked.layers, asked.weights)
    except ValueError as error:
        parser.error(str(error))
    for place in places:
        print(place)


if __name__ == "__main__":
    main()
