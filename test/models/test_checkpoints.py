"""The committed pair of models: files, shapes, tokenizer, quality, and the draft's unrolled forward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmark.tiny_kimi import checkpoint
from benchmark.tiny_kimi.draft import Capture
from benchmark.tiny_kimi.draft_model import DraftLayer, Eagle3Draft, rotate
from benchmark.tiny_kimi.evaluate import chain_cycles, encode_prompts, load_draft
from benchmark.tiny_kimi.reference import greedy, greedy_each, load_text_model
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer, DeepseekV3ForCausalLM, PreTrainedTokenizerBase

HERE = Path(__file__).parent
TARGET, DRAFT, PROMPTS = HERE / "tiny-kimi", HERE / "tiny-kimi-eagle3", HERE / "prompts.jsonl"
EMBEDDING_DRAFT = HERE / "tiny-kimi-embedding-eagle3"


@pytest.fixture(scope="module")
def model() -> DeepseekV3ForCausalLM:
    return load_text_model(TARGET)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module", params=[DRAFT, EMBEDDING_DRAFT], ids=lambda folder: folder.name)
def draft_folder(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture(scope="module")
def draft(draft_folder: Path) -> tuple[Eagle3Draft, Tensor]:
    return load_draft(draft_folder)


def test_weights_are_at_most_40_mb() -> None:
    assert sum(path.stat().st_size for path in HERE.rglob("*.safetensors")) <= 40e6


@pytest.mark.parametrize("folder", [TARGET, DRAFT, EMBEDDING_DRAFT])
def test_no_remote_code(folder: Path) -> None:
    for path in folder.glob("*.json"):
        assert "auto_map" not in path.read_text()
    assert not list(folder.glob("*.py"))


@pytest.mark.parametrize(
    ("folder", "config"),
    [
        (TARGET, checkpoint.TARGET_CONFIG),
        (DRAFT, checkpoint.draft_config()),
        (EMBEDDING_DRAFT, checkpoint.draft_config((-1, 5, 8))),
    ],
    ids=["target", "draft", "embedding draft"],
)
def test_config_is_what_the_scripts_write(folder: Path, config: dict[str, object]) -> None:
    assert json.loads((folder / "config.json").read_text()) == json.loads(json.dumps(config))


def test_attention_dimensions_all_differ() -> None:
    c = json.loads((TARGET / "config.json").read_text())["text_config"]
    nope, rope, value, latent = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"], c["kv_lora_rank"]
    sizes = [nope, rope, value, latent, c["q_lora_rank"], nope + rope, nope + value, latent + rope, c["hidden_size"]]
    assert len(set(sizes)) == len(sizes)
    assert c["num_attention_heads"] * value not in sizes


def test_kimi_names_round_trip(model: DeepseekV3ForCausalLM) -> None:
    state = model.state_dict()
    again = checkpoint.from_kimi_names(checkpoint.to_kimi_names(state))
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], state[name]) for name in state)


def test_vision_tower_is_in_the_checkpoint() -> None:
    with safe_open(TARGET / "model.safetensors", "pt") as weights:
        names = {name for name in weights.keys() if not name.startswith("language_model.")}  # noqa: SIM118
    assert names == set(checkpoint.untrained_vision_weights())


@pytest.mark.parametrize("text", ["The State of the Union is strong.", "naïve — “quoted”\n\n\ttabs  中文 🙂", ""])
def test_tokenizer_round_trip(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert all(token >= 13 for token in ids)


def test_special_text_ids(tokenizer: PreTrainedTokenizerBase) -> None:
    config = json.loads((TARGET / "config.json").read_text())
    assert len(tokenizer) == config["text_config"]["vocab_size"]
    assert tokenizer.convert_tokens_to_ids("<|media_pad|>") == config["media_placeholder_token_id"]
    assert tokenizer.eos_token_id == config["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token_id in json.loads((TARGET / "generation_config.json").read_text())["eos_token_id"]


def test_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    image: Any = [{"type": "image_url"}, {"type": "text", "text": "What is it?"}]
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": image}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|>"
        "<|im_user|>user<|im_middle|>"
        "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>What is it?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>"
    )


def test_prompts(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts = [json.loads(line) for line in PROMPTS.open()]
    assert len(prompts) >= 40
    assert len({prompt["text"] for prompt in prompts}) == len(prompts)
    lengths = [len(ids) for ids in encode_prompts(tokenizer, PROMPTS, "text")]
    assert min(lengths) >= 16
    assert max(lengths) <= 80


@torch.inference_mode()
def test_held_out_loss(model: DeepseekV3ForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """The held-out prompts themselves: short contexts, so dearer than the model card's windows of 512."""
    total, count = 0.0, 0
    for ids in encode_prompts(tokenizer, PROMPTS, "text"):
        tokens = torch.tensor([ids])
        total += float(F.cross_entropy(model(tokens[:, :-1]).logits[0], tokens[0, 1:], reduction="sum"))
        count += len(ids) - 1
    assert total / count < 4.2  # an untrained model gives 8.3


