"""kimi-k25-eagle3-delegation before any weight is loaded: every rule of the draft contract, on edited drafts."""

from __future__ import annotations

import dataclasses
import inspect
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafts import (
    DRAFT,
    EAGLE3,
    REMOVED,
    TARGET,
    Edit,
    mla_draft,
    renamed,
    served,
    setting,
    unchanged,
    without,
    write_draft,
)
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.utils.hf_transformers_utils import get_config

from sglang_patches import lane
from sglang_patches.draft import roles
from sglang_patches.draft.checkpoint import UnreadableCheckpoint
from sglang_patches.draft.contract import Pair, check
from sglang_patches.runtime import _outcome
from sglang_patches.runtime.kimi_k25_eagle3_delegation import (
    DraftContractError,
    accounting,
    alarm,
    settings,
    startup,
)

Config = dict[str, Any]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_outcome, "_recorded", {})
    monkeypatch.setattr(_outcome, "_suppliers", {})
    monkeypatch.setattr(startup, "_checked", [])
    # Of the configuration that a test makes, in every lane.
    monkeypatch.setattr(lane.Lane, "draft_model_config", lambda self, config, server_args: config.draft_model_config)
    monkeypatch.setattr(type(lane.here()), "draft_model_config", lane.Lane.draft_model_config)
    for name in (
        settings.CONTRACT,
        settings.WINDOW,
        settings.THRESHOLD,
        settings.SECONDS,
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
    ):
        monkeypatch.delenv(name, raising=False)
    alarm.window.cache_clear()


@pytest.fixture(scope="module")
def target() -> ModelConfig:
    return ModelConfig(str(TARGET), dtype="float32")


def pair_of(draft: Path, target: ModelConfig) -> Pair:
    """As `startup` makes it, from the draft's configuration as upstream alone reads it."""
    config = inspect.unwrap(get_config)(str(draft), trust_remote_code=False)
    model = SimpleNamespace(
        model_path=str(draft), revision=None, hf_config=config, hf_text_config=config, dtype=torch.float32
    )
    return startup.make_pair(SimpleNamespace(download_dir=None), target, model)


def refused(pair: Pair) -> list[str]:
    return [finding.text for finding in check(pair) if finding.refuse]


def warned(pair: Pair) -> list[str]:
    return [finding.text for finding in check(pair) if not finding.refuse]


def test_a_draft_served_in_another_dtype_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_draft(tmp_path / "d", {"dtype": "float16"})
    draft = ModelConfig(str(folder), is_draft_model=True, **EAGLE3)
    both = SimpleNamespace(download_dir=None), ModelConfig(str(TARGET)), draft
    (reason,) = refused(startup.make_pair(*both))
    assert "served in float16" in reason
    assert "the target in bfloat16" in reason
    # Below sm80 upstream serves both in float16.
    monkeypatch.setattr("sglang.srt.utils.common.get_device_sm", lambda: 75)
    assert refused(startup.make_pair(*both)) == []


def test_the_bundled_pair_fits_without_a_remark(target: ModelConfig) -> None:
    assert check(pair_of(DRAFT, target)) == []


@pytest.mark.parametrize(
    ("target_class", "draft_class"),
    [
        ("KimiK25ForConditionalGeneration", "KimiK25ForConditionalGeneration"),
        ("DeepseekV3ForCausalLM", "DeepseekV3ForCausalLMNextN"),
        ("LlamaForCausalLM", "LlamaForCausalLM"),
    ],
)
def test_a_target_in_the_drafts_place_is_refused(target: ModelConfig, target_class: str, draft_class: str) -> None:
    """Its widths and vocabulary fit, of course."""
    fits = pair_of(DRAFT, target)
    assert refused(fits) == []
    outer = {**fits.target.to_dict(), "architectures": [target_class]}
    placed = dataclasses.replace(fits, target=outer, draft={**fits.draft.to_dict(), "architectures": [draft_class]})
    reason, *_ = refused(placed)
    assert reason.startswith(f"config.json architectures is {draft_class}, a whole model")
    assert "LlamaForCausalLMEagle3" in reason


