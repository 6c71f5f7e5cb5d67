"""deepseek-v2-embedding-capture: what draft and target are told at start, what is refused there, and the order."""

from __future__ import annotations

import inspect
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer_id_keys import CONVENTION, IDS, KEY, SPECULATORS
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.moe import utils as moe_utils
from sglang.srt.model_executor.model_runner_components import spec_aux_hidden_state as spec_aux
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import SpecAuxHiddenStateConfig
from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM, DeepseekV2Model
from sglang.srt.models.kimi_k25_eagle3 import _get_eagle_aux_layer_count
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.speculative.eagle_utils import get_draft_input_from_target_hidden_dim
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_patches.runtime import _outcome
from sglang_patches.runtime import deepseek_v2_embedding_capture as capture
from sglang_patches.runtime.deepseek_v2_embedding_capture.collector import ListOrderPacker
from sglang_patches.runtime.deepseek_v2_embedding_capture.layer_ids import LayerIdError, LayerIds, Request

HERE = Path(__file__).parent
DRAFT = HERE.parent / "models/tiny-kimi-eagle3"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_outcome, "_recorded", {})
    monkeypatch.delenv(IDS, raising=False)
    monkeypatch.delenv(CONVENTION, raising=False)


def model_config(tmp_path: Path, override: Any = None, **changes: Any) -> ModelConfig:
    """Upstream's configuration of the tiny draft with ``changes`` to its config.json (None removes a key)."""
    config = json.loads((DRAFT / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    # Upstream remembers what it read from a folder.
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig(
        str(folder),
        is_draft_model=True,
        speculative_algorithm="EAGLE3",
        model_override_args=json.dumps(override or {}),
    )


def states_taken(config: ModelConfig) -> set[int]:
    """How many captured states upstream sizes the draft and its buffers for, by each of its own rules."""
    hf, algorithm = config.hf_config, SpeculativeAlgorithm.from_string("EAGLE3")
    runner: Any = SimpleNamespace(model_config=config, spec_algorithm=algorithm)
    llama = len(hf.eagle_config[KEY])  # models/llama_eagle3.py reads nothing but the nested key
    return {llama, _get_eagle_aux_layer_count(hf), get_draft_input_from_target_hidden_dim(runner) // 256}


def test_every_size_of_the_draft_follows_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nested = model_config(tmp_path, eagle_config={KEY: [-1, 3, 5, 8]})
    assert states_taken(nested) == {4}
    top = model_config(tmp_path, eagle_config=None, **{KEY: [-1, 3, 5, 8]})
    assert top.hf_config.eagle_config == {KEY: [-1, 3, 5, 8]}
    assert states_taken(top) == {4}
    override = model_config(tmp_path, {KEY: [-1, 5, 8]})
    assert override.hf_config.eagle_config == {KEY: [-1, 5, 8], "use_aux_hidden_state": True}
    assert states_taken(override) == {3}
    monkeypatch.setenv(IDS, "0,1,2")
    assert model_config(tmp_path).hf_config.eagle_config[KEY] == [0, 1, 2]
    target = ModelConfig(str(DRAFT), speculative_algorithm="EAGLE3")
    assert target.hf_config.eagle_config[KEY] == [1, 5, 8], "only a draft is changed"


def test_a_list_of_another_length_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IDS, "-1,3,5,8")
    with pytest.raises(LayerIdError, match=rf"{IDS} names 4 layers, .*but the draft takes 3 hidden states.*Name 3"):
        model_config(tmp_path)
    monkeypatch.delenv(IDS)
    with pytest.raises(LayerIdError, match=r"takes 2 hidden states \(by the draft's num_aux_hidden_states\)"):
        model_config(tmp_path, num_aux_hidden_states=2)


def attach(request: Request | None, architecture: str, layers: int = 12, **changes: Any) -> SpecAuxHiddenStateConfig:
    config = SpecAuxHiddenStateConfig(eagle_use_aux_hidden_state=True, **changes)
    told = SimpleNamespace() if request is None else SimpleNamespace(aux_layer_request=request)
    target = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=[architecture]),
        hf_text_config=SimpleNamespace(num_hidden_layers=layers),
    )
    capture.attach(config, told, target)
    return config


