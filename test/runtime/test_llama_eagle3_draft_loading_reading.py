"""llama-eagle3-draft-loading: a draft's configuration on its way through upstream's ``get_config``, here a stand-in."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafts import REMOVED, TARGET, write_draft

from sglang_patches.draft.refusal import CONTRACT, DraftContractError
from sglang_patches.runtime.llama_eagle3_draft_loading import model, reading
from sglang_patches.runtime.llama_eagle3_draft_loading.loading import Loading, _times


@reading.reads_drafts
def get_config(
    model: str, trust_remote_code: bool, revision: str | None = None, model_override_args: Any = None, **more: Any
) -> SimpleNamespace:
    """As upstream's: the file's keys as attributes, with the override; none without an architecture it knows."""
    raw = json.loads((Path(model) / "config.json").read_text())
    if "model_type" not in raw:
        raise ValueError(f"Unrecognized model in {model}")
    return SimpleNamespace(**{**raw, **(model_override_args or {})})


def test_a_draft_is_told_in_upstreams_words(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "a", {"architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": REMOVED})
    config = get_config(str(draft), trust_remote_code=False)
    assert (config.architectures, config.draft_vocab_size) == (["LlamaForCausalLMEagle3"], 3072)
    assert config.draft_reading["told"] == [
        "architecture Eagle3LlamaForCausalLM as LlamaForCausalLMEagle3",
        "no draft_vocab_size: 3072, the rows of its head",
    ]


def test_the_operators_override_stays(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "a", {"draft_vocab_size": REMOVED})
    config = get_config(str(draft), trust_remote_code=False, model_override_args={"draft_vocab_size": 100})
    assert config.draft_vocab_size == 100


def test_other_models_are_upstreams(tmp_path: Path) -> None:
    config = get_config(str(TARGET), trust_remote_code=False)
    assert not hasattr(config, "draft_reading")
    assert config.architectures == json.loads((TARGET / "config.json").read_text())["architectures"]


def speculators(folder: Path, kind: str = "eagle3") -> Path:
    write_draft(folder)
    layer = {"hidden_size": 256, "vocab_size": 4096, "num_hidden_layers": 1}
    raw = {"speculators_model_type": kind, "draft_vocab_size": 3072, "transformer_layer_config": layer}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_speculators_format_is_a_model_to_upstream(tmp_path: Path) -> None:
    draft = speculators(tmp_path / "s")
    config = get_config(str(draft), False, None, {"max_position_embeddings": 77})
    assert (config.model_type, config.hidden_size, config.draft_vocab_size) == ("llama", 256, 3072)
    assert (config._name_or_path, config.max_position_embeddings) == (str(draft), 77)


def test_a_draft_that_is_fetched_by_upstream_is_read_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = speculators(tmp_path / "s")
    answers = [None, draft]
    monkeypatch.setattr(reading, "local_folder", lambda *given: answers.pop(0))
    assert get_config(str(draft), trust_remote_code=False).hidden_size == 256
    # A configuration that upstream can read, as it can most: read all the same.
    angelslim = write_draft(tmp_path / "a", {"architectures": ["Eagle3LlamaForCausalLM"]})
    answers = [None, angelslim]
    assert get_config(str(angelslim), trust_remote_code=False).architectures == ["LlamaForCausalLMEagle3"]
    monkeypatch.setattr(reading, "local_folder", lambda *given: None)
    with pytest.raises(ValueError, match="Unrecognized model"):
        get_config(str(draft), trust_remote_code=False)


def test_a_format_that_is_no_eagle3_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = speculators(tmp_path / "s", "peagle")
    with pytest.raises(DraftContractError, match=r"(?s)draft .*/s cannot be loaded:.*'peagle', expected 'eagle3'"):
        get_config(str(draft), trust_remote_code=False)
    monkeypatch.setenv(CONTRACT, "warn")
    with pytest.raises(ValueError, match="Unrecognized model"):  # then upstream has the word
        get_config(str(draft), trust_remote_code=False)


def test_layers_that_nobody_would_capture_are_refused() -> None:
    told = SimpleNamespace(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4], _name_or_path="d")
    with pytest.raises(DraftContractError, match=r"names 4 layers, \[1, 2, 3, 4\], .*deepseek-v2-embedding-capture on"):
        model._check_states(told)
    told.eagle_config = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}
    model._check_states(told)
    model._check_states(SimpleNamespace(eagle_aux_hidden_state_layer_ids=[2, 6, 9]))


def test_scales_of_other_shapes_are_none() -> None:
    weight = torch.ones(200, 130).to(torch.float8_e4m3fn)
    for shape in ((), (1,), (200,), (200, 1), (2, 2)):
        widened = _times(weight, torch.full(shape, 2.0))
        assert widened is not None
        assert (widened.shape, widened.dtype) == (weight.shape, torch.bfloat16)
        assert bool((widened == 2).all())
    assert _times(weight, torch.ones(130)) is None
    assert _times(weight, torch.ones(2, 1)) is None


def a_quantized_draft() -> Any:
    """What `Loading` asks of upstream's class, with a quantization."""
    config = SimpleNamespace(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=128, draft_vocab_size=128,
    )  # fmt: skip
    return type("LlamaForCausalLMEagle3", (), {"config": config, "quant_config": object()})()


