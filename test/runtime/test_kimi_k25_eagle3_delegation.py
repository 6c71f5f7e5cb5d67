"""kimi-k25-eagle3-delegation before any weight is loaded: models in each other's place, and what is refused or told."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_contract import forget, pair_of, refused
from drafts import DRAFT, EAGLE3, TARGET, served, without, write_draft
from sglang.srt.configs.model_config import ModelConfig

from sglang_patches import lane
from sglang_patches.draft import roles
from sglang_patches.draft.checkpoint import UnreadableCheckpoint
from sglang_patches.runtime import _outcome
from sglang_patches.runtime.kimi_k25_eagle3_delegation import DraftContractError, accounting, settings, startup


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)


@pytest.fixture(scope="module")
def target() -> ModelConfig:
    return ModelConfig(str(TARGET), dtype="float32")


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


def in_worker(draft: Path, target: ModelConfig) -> Any:
    """What a scheduler's check makes of `draft`: the outcome."""
    config = ModelConfig(str(draft), dtype="float32", is_draft_model=True, **EAGLE3)
    arguments = SimpleNamespace(
        download_dir=None, speculative_algorithm="EAGLE3", speculative_draft_model_path=str(draft)
    )
    resolved = SimpleNamespace(draft_model_config=config)
    startup.check_in_worker(resolved, arguments, target, is_draft_worker=False)
    return _outcome.outcomes()[startup.PATCH]


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