def test_a_bad_list_is_refused_before_weights_are_read() -> None:
    with pytest.raises(LayerIdError, match=r"layer id 60 .*output of the last layer"):
        attach(Request((1, 29, 60), "the draft's", "layer-output"), "KimiK25ForConditionalGeneration", 61)


def resolved_by_upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, **changes: Any) -> Any:
    """What the target is told by upstream's own `_resolve_eagle_aux_hidden_state`, ``changes`` made to the draft."""
    drafted = model_config(tmp_path, **changes)
    target = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=[architecture]), hf_text_config=SimpleNamespace(num_hidden_layers=12)
    )
    # Some lanes ask it for the target too, and read the arguments themselves where others have `get_spec`.
    made = {True: drafted, False: target}
    monkeypatch.setattr(
        ModelConfig, "from_server_args", lambda *_, is_draft_model=False, **__: made[bool(is_draft_model)]
    )
    arguments = SimpleNamespace(speculative_draft_model_path=str(tmp_path), speculative_draft_model_revision=None)
    monkeypatch.setattr(spec_aux, "get_spec", lambda: arguments, raising=False)
    config = SpecAuxHiddenStateConfig()
    given: dict[str, Any] = {
        "config": config,
        "server_args": arguments,
        "model_config": target,
        "spec_algorithm": SpeculativeAlgorithm.from_string("EAGLE3"),
        "is_draft_worker": False,
    }
    resolve_config: Any = spec_aux._resolve_eagle_aux_hidden_state
    resolve_config(**{name: given[name] for name in inspect.signature(resolve_config).parameters})
    return config


def layers_of_llama(ids: list[int] | None, layers: int = 12) -> list[int]:
    """The layers that upstream's Llama captures when it is told ``ids``."""
    llama: Any = SimpleNamespace(
        pp_group=SimpleNamespace(is_last_rank=True),
        config=SimpleNamespace(num_hidden_layers=layers),
        model=SimpleNamespace(),
    )
    LlamaForCausalLM.set_eagle3_layers_to_capture(llama, ids)
    return llama.model.layers_to_capture


def test_another_kind_of_target_is_told_what_upstream_alone_would_tell_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama adds 1 to every id, so a list of layer inputs (vLLM's, at top level) must not reach it."""
    config = resolved_by_upstream(
        tmp_path, monkeypatch, "LlamaForCausalLM", eagle_config=None, **{KEY: [2, 6, 9]}, **SPECULATORS
    )
    assert config.eagle_aux_hidden_state_layer_ids is None
    assert layers_of_llama(config.eagle_aux_hidden_state_layer_ids) == [2, 6, 9]
    assert _outcome.outcomes()[capture.PATCH]["result"] == "not needed"
    nested = resolved_by_upstream(tmp_path, monkeypatch, "LlamaForCausalLM", **{KEY: [2, 6, 9]})
    assert type(nested.eagle_aux_hidden_state_layer_ids) is list
    assert layers_of_llama(nested.eagle_aux_hidden_state_layer_ids) == [2, 6, 9], "the nested key is [1, 5, 8]"
    monkeypatch.setenv(IDS, "3,4,5")
    asked = resolved_by_upstream(tmp_path, monkeypatch, "LlamaForCausalLM")
    assert asked.eagle_aux_hidden_state_layer_ids == [3, 4, 5], "the operator counts as the target does"


def test_layers_that_another_kind_of_target_would_not_capture_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LayerIdError, match=r"names 4 layers, .* for LlamaForCausalLM and captures 3 layers of its own"):
        resolved_by_upstream(tmp_path, monkeypatch, "LlamaForCausalLM", eagle_config=None, **{KEY: [2, 4, 6, 9]})


