"""kimi-k25-eagle3-delegation with upstream's own classes: drafts being loaded, and what the wrapper answers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lane_table
import pytest
import torch
from drafts import Tensors, mla_draft, renamed, setting, without, write_draft

from sglang_patches.runtime.kimi_k25_eagle3_delegation import answers_as_target

PATCH = "kimi-k25-eagle3-delegation"
HERE = Path(__file__).parent
# What upstream calls the draft's only layer.
LAYER = "model.midlayer" if lane_table.release() == "0.5.9" else "model.layers.0"


# As ModelOpt exports a draft that takes the target's last hidden state alone.
NO_STATES = {"eagle_config": {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": []}}


def fused(tensors: Tensors) -> None:
    """As upstream's class keeps the two down-projections."""
    both = [tensors.pop(f"layers.0.self_attn.{name}.weight") for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    tensors["layers.0.self_attn.fused_qkv_a_proj_with_mqa.weight"] = torch.cat(both)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("drafts")
    write_draft(folder / "good")
    write_draft(folder / "target-head", {"draft_vocab_size": None}, without("lm_head.weight", "d2t", "t2d"))
    write_draft(folder / "harmless", {}, setting(midlayer__self_attn__rotary_emb__inv_freq=torch.ones(32)))
    write_draft(folder / "no-norm", {}, without("norm.weight"))
    write_draft(folder / "no-k", {}, without("midlayer.self_attn.k_proj.weight"))
    write_draft(folder / "no-head", {}, without("lm_head.weight"))
    write_draft(folder / "extra", {}, setting(midlayer__self_attn__q_norm__weight=torch.ones(64)))
    write_draft(folder / "no-states", NO_STATES, without("fc.weight", "midlayer.hidden_norm.weight"))
    if lane_table.release() != "0.5.9":  # has no MLA draft
        mla_draft(folder / "mla")
        mla_draft(folder / "mla-no-states", NO_STATES, without("fc.weight", "layers.0.hidden_norm.weight"))
        mla_draft(folder / "mla-fused", {}, fused)
        mla_draft(folder / "mla-prefixed", {}, renamed(lambda name: name if "lm_head" in name else f"model.{name}"))
    write_draft(folder / "z-no-norm-no-o-warn", {}, without("norm.weight", "midlayer.self_attn.o_proj.weight"))
    environ = {key: found for key, found in os.environ.items() if not key.startswith("SGLANG_PATCHES_")}
    # What this patch makes of names alone; the other one reads conventions, and refuses by itself what is not whole.
    if lane_table.has("llama-eagle3-draft-loading"):
        environ["SGLANG_PATCHES"] = "-llama-eagle3-draft-loading"
    environ |= {key: os.environ[key] for key in ("SGLANG_PATCHES_CACHE", "SGLANG_PATCHES_DIR") if key in os.environ}
    done = subprocess.run(
        [sys.executable, "draft_loading.py", str(folder)],
        cwd=HERE, env=environ, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((folder / "results.json").read_text())


def of(results: dict[str, Any], name: str) -> Any:
    if name not in results and name.startswith("mla"):
        pytest.skip(f"lane {lane_table.release()}: upstream has no MLA draft")
    return results[name]


def test_the_check_before_loading_is_told(results: dict[str, Any]) -> None:
    assert results["checked"] | {"draft": ""} == {
        "result": "applied", "detail": "the draft fits the target", "draft": "",
        "architecture": "LlamaForCausalLMEagle3", "captured_states": 3, "draft_vocab": 3072, "target_vocab": 4096,
        "headers_checked": True, "warnings": [],
    }  # fmt: skip


@pytest.mark.parametrize("name", ["good", "target-head", "harmless", "mla"])
def test_a_whole_draft_is_loaded_as_it_is(results: dict[str, Any], name: str) -> None:
    result = of(results, name)
    assert result["error"] is None
    assert result["outcome"]["detail"] == "the draft fits the target and was loaded whole"
    assert result["outcome"]["unfilled"] == result["outcome"]["untaken"] == []
    assert result["finite"]
    assert {"fc.weight", "norm.weight"} <= {*result["same"]}


@pytest.mark.parametrize("name", ["no-states", "mla-no-states"])
def test_a_draft_without_captured_states_is_loaded(results: dict[str, Any], name: str) -> None:
    result = of(results, name)
    assert result["error"] is None
    assert result["outcome"]["detail"] == "the draft fits the target and was loaded whole"
    assert result["outcome"]["unfilled"] == result["outcome"]["untaken"] == []
    assert result["finite"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        # Upstream's loader takes the whole for one of its halves, waits for the other, and drops it.
        ("mla-fused", "model.midlayer.self_attn.fused_qkv_a_proj_with_mqa.weight (100% of it)"),
        ("no-norm", "no tensor of the checkpoint filled 1 parameters: model.norm.weight (100% of it)"),
        ("no-k", f"{LAYER}.self_attn.qkv_proj.weight (25% of it)"),
        ("no-head", "no tensor of the checkpoint filled 1 parameters: lm_head.weight (100% of it)"),
        ("extra", "took none of these 1 tensors of the checkpoint: midlayer.self_attn.q_norm.weight"),
        ("mla-prefixed", "model.fc.weight (100% of it), model.midlayer.self_attn.fused_qkv_a_proj_with_mqa.weight"),
        ("mla-prefixed", "took none of these 13 tensors of the checkpoint: model.fc.weight, model.layers.0.hidden"),
    ],
)
def test_a_draft_that_is_not_whole_is_refused(results: dict[str, Any], name: str, said: str) -> None:
    kind, text = of(results, name)["error"]
    assert kind == "DraftContractError"
    assert said in text
    assert f"/{name} does not fit the target" in text
    assert "SGLANG_PATCHES_DRAFT_CONTRACT=warn" in text


def test_it_is_served_when_asked_for_and_nothing_planted_is_left(results: dict[str, Any]) -> None:
    result = results["z-no-norm-no-o-warn"]
    assert result["error"] is None
    assert result["outcome"]["result"] == "failed"
    assert result["outcome"]["detail"] == "the draft does not fit, served by SGLANG_PATCHES_DRAFT_CONTRACT=warn"
    assert "filled 2 parameters" in result["outcome"]["warnings"][0]
    assert result["outcome"]["unfilled"] == [f"{LAYER}.self_attn.o_proj.weight", "model.norm.weight"]
    assert result["finite"]


def test_the_wrapper_answers_for_its_language_model_without_a_vision_tower(results: dict[str, Any]) -> None:
    answers = {key: found for key, found in results["target"].items() if key not in ("refusals", "hasattr")}
    assert answers == dict.fromkeys(answers, True)
    assert len(answers) == 8


def test_an_encoder_only_node_says_why_it_has_no_answer(results: dict[str, Any]) -> None:
    refusals = results["target"]["refusals"]
    assert refusals.pop("no_such_thing").endswith("no attribute 'no_such_thing'")
    for name, text in refusals.items():
        assert f"KimiK25ForConditionalGeneration.{name}: this node was started with --encoder-only" in text
        assert "without --encoder-only" in text
    assert results["target"]["hasattr"] == [False, False]


def test_context_parallel_prefill_runs_the_body_and_the_head_of_the_language_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.model_executor.runner import eager_runner

    class Language(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.capture_aux_hidden_states = True
            self.pp_group = SimpleNamespace(is_last_rank=True)
            self.lm_head = "head"
            self.logits_processor = lambda *given: ("logits", *given)
            # The body: hidden states, and what it captured.
            self.model = lambda ids, positions, batch, input_embeds: (input_embeds + 1, [input_embeds])

        def get_input_embeddings(self) -> Any:
            return lambda ids: ids.float()

        def forward(self, *given: Any, **named: Any) -> Any:
            raise AssertionError("the whole language model ran where its body was wanted")

    @answers_as_target
    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language_model = Language()

        @property
        def model(self) -> Any:
            return self.language_model

        def get_input_embeddings(self) -> Any:
            return self.language_model.get_input_embeddings()

    @contextlib.contextmanager
    def one_rank(embeds: Any, positions: Any, batch: Any, *ids: Any) -> Any:
        yield embeds, positions, *ids

    monkeypatch.setattr(eager_runner, "cp_shard_model_inputs", one_rank)
    monkeypatch.setattr(eager_runner, "cp_gather_after_forward", lambda states, batch, stream: states)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    runner = SimpleNamespace(model_runner=SimpleNamespace(model=Wrapper()))
    batch = SimpleNamespace(input_ids=torch.tensor([1, 2]), positions=torch.tensor([0, 1]))
    # The same path has another name in other lanes.
    names = ("_execute_extend_cp", "_execute_extend_cp_v2")
    (path,) = [getattr(eager_runner.EagerRunner, name) for name in names if hasattr(eager_runner.EagerRunner, name)]
    told, ids, hidden, head, seen, aux = path(runner, batch, {})
    assert (told, head, seen is batch, ids is batch.input_ids) == ("logits", "head", True, True)
    assert hidden.tolist() == [2.0, 3.0]
    assert [state.tolist() for state in aux] == [[1.0, 2.0]]