@pytest.mark.parametrize(
    ("model", "draft", "said", "remedy"),
    [
        (DRAFT, TARGET, f"the EAGLE-3 draft {TARGET} does not fit the target {DRAFT}:", f"swap them: {TARGET} as the"),
        (DRAFT, DRAFT, f"the EAGLE-3 draft {DRAFT} does not fit the target {DRAFT}:", "give the whole model that"),
        (DRAFT, None, f"{DRAFT} is no target:", "give the whole model that"),
        (TARGET, TARGET, f"the EAGLE-3 draft {TARGET} does not fit the target {TARGET}:", "give the draft that was"),
    ],
)
def test_models_in_each_others_place_end_the_start(
    model: Path, draft: Path | None, said: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the tokenizer, which a draft's folder lacks, and which upstream loads in the same process a little later.

    Neither of upstream's configurations is made for it.
    """
    monkeypatch.setattr(startup, "make_pair", None)
    with pytest.raises(DraftContractError) as refused:
        startup.check_before_spawn(served(model, draft))
    message = str(refused.value)
    assert message.startswith(said)
    assert ("\n  - the target's config.json architectures is LlamaForCausalLMEagle3" in message) == (model == DRAFT)
    assert f"\n  remedy: {remedy}" in message


def test_a_draft_alone_is_served_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(settings.CONTRACT, "warn")
    startup.check_before_spawn(served(DRAFT))
    assert f"{DRAFT} is no target:" in caplog.text


def test_a_scheduler_that_starts_by_itself_refuses_a_draft_as_its_target() -> None:
    config = ModelConfig(str(DRAFT), dtype="float32")
    with pytest.raises(DraftContractError, match="is no target:"):
        startup.check_in_worker(SimpleNamespace(draft_model_config=None), served(DRAFT), config, is_draft_worker=False)


def test_eagles_own_draft_of_a_llama_is_no_whole_model() -> None:
    """Both have one architecture; the draft's other keys tell it, to those that read them."""
    llama = {"architectures": ["LlamaForCausalLM"]}
    draft = llama | {"draft_vocab_size": 32000}
    assert roles.misplaced(llama, draft) == []
    assert len(roles.misplaced(llama, draft, as_it_says=True)) == 1
    assert len(roles.misplaced(draft, llama)) == 2
    assert len(roles.misplaced(llama, llama)) == 1
    assert roles.misplaced(None, draft) == []


def ids(*numbers: int) -> Config:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(numbers), "use_aux_hidden_state": True}}


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


def test_a_broken_or_missing_file_is_named(tmp_path: Path, target: ModelConfig) -> None:
    draft = write_draft(tmp_path / "draft")
    (draft / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"fc.weight": "model-00002.safetensors"}})
    )
    with pytest.raises(UnreadableCheckpoint, match=r"names model-00002.safetensors, which .*draft lacks"):
        pair_of(draft, target)
    (draft / "model.safetensors.index.json").unlink()
    (draft / "model.safetensors").write_bytes(b"<html>" * 10)
    with pytest.raises(UnreadableCheckpoint, match=r"model.safetensors is no readable safetensors file"):
        pair_of(draft, target)
    (draft / "model.safetensors").unlink()
    assert pair_of(draft, target).checkpoint is None