def test_a_draft_without_captured_states_is_let_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ModelOpt writes it: no states, so an empty list."""
    config = resolved_by_upstream(
        tmp_path,
        monkeypatch,
        "KimiK25ForConditionalGeneration",
        eagle_config={"use_aux_hidden_state": False, KEY: []},
    )
    assert config.eagle_use_aux_hidden_state is False
    assert _outcome.outcomes()[capture.PATCH]["result"] == "not needed"


def test_two_keys_that_disagree_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"eagle_config": {KEY: [1, 5, 8]}, KEY: [2, 6, 8]}
    config = resolved_by_upstream(tmp_path, monkeypatch, "KimiK25ForConditionalGeneration", **changes)
    told = "is [1, 5, 8] but the draft's eagle_aux_hidden_state_layer_ids is [2, 6, 8], other layers"
    assert [told in message for message in caplog.messages] == [True]
    DeepseekV2ForCausalLM.set_eagle3_layers_to_capture(Target(), config.eagle_aux_hidden_state_layer_ids)
    assert told in _outcome.outcomes()[capture.PATCH]["remark"]


def test_every_target_that_inherits_the_setter_is_known() -> None:
    heirs = {
        name
        for name, found in ModelRegistry.models.items()
        if issubclass(found, DeepseekV2ForCausalLM) and not name.endswith(("NextN", "Eagle"))  # drafts
    }
    assert heirs == capture._TARGETS - {"KimiK25ForConditionalGeneration"}
    assert hasattr(DeepseekV2ForCausalLM.set_eagle3_layers_to_capture, "__wrapped__")


class Target:
    """A `DeepseekV2ForCausalLM` without weights, as its setter sees it."""

    def __init__(self, layers: int = 12, stages: int = 1, stage: int = 0, dense: int = 1) -> None:
        self.config = SimpleNamespace(num_hidden_layers=layers)
        self.pp_group = SimpleNamespace(world_size=stages, is_last_rank=stage == stages - 1)
        self.capture_aux_hidden_states = False
        self.model = torch.nn.Module.__new__(DeepseekV2Model)
        torch.nn.Module.__init__(self.model)
        self.model.first_k_dense_replace = dense
        self.model.layers_to_capture = []

    def set(self, *ids: int, convention: str | None = "layer-output") -> None:
        request = Request(ids, "the test", convention, "the test")  # type: ignore[arg-type]
        DeepseekV2ForCausalLM.set_eagle3_layers_to_capture(self, LayerIds(request))


def test_resolved_layers_are_recorded_and_logged_by_number_and_name(caplog: pytest.LogCaptureFixture) -> None:
    target = Target()
    with caplog.at_level(logging.INFO, logger="sglang_patches"):
        target.set(-1, 5, 8)
    assert target.capture_aux_hidden_states
    assert target.model.layers_to_capture == [0, 6, 9]
    told = _outcome.outcomes()[capture.PATCH]
    names = ["embedding output", "output of layer 5", "output of layer 8"]
    assert told == {
        "result": "applied",
        "detail": "captures embedding output, output of layer 5, output of layer 8",
        "ids": [-1, 5, 8],
        "convention": "layer-output",
        "decided_by": "the test",
        "layers": names,
        "layer_inputs": [0, 6, 9],
        "guessed": False,
    }
    assert "captures embedding output, output of layer 5, output of layer 8 ids=[-1, 5, 8]" in caplog.text


def test_a_guess_is_told_with_the_other_reading(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="sglang_patches"):
        Target().set(2, 6, 9, convention=None)
    told = _outcome.outcomes()[capture.PATCH]
    assert told["guessed"]
    assert told["layers"] == ["output of layer 1", "output of layer 5", "output of layer 8"]
    assert told["other_reading"] == ["output of layer 2", "output of layer 6", "output of layer 9"]
    assert "a guess by upstream's rule" in caplog.text
    assert f"set {CONVENTION}" in caplog.text


@pytest.mark.parametrize("ids", [None, [1, 5, 8], [2, 6, 9], [0, 6, 9]])
def test_a_plain_list_is_read_by_upstreams_rule(ids: list[int] | None) -> None:
    """Also upstream's own ``--return-aux-hidden-state-layer-ids``."""
    ours, upstreams = Target(), Target()
    DeepseekV2ForCausalLM.set_eagle3_layers_to_capture(ours, ids)
    DeepseekV2ForCausalLM.set_eagle3_layers_to_capture.__wrapped__(upstreams, ids)  # type: ignore[attr-defined]
    assert ours.model.layers_to_capture == upstreams.model.layers_to_capture


