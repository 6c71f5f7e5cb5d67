"""kimi-k25-eagle3-delegation: every rule of the draft contract, on edited drafts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from draft_contract import Config, forget, ids, pair_of, refused, warned
from drafts import DRAFT, EAGLE3, REMOVED, TARGET, Edit, mla_draft, renamed, setting, unchanged, without, write_draft
from sglang.srt.configs.model_config import ModelConfig

from sglang_patches.draft.contract import check
from sglang_patches.runtime.kimi_k25_eagle3_delegation import startup


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)


@pytest.fixture(scope="module")
def target() -> ModelConfig:
    return ModelConfig(str(TARGET), dtype="float32")


def test_the_bundled_pair_fits_without_a_remark(target: ModelConfig) -> None:
    assert check(pair_of(DRAFT, target)) == []


def d2t(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return tensors["d2t"].clone()


def with_id(draft_token: int, token: int) -> Edit:
    """Let one draft token be that token of the target."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["d2t"] = d2t(tensors)
        tensors["d2t"][draft_token] = token - draft_token

    return edit


def swapped(tensors: dict[str, torch.Tensor]) -> None:
    token = d2t(tensors) + torch.arange(3072)
    token[[7, 8]] = token[[8, 7]]
    tensors["d2t"] = token - torch.arange(3072)


def absolute(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] = d2t(tensors) + torch.arange(3072)


def other_mask(tensors: dict[str, torch.Tensor]) -> None:
    mask = tensors["t2d"].clone()
    inside, outside = int(mask.nonzero()[100]), int((~mask).nonzero()[100])
    mask[inside], mask[outside] = False, True
    tensors["t2d"] = mask


def as_integers(tensors: dict[str, torch.Tensor]) -> None:
    tensors["midlayer.mlp.up_proj.weight"] = torch.zeros(768, 256, dtype=torch.int8)


