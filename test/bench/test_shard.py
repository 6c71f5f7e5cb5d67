"""bench/shard.py: the geometry that is served, and a tokenizer whose text and ids turn into each other exactly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sglang_patches.bench import shard


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return shard.write(tmp_path_factory.mktemp("shard"))


def test_a_rank_has_an_eighth_of_the_published_model(folders: tuple[Path, Path]) -> None:
    target, draft = (json.loads((place / "config.json").read_text()) for place in folders)
    assert target["num_attention_heads"] * shard.RANKS == 64
    assert target["moe_intermediate_size"] * shard.RANKS == 2048
    assert (target["n_routed_experts"], target["num_experts_per_tok"], target["kv_lora_rank"]) == (384, 8, 512)
    assert draft["hidden_size"] == target["hidden_size"] == 7168
    assert max(draft["eagle_config"]["eagle_aux_hidden_state_layer_ids"]) < target["num_hidden_layers"]
    assert target["max_position_embeddings"] > 32 * 1024


def test_the_whole_share_is_as_published() -> None:
    """61 layers of packed experts; attention, shared experts, dense layer and head are no linear layers of 4 bits."""
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from sglang.srt.layers.quantization.compressed_tensors.utils import should_ignore_layer

    target, draft = shard.target(shard.WHOLE, "int4"), shard.draft(shard.WHOLE)
    assert target["num_hidden_layers"] == 61
    assert draft["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    read = CompressedTensorsConfig.from_config(dict(target["quantization_config"]))
    packed = read.target_scheme_map["Linear"]["weights"]
    assert (packed.num_bits, packed.group_size, packed.symmetric) == (4, 32, True)
    kept = {
        name: should_ignore_layer(
            f"model.layers.1.{name}", ignore=read.ignore, fused_mapping=read.packed_modules_mapping
        )
        for name in ("mlp.experts", "mlp.gate_up_proj", "mlp.shared_experts.down_proj", "self_attn.o_proj")
    }
    assert kept == {
        "mlp.experts": False, "mlp.gate_up_proj": True, "mlp.shared_experts.down_proj": True, "self_attn.o_proj": True,
    }  # fmt: skip
    assert should_ignore_layer("lm_head", ignore=read.ignore)
    assert "quantization_config" not in shard.target()


@pytest.mark.parametrize(("layers", "weights"), [(5, "bf16"), (12, "fp4")])
def test_a_share_that_cannot_be_is_refused(layers: int, weights: str) -> None:
    with pytest.raises(ValueError, match=f"{layers} layers of {weights}: at least 6 layers, and weights bf16 or int4"):
        shard.target(layers, weights)


def test_ids_survive_the_way_through_text(folders: tuple[Path, Path]) -> None:
    """What bench_serving's random data set relies on for exact prompt lengths."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folders[0]))
    vocabulary = json.loads((folders[0] / "config.json").read_text())["vocab_size"]
    assert len(tokenizer) == vocabulary
    ids = np.random.default_rng(0).integers(3, vocabulary, 500).tolist()
    text = str(tokenizer.decode(ids))
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert text.split()[0] == shard.word(ids[0])
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (shard.BOS, shard.EOS)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "w7 w9"}], tokenize=False)
    assert str(chat).split() == ["w7", "w9"]