def test_a_draft_that_is_fetched_while_it_is_loaded_is_checked_then(
    tmp_path: Path, target: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_draft(tmp_path / "draft", {}, without("d2t", "t2d"))
    config = ModelConfig(str(folder), dtype="float32", is_draft_model=True, **EAGLE3)
    arguments = SimpleNamespace(
        download_dir=None, speculative_algorithm="eagle3", speculative_draft_model_path="o/draft"
    )
    resolved = SimpleNamespace(draft_model_config=config)
    monkeypatch.setattr(startup, "local_folder", lambda model, revision, cache: None)
    startup.check_in_worker(resolved, arguments, target, is_draft_worker=False)
    assert _outcome.outcomes()[startup.PATCH]["headers_checked"] is False

    def fetch(**given: Any) -> str:
        monkeypatch.setattr(startup, "local_folder", lambda model, revision, cache: folder)
        return "loaded"

    load = accounting.watches_draft(fetch)
    assert load(is_draft_worker=False, model_config=target) == "loaded"
    with pytest.raises(DraftContractError, match="no tensor d2t"):
        load(is_draft_worker=True, model_config=config)


def test_all_reasons_come_in_one_error(
    tmp_path: Path, target: ModelConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    draft = write_draft(tmp_path / "draft", {"draft_vocab_size": 3000}, without("d2t", "norm.weight"))
    with pytest.raises(DraftContractError) as caught:
        startup.judge(pair_of(draft, target))
    text = str(caught.value)
    assert text.startswith(f"the EAGLE-3 draft {draft} does not fit the target {TARGET}:\n  - ")
    assert text.count("\n  - ") == 3
    assert text.endswith("SGLANG_PATCHES_DRAFT_CONTRACT=warn starts the server all the same")
    monkeypatch.setenv(settings.CONTRACT, "warn")
    startup.judge(pair_of(draft, target))
    assert "no tensor d2t" in caplog.text
    monkeypatch.setenv(settings.CONTRACT, "ignore")
    with pytest.raises(DraftContractError, match="is 'ignore', expected 'refuse' or 'warn'"):
        startup.judge(pair_of(draft, target))


def test_ids_that_patch_embedding_capture_settles_need_no_remark(tmp_path: Path, target: ModelConfig) -> None:
    draft = write_draft(tmp_path / "draft", ids(-1, 5, 8))
    assert check(dataclasses.replace(pair_of(draft, target), ids_settled=True)) == []
    config = ModelConfig(str(draft), dtype="float32", is_draft_model=True, **EAGLE3)
    pair = startup.make_pair(SimpleNamespace(download_dir=None), target, config)
    assert pair.ids_settled is hasattr(config, "aux_layer_request")


def in_worker(draft: Path, target: ModelConfig) -> Any:
    """What a scheduler's check makes of `draft`: the outcome."""
    config = ModelConfig(str(draft), dtype="float32", is_draft_model=True, **EAGLE3)
    arguments = SimpleNamespace(
        download_dir=None, speculative_algorithm="EAGLE3", speculative_draft_model_path=str(draft)
    )
    resolved = SimpleNamespace(draft_model_config=config)
    startup.check_in_worker(resolved, arguments, target, is_draft_worker=False)
    return _outcome.outcomes()[startup.PATCH]


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


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": {"a": 1, "b": "c"}}'])
def test_a_broken_index_is_served_when_asked_for(
    index: str, tmp_path: Path, target: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = write_draft(tmp_path / "draft")
    (draft / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UnreadableCheckpoint, match=r"model.safetensors.index.json is no readable index .*download"):
        pair_of(draft, target)
    with pytest.raises(DraftContractError, match="is no readable index"):
        in_worker(draft, target)
    monkeypatch.setenv(settings.CONTRACT, "warn")
    told = in_worker(draft, target)
    assert (told["result"], told["headers_checked"]) == ("failed", False)
    assert "is no readable index" in told["warnings"][0]
    checked = startup.checked()
    assert checked is not None
    startup.check_what_was_fetched(checked)
    assert _outcome.outcomes()[startup.PATCH]["result"] == "failed"


def test_what_nothing_filled_is_finite_whatever_its_memory_held() -> None:
    model: Any = torch.nn.Module()
    model.config = {}
    model.scale = torch.nn.Parameter(torch.ones(3))
    model.projection = torch.nn.Parameter(torch.full((2, 2), float("nan")))
    account = accounting.Account(model)
    account.plant()
    assert account.unfilled() == {"scale": 1.0, "projection": 1.0}
    assert model.scale.tolist() == [1.0, 1.0, 1.0]
    assert model.projection.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_images_with_context_parallel_prefill_are_refused(tmp_path: Path, target: ModelConfig) -> None:
    from sglang.srt import runtime_context
    from sglang.srt.runtime_context import get_parallel

    arguments = SimpleNamespace(enable_prefill_cp=True, speculative_algorithm=None, speculative_draft_model_path=None)
    config = SimpleNamespace(draft_model_config=None)
    can_do_without = "language_model_only" in lane.here().argument_names()
    remedy = "with --language-model-only .*or without --enable" if can_do_without else "without --enable"
    # Of its own: one that another test of this process has published has one rank, and may not be told otherwise.
    own: Any = nullcontext()
    if hasattr(runtime_context, "use_context"):  # not on 0.5.17, where it may be told
        own = runtime_context.use_context(runtime_context.RuntimeContext(parallel=runtime_context.ParallelContext()))
    with own:
        with get_parallel().override(attn_cp_size=2):
            with pytest.raises(ValueError, match=rf"takes images, .* over 2 ranks.*Start {remedy}"):
                startup.check_in_worker(config, arguments, target, is_draft_worker=False)
            if can_do_without:
                text_only = ModelConfig(str(TARGET), dtype="float32", language_model_only=True)
                startup.check_in_worker(config, arguments, text_only, is_draft_worker=False)
        with get_parallel().override(attn_cp_size=1):
            startup.check_in_worker(config, arguments, target, is_draft_worker=False)


def test_without_eagle3_there_is_nothing_to_check() -> None:
    arguments = served(TARGET)
    startup.check_before_spawn(arguments)
    startup.check_in_worker(SimpleNamespace(draft_model_config=None), arguments, None, is_draft_worker=False)
    assert _outcome.outcomes()[startup.PATCH] == {"result": "not needed", "detail": "no EAGLE-3 draft is served"}