# Edit of config.json, edit of tensors, what the refusal must say: both values, and the key or tensor.
REFUSED: dict[str, tuple[Config, Edit, list[str]]] = {
    "hidden size": (
        {"hidden_size": 128, "target_hidden_size": 128}, unchanged, ["target_hidden_size is 128", "hidden_size is 256"],
    ),
    "hidden size, no key for the target's": (
        {"hidden_size": 512, "target_hidden_size": REMOVED}, unchanged, ["hidden_size is 512", "hidden_size is 256"],
    ),
    "fc for two states": (
        {}, setting(fc__weight=torch.zeros(256, 512)),
        ["fc.weight of model.safetensors has shape [256, 512], expected [256, 768]", "3 captured states"],
    ),
    "four layers named": (
        ids(1, 3, 5, 8), unchanged, ["fc.weight", "[256, 768], expected [256, 1024]", "4 captured states"],
    ),
    "states and ids disagree": (
        {"num_aux_hidden_states": 4}, unchanged, ["num_aux_hidden_states is 4", "[1, 5, 8], which is 3 states"],
    ),
    "layers of a deeper target": (ids(2, 30, 58), unchanged, ["[30, 58] are no layers", "num_hidden_layers 12"]),
    "another vocabulary": (
        {"vocab_size": 32000}, unchanged, ["vocab_size is 32000, but the target's is 4096", "another tokenizer"],
    ),
    "draft vocabulary above the target's": (
        {"draft_vocab_size": 5000}, unchanged, ["draft_vocab_size is 5000, but the target's vocab_size is 4096"],
    ),
    "head of another size": (
        {"draft_vocab_size": 3000}, unchanged, 
        ["lm_head.weight", "has 3072 rows, but config.json draft_vocab_size is 3000"],
    ),
    "no draft_vocab_size": ({"draft_vocab_size": REMOVED}, unchanged, ["no draft_vocab_size", "null"]),
    "d2t missing": ({}, without("d2t"), ["draft_vocab_size is 3072 of the target's 4096", "no tensor d2t"]),
    "d2t too short": (
        {}, setting(d2t=lambda t: t["d2t"][:3000]), ["d2t", "shape [3000]", "shape [3072] (draft_vocab_size)"],
    ),
    "d2t of floats": ({}, setting(d2t=lambda t: t["d2t"].float()), ["d2t", "dtype F32", "integers (I64)"]),
    "d2t out of range": ({}, with_id(3071, 4096), ["d2t", "to 4096, but the target has ids 0 to 4095"]),
    "d2t negative": ({}, with_id(0, -1), ["d2t", "from -1 to"]),
    "d2t holds ids, not offsets": ({}, absolute, ["d2t", "0 to 4095", "token ids themselves, not offsets"]),
    "d2t names a token twice": ({}, with_id(8, 7), ["d2t", "gives 3071 different token ids to 3072"]),
    "d2t out of order": ({}, swapped, ["d2t", "out of order (draft token 8 is", "ascending"]),
    "t2d contradicts d2t": ({}, other_mask, ["t2d marks 3072 tokens", "d2t names 3072", "3071 are in both"]),
    "two layers, one in the file": ({"num_hidden_layers": 2}, unchanged, ["num_hidden_layers is 2", "layers [0]"]),
    "no fc": ({}, without("fc.weight"), ["no tensor for 1 parameters: fc.weight"]),
    "no norm and no key projection": (
        {}, without("norm.weight", "midlayer.self_attn.k_proj.weight"),
        ["no tensor for 2 parameters", "layers.0.self_attn.k_proj.weight", "norm.weight"],
    ),
    "names that upstream does not know": (
        {}, renamed(lambda name: name.replace("midlayer", "decoder")), ["num_hidden_layers is 1", "layers none"],
    ),
    "norms before fc missing": ({"fc_norm": True}, unchanged, ["no tensor for 3 parameters: fc_norm.0.weight"]),
    "heads of another size": (
        {"head_dim": 32}, unchanged, ["q_proj.weight", "has shape [256, 512]", "config.json makes it [128, 512]"],
    ),
    "own embedding missing": (
        {"hidden_size": 128, "target_hidden_size": 256}, unchanged, ["embed_tokens.weight"],
    ),
    "too few positions": (
        {"max_position_embeddings": 2048}, unchanged,
        ["allows 2048 positions", "served with 4096", "--context-length 2048", "SGLANG_ALLOW_OVERWRITE_LONGER"],
    ),
    "positions of images": (
        {"rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]}}, unchanged,
        ["mrope_section [8, 12, 12]"],
    ),
    "integers without a quantization": (
        {}, as_integers, ["midlayer.mlp.up_proj.weight", "dtype I8", "no quantization_config"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_draft_that_cannot_fit_is_refused(case: str, tmp_path: Path, target: ModelConfig) -> None:
    config, edit, said = REFUSED[case]
    reasons = "\n".join(refused(pair_of(write_draft(tmp_path / "draft", config, edit), target)))
    for part in said:
        assert part in reasons


def full_vocabulary(tensors: dict[str, torch.Tensor]) -> None:
    """As EAGLE's own drafts of a full vocabulary: d2t all zero, t2d never filled in."""
    tensors["lm_head.weight"] = torch.zeros(4096, 256, dtype=torch.bfloat16)
    tensors["d2t"] = torch.zeros(4096, dtype=torch.int64)
    tensors["t2d"] = torch.zeros(4096, dtype=torch.bool)


def own_embedding(tensors: dict[str, torch.Tensor]) -> None:
    tensors["embed_tokens.weight"] = torch.zeros(4096, 256, dtype=torch.bfloat16)


def no_mask(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["t2d"]


def unordered(tensors: dict[str, torch.Tensor]) -> None:
    swapped(tensors)
    no_mask(tensors)


def with_norms(tensors: dict[str, torch.Tensor]) -> None:
    for name in ("aux_norm_low", "aux_norm_mid", "aux_norm_high"):
        tensors[f"{name}.weight"] = torch.ones(256)


def narrow(tensors: dict[str, torch.Tensor]) -> None:
    """A draft half as wide as its target, with an embedding of its own."""
    for name, shape in (
        ("fc.weight", (128, 768)), ("norm.weight", (128,)), ("lm_head.weight", (3072, 128)),
        ("embed_tokens.weight", (4096, 128)), ("midlayer.hidden_norm.weight", (128,)),
        ("midlayer.input_layernorm.weight", (128,)), ("midlayer.post_attention_layernorm.weight", (128,)),
        ("midlayer.mlp.gate_proj.weight", (768, 128)), ("midlayer.mlp.up_proj.weight", (768, 128)),
        ("midlayer.mlp.down_proj.weight", (128, 768)), ("midlayer.self_attn.o_proj.weight", (128, 256)),
    ):  # fmt: skip
        tensors[name] = torch.zeros(shape)
    for name in ("q_proj", "k_proj", "v_proj"):
        key = f"midlayer.self_attn.{name}.weight"
        tensors[key] = tensors[key][:, :256]


# The forms in which published drafts come; none may be refused, and only these remarks are made.
ACCEPTED: dict[str, tuple[Config, Edit, list[str]]] = {
    "full vocabulary with empty maps": ({"draft_vocab_size": 4096}, full_vocabulary, []),
    "the target's own head": ({"draft_vocab_size": None}, without("lm_head.weight", "d2t", "t2d"), []),
    "an embedding of its own": ({}, own_embedding, []),
    "no t2d": ({}, no_mask, []),
    "names with model. and layers.0": (
        {}, renamed(lambda n: n if "2" in n or "head" in n else f"model.{n.replace('midlayer', 'layers.0')}"), [],
    ),
    "no eagle_config": ({"eagle_config": REMOVED}, unchanged, []),
    "ids at top level": (
        {"eagle_config": REMOVED, "eagle_aux_hidden_state_layer_ids": [2, 6, 9]}, unchanged, ["[2, 6, 9] at top level"],
    ),
    "the embedding captured, which upstream alone does not": (
        ids(-1, 5, 8), unchanged, ["[-1, 5, 8]", "captures [-1] at no layer", "num_hidden_layers 12"],
    ),
    "the embedding captured in layer inputs": (ids(0, 5, 8), unchanged, []),
    "the last layer's output": (ids(2, 6, 12), unchanged, ["captures [12] at no layer"]),
    "without captured states, as ModelOpt exports it": (
        {"eagle_config": {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": []}},
        without("fc.weight", "midlayer.hidden_norm.weight"), ["has no layers.0.hidden_norm.weight", "weight 1"],
    ),
    "without captured states, with all tensors": ({"eagle_config": {"use_aux_hidden_state": False}}, unchanged, []),
    "ids for both engines": (
        {**ids(1, 5, 8), "eagle_aux_hidden_state_layer_ids": [2, 6, 9]}, unchanged, [],
    ),
    "a layer twice": (ids(5, 5, 8), unchanged, ["[5, 5, 8]", "deepseek-v2-embedding-capture"]),
    "no target_hidden_size": ({"target_hidden_size": REMOVED}, unchanged, []),
    "yarn": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}}, unchanged, [],
    ),
    "norms before fc, old names": ({"fc_norm": True}, with_norms, []),
    "narrower than its target": (
        {"hidden_size": 128, "target_hidden_size": 256, "intermediate_size": 768, "head_dim": 64}, narrow, [],
    ),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, as_integers, []),
    "d2t unordered, no mask": ({}, unordered, ["out of order"]),
    "tensors nobody knows": (
        {}, setting(midlayer__self_attn__q_norm__weight=torch.ones(64)), ["knows no midlayer.self_attn.q_norm"],
    ),
    "the verifier's own": ({}, setting(verifier_norm__weight=torch.ones(256)), []),
    "residual after the norm": ({"norm_before_residual": True}, unchanged, ["norm_before_residual"]),
}  # fmt: skip


@pytest.mark.parametrize("case", ACCEPTED)
def test_a_draft_that_may_work_is_not_refused(case: str, tmp_path: Path, target: ModelConfig) -> None:
    config, edit, said = ACCEPTED[case]
    pair = pair_of(write_draft(tmp_path / "draft", config, edit), target)
    assert refused(pair) == []
    remarks = "\n".join(warned(pair))
    assert bool(remarks) == bool(said)
    for part in said:
        assert part in remarks


def test_mla_drafts(tmp_path: Path, target: ModelConfig) -> None:
    assert check(pair_of(mla_draft(tmp_path / "mla"), target)) == []
    prefixed = mla_draft(tmp_path / "prefixed", {}, renamed(lambda n: n if "lm_head" in n else f"model.{n}"))
    assert "no tensor for 15 parameters: fc.weight" in "\n".join(refused(pair_of(prefixed, target)))

    def experts(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("gate_proj", "up_proj", "down_proj"):
            tensors[f"layers.0.mlp.experts.0.{name}.weight"] = tensors.pop(f"layers.0.mlp.{name}.weight")

    assert "mixture of experts" in "\n".join(refused(pair_of(mla_draft(tmp_path / "moe", {}, experts), target)))
    deep = pair_of(mla_draft(tmp_path / "deep", {"num_hidden_layers": 2}), target)
    assert refused(deep) == ["config.json num_hidden_layers is 2, but upstream's Eagle3DeepseekV2ForCausalLM has 1"]


def test_a_multimodal_draft_is_read_through_its_text_config(target: ModelConfig) -> None:
    flat = json.loads((DRAFT / "config.json").read_text())
    outer = {key: flat.pop(key) for key in ("architectures", "eagle_config")}
    pair = dataclasses.replace(pair_of(DRAFT, target), draft={**outer, "text_config": flat})
    assert check(pair) == []
    flat |= {"vocab_size": 32000, "target_hidden_size": 512}
    assert len(refused(pair)) == 4  # both, fc.weight, and an embedding of its own


def test_longer_contexts_are_upstreams_to_allow(
    tmp_path: Path, target: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    pair = pair_of(write_draft(tmp_path / "draft", {"max_position_embeddings": 2048}), target)
    assert refused(pair) == []
    assert "allows 2048 positions" in warned(pair)[0]


def test_another_tokenizer_is_told(tmp_path: Path, target: ModelConfig) -> None:
    draft = write_draft(tmp_path / "draft")
    (draft / "tokenizer.json").write_bytes((TARGET / "tokenizer.json").read_bytes())
    assert check(pair_of(draft, target)) == []
    (draft / "tokenizer.json").write_text("{}")
    assert "is not the target's tokenizer.json" in warned(pair_of(draft, target))[0]


def test_ids_that_patch_embedding_capture_settles_need_no_remark(tmp_path: Path, target: ModelConfig) -> None:
    draft = write_draft(tmp_path / "draft", ids(-1, 5, 8))
    assert check(dataclasses.replace(pair_of(draft, target), ids_settled=True)) == []
    config = ModelConfig(str(draft), dtype="float32", is_draft_model=True, **EAGLE3)
    pair = startup.make_pair(SimpleNamespace(download_dir=None), target, config)
    assert pair.ids_settled is hasattr(config, "aux_layer_request")


UNREAD = {
    "target_hidden_size": REMOVED, "hidden_size": REMOVED, "vocab_size": REMOVED, "draft_vocab_size": REMOVED,
    "num_hidden_layers": REMOVED, "d_model": 256, "n_layer": 1,
}  # fmt: skip


def test_sizes_that_a_draft_spells_another_way_are_not_checked(tmp_path: Path, target: ModelConfig) -> None:
    pair = pair_of(write_draft(tmp_path / "draft", {"architectures": ["Other"]}), target)
    spelled = {
        key: found for key, found in json.loads((DRAFT / "config.json").read_text()).items() if key not in UNREAD
    }
    pair = dataclasses.replace(pair, draft={**spelled, "architectures": ["Other"]})
    assert refused(pair) == []
    remarks = "\n".join(warned(pair))
    for rule in ("hidden", "vocabulary", "maps", "tensors"):
        assert f"config.json (architectures Other) does not say what rule '{rule}' reads" in remarks