def test_two_batch_overlap_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_utils, "is_tbo_enabled", lambda: True)
    with pytest.raises(LayerIdError, match=r"^output of layer 5 cannot be captured with --enable-two-batch-overlap"):
        Target(dense=3).set(-1, 1, 5)
    Target(dense=3).set(-1, 0, 1)  # layers before the first sparse one are not split


def test_layers_of_an_earlier_pipeline_rank_are_refused_on_every_rank() -> None:
    for stage in (0, 1):
        with pytest.raises(LayerIdError, match=r"embedding output cannot be .*--pp-size 2.*layers 6 to 11"):
            Target(stages=2, stage=stage).set(-1, 6, 8)
    last = Target(stages=2, stage=1)
    last.set(5, 6, 8)
    assert last.model.layers_to_capture == [6, 7, 9]
    first = Target(stages=2, stage=0)
    first.set(5, 6, 8)
    assert first.model.layers_to_capture == []


def test_an_order_that_the_model_cannot_keep_is_refused() -> None:
    class Other(DeepseekV2Model):
        def forward(self) -> None:  # type: ignore[override]
            """Of its own."""

    target = Target()
    target.model.__class__ = Other
    with pytest.raises(LayerIdError, match=r"the order of the ids \[8, -1\] cannot be kept by Other"):
        target.set(8, -1)
    target.set(-1, 8)


def test_another_list_replaces_the_order() -> None:
    target, untouched = Target(), object()
    target.set(8, -1, 8)
    assert isinstance(capture.collector_for(target.model, untouched), ListOrderPacker)
    target.set(-1, 8)
    assert capture.collector_for(target.model, untouched) is untouched
    assert capture.collector_for(SimpleNamespace(), untouched) is untouched


@given(layers=st.lists(st.integers(0, 11), min_size=1, max_size=6), tokens=st.integers(1, 5))
def test_states_stand_where_the_list_names_them(layers: list[int], tokens: int) -> None:
    states = {layer: torch.full((tokens, 3), float(layer)) for layer in layers}
    packer = ListOrderPacker(layers)
    for layer in sorted(states):
        assert len(packer) < len(layers)
        getattr(packer, "capture", packer.append)(states[layer])
        states[layer] = states[layer].clone()
    assert torch.equal(packer.finalize(), torch.cat([states[layer] for layer in layers], dim=-1))


def test_a_state_that_never_came_is_an_error() -> None:
    packer = ListOrderPacker([3, 0, 3])
    getattr(packer, "capture", packer.append)(torch.zeros(1, 2))
    with pytest.raises((RuntimeError, AssertionError), match="captured 1 of 3"):
        packer.finalize()


def test_a_target_that_cannot_serve_the_list_does_not_start(tmp_path: Path) -> None:
    """The real `ModelRunner`, which would have failed at the first request."""
    command = [sys.executable, str(HERE / "captured_states.py"), "1", str(tmp_path), "1"]
    environ = os.environ | {IDS: "1,5,11"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environ)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "LayerIdError: layer id 11 of [1, 5, 11]" in last, done.stderr[-2000:]
    assert "Loading" not in done.stderr, "weights were read before the list was checked"