def test_chat_answer_ends_by_itself(model: DeepseekV3ForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    eos = frozenset({tokenizer.eos_token_id})
    assert any(greedy(model, ids, 128, eos)[-1] in eos for ids in encode_prompts(tokenizer, PROMPTS, "chat")[:6])


def test_a_batch_is_continued_as_each_prompt_alone(
    model: DeepseekV3ForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompts = sorted(encode_prompts(tokenizer, PROMPTS, "text"), key=len)[::16]
    assert len({len(ids) for ids in prompts}) == 3
    assert greedy_each(model, prompts, 16) == [greedy(model, ids, 16) for ids in prompts]
    assert greedy_each(model, prompts, 0) == [[], [], []]


def test_draft_vocabulary_tables(draft: tuple[Eagle3Draft, Tensor], draft_folder: Path) -> None:
    vocabulary = draft[1]
    with safe_open(draft_folder / "model.safetensors", "pt") as weights:
        kept = weights.get_tensor("t2d")
    assert len(vocabulary) == checkpoint.DRAFT_VOCAB_SIZE < len(kept) == checkpoint.TEXT_CONFIG["vocab_size"]
    assert torch.equal(kept.nonzero()[:, 0], vocabulary)


def sequential_layer(layer: DraftLayer, embeds: Tensor, hidden: Tensor) -> Tensor:
    """The draft layer as a server runs it: one causal sequence (T, hidden) at positions 0..T-1."""
    length = len(hidden)
    x = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], dim=-1)
    positions = torch.arange(length)
    query, key, value = (
        layer.self_attn[f"{name}_proj"](x).view(length, -1, layer.head_dim).transpose(0, 1) for name in "qkv"
    )
    query, key = rotate(query, positions), rotate(key, positions)
    attended = F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True, enable_gqa=True)[0]
    hidden = hidden + layer.self_attn["o_proj"](attended.transpose(0, 1).reshape(length, -1))
    x = layer.post_attention_layernorm(hidden)
    return hidden + layer.mlp["down_proj"](F.silu(layer.mlp["gate_proj"](x)) * layer.mlp["up_proj"](x))


@torch.inference_mode()
def test_unrolled_forward_is_sequential_drafting(draft: tuple[Eagle3Draft, Tensor]) -> None:
    """Slot i of unrolled step k is what drafting k tokens one after another from token i gives."""
    module, steps, slots = draft[0], 4, 9
    generator = torch.Generator().manual_seed(0)
    aux = torch.randn(1, slots, 3 * 256, generator=generator)
    embeds = torch.randn(1, slots + steps, 256, generator=generator)
    unrolled = module(aux, embeds, steps)
    for slot in (0, 4, slots - 1):
        hidden = module.fc(aux[0, : slot + 1])
        for step in range(steps):
            output = sequential_layer(module.midlayer, embeds[0, : slot + 1 + step], hidden)[-1:]
            torch.testing.assert_close(
                module.lm_head(module.norm(output))[0], unrolled[step][0, slot], rtol=1e-4, atol=1e-4
            )
            hidden = torch.cat([hidden, output])


@pytest.fixture(scope="module")
def continued(model: DeepseekV3ForCausalLM, tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, list[int]]]:
    """Some of the held-out prompts: the prompt's length, and the ids of prompt and greedy continuation."""
    prompts = encode_prompts(tokenizer, PROMPTS, "text")[::8]
    return [(len(ids), ids + greedy(model, ids, 64)) for ids in prompts]


def accept_length(
    model: DeepseekV3ForCausalLM, folder: Path, layer_ids: tuple[int, ...], continued: list[tuple[int, list[int]]]
) -> float:
    """Of greedy chains of three drafted tokens, the draft given the outputs of `layer_ids`."""
    capture, drafter, cycles = Capture(model, layer_ids), load_draft(folder), []
    for prompt, ids in continued:
        cycles += chain_cycles(capture, *drafter, ids, prompt, 3)
    return sum(cycles) / len(cycles)


def test_accept_length(model: DeepseekV3ForCausalLM, continued: list[tuple[int, list[int]]]) -> None:
    """The draft that reads the embedding is as good as the first, and needs the layers that it was trained on."""
    first = accept_length(model, DRAFT, (1, 5, 8), continued)
    assert first >= 2.2
    assert accept_length(model, EMBEDDING_DRAFT, (-1, 5, 8), continued) >= first - 0.1
    assert accept_length(model, DRAFT, (2, 6, 9), continued) < first - 0.1, "off by one costs more than that"
    # Its first state is of another kind, so that a wrong layer there costs nearly everything.
    assert accept_length(model, EMBEDDING_DRAFT, (0, 6, 9), continued) < 1.5