def test_a_quantized_drafts_projections_may_be_stored_as_one() -> None:
    draft = a_quantized_draft()
    loading = Loading(draft)
    packed = torch.zeros(4, 4, dtype=torch.int32)
    stems = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
    given = {f"midlayer.{stem}.{end}": packed for stem in stems for end in ("qweight", "qzeros", "scales")}
    given |= {"lm_head.qweight": packed, "fc.weight": torch.zeros(64, 192), "norm.weight": torch.ones(64)}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    given |= {f"midlayer.{norm}.weight": torch.ones(64) for norm in norms}
    assert len(list(loading.given(given.items()))) == len(given)
    assert loading.reasons() == []
    assert not hasattr(draft, "load_lm_head_from_target")
    del given["midlayer.mlp.gate_up_proj.qweight"], given["midlayer.mlp.gate_up_proj.qzeros"]
    del given["midlayer.mlp.gate_up_proj.scales"]
    loading = Loading(draft)
    list(loading.given(given.items()))
    assert "layers.0.mlp.gate_proj.weight [96, 64], layers.0.mlp.up_proj.weight [96, 64]" in loading.reasons()[0]


class Mode:
    """As much of upstream's ``ForwardMode`` as is asked."""

    def __init__(self, decode: bool) -> None:
        self.is_decode_or_idle = lambda: decode


def test_one_state_goes_through_norms_and_fc_once_extended() -> None:
    """Of the MLA class, whose ``fc`` is spread over ranks, gives a tuple, and is gathered."""
    hidden, embeds = torch.ones(5, 8), torch.zeros(5, 8)
    draft = SimpleNamespace(
        config=SimpleNamespace(), num_aux_hidden_states=2, input_norm=lambda x: x + 1,
        fc_norm=[lambda x: x * 2, lambda x: x * 3], _fc_gatherer=lambda x: torch.cat([x, x], -1),
    )  # fmt: skip
    draft.fc = type("fc", (), {"input_size": 8, "__call__": lambda self, x: (x[:, 2:6], None)})()
    extended = model.projected(draft, hidden, embeds, SimpleNamespace(forward_mode=Mode(decode=False)))
    assert extended[0].tolist() == [4, 4, 6, 6, 4, 4, 6, 6]
    decoded = model.projected(draft, hidden, embeds, SimpleNamespace(forward_mode=Mode(decode=True)))
    assert decoded is hidden
    draft.fc.input_size = 24  # upstream's own case
    assert model.projected(draft, hidden, embeds, None) is hidden
