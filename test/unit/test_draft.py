"""`sglang-patches draft check`, and what it reads drafts with: no upstream, no torch, no network."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from sglang_patches.draft import check, conventions, vocabulary
from sglang_patches.draft import keys as keys_
from sglang_patches.draft.app import app
from sglang_patches.draft.checkpoint import TensorInfo

MODELS = Path(__file__).parents[1] / "models"
TARGET, DRAFT = MODELS / "tiny-kimi", MODELS / "tiny-kimi-eagle3"


def ran(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["check", *map(str, arguments)])


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """A copy of the bundled draft's configuration, with a file of a few of its tensors."""
    (tmp_path / "config.json").write_text((DRAFT / "config.json").read_text())
    save_file({"fc.weight": torch.zeros(256, 768)}, tmp_path / "model.safetensors")
    return tmp_path


def test_the_bundled_draft_fits() -> None:
    done = ran(TARGET, DRAFT)
    assert done.exit_code == 0
    assert f"{DRAFT} fits {TARGET}" in done.output
    for fact in (
        "3 of width 256, layers [1, 5, 8] by eagle_config.eagle_aux_hidden_state_layer_ids",
        "its own, [3072, 256]",
        "3072 of the target's 4096 tokens, d2t in offsets and t2d",
        "15 (13 BF16)",
    ):
        assert fact in done.output


def test_json_tells_the_same() -> None:
    done = ran(TARGET, DRAFT, "--json")
    report = json.loads(done.output)
    assert (done.exit_code, report["fits"], report["refused"], report["warnings"]) == (0, True, [], [])
    assert report["facts"]["architecture"] == "LlamaForCausalLMEagle3"


def test_an_incomplete_draft_is_refused_with_names_and_shapes(draft: Path) -> None:
    done = ran(TARGET, draft)
    assert done.exit_code == 1
    assert f"{draft} does not fit {TARGET}" in done.output
    assert "layers.0.mlp.up_proj.weight [768, 256]" in done.output
    assert "no tensor d2t in" in done.output


def test_it_is_served_no_longer_than_its_positions() -> None:
    done = ran(TARGET, DRAFT, "--context-length", "8192")
    assert done.exit_code == 1
    assert "allows 4096 positions, but the target is served with 8192" in done.output


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "Expecting property name"), ("[1]", "a JSON list")],
)
def test_what_cannot_be_read_is_named(content: str, said: str, draft: Path) -> None:
    (draft / "config.json").write_text(content)
    done = ran(TARGET, draft)
    assert done.exit_code == 2
    assert f"{draft / 'config.json'}: {said}" in done.output


def test_a_download_that_broke_off_is_refused(draft: Path) -> None:
    whole = (DRAFT / "model.safetensors").read_bytes()
    (draft / "model.safetensors").write_bytes(whole[:-1000])
    done = ran(TARGET, draft)
    assert done.exit_code == 1
    assert f"it has {len(whole) - 1000} bytes of the {len(whole)} that its header tells of" in done.output


def test_contents_that_contradict_their_header_are_refused(draft: Path) -> None:
    whole = (DRAFT / "model.safetensors").read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    header["d2t"]["dtype"] = "I32"  # half of its bytes
    told = json.dumps(header).encode()
    (draft / "model.safetensors").write_bytes(len(told).to_bytes(8, "little") + told + whole[8 + size :])
    done = ran(TARGET, draft)
    assert (done.exit_code, done.exception.__class__) == (1, SystemExit)
    assert f"{draft / 'model.safetensors'} is no readable safetensors file" in done.output


def test_tensors_without_a_dimension_are_refused(draft: Path) -> None:
    tensors = load_file(DRAFT / "model.safetensors")
    save_file(
        {**tensors, "fc.weight": torch.tensor(1.0), "lm_head.weight": torch.tensor(1.0)}, draft / "model.safetensors"
    )
    changed(draft / "config.json", {"draft_vocab_size": None})
    done = ran(TARGET, draft)
    assert (done.exit_code, done.exception.__class__) == (1, SystemExit)
    assert "fc.weight of model.safetensors has shape [], expected [256, 768]" in done.output
    assert "lm_head.weight of model.safetensors has 0 rows" in done.output
    changed(draft / "config.json", {"eagle_config": None})
    assert "takes 0 captured states" in ran(TARGET, draft).output


def changed(file: Path, keys: dict[str, Any]) -> None:
    """Keys of a configuration set, or removed where None."""
    config = {**json.loads(file.read_text()), **keys}
    file.write_text(json.dumps({key: found for key, found in config.items() if found is not None}))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"architectures": "LlamaForCausalLMEagle3"}, "no EAGLE-3 draft known here"),
        ({"hidden_size": None}, "config.json has no hidden_size, expected an integer from 1 to"),
        ({"hidden_size": "256"}, "config.json hidden_size is '256', expected an integer from 1 to"),
        ({"hidden_size": True}, "config.json hidden_size is True, expected an integer from 1 to"),
        ({"num_hidden_layers": 10**30}, "expected an integer from 1 to 10000"),
        ({"eagle_config": [1]}, "config.json eagle_config is [1], expected an object"),
        ({"eagle_config": {keys_.IDS: 5}}, f"config.json eagle_config.{keys_.IDS} is 5, expected a list of integers"),
        ({"rope_scaling": {"factor": "4"}}, "config.json rope_scaling.factor is '4', expected a number above 0"),
    ],
)
def test_keys_of_another_kind_are_refused_by_name(keys: dict[str, Any], said: str, draft: Path) -> None:
    changed(draft / "config.json", keys)
    done = ran(TARGET, draft)
    assert (done.exit_code, done.exception.__class__) == (1, SystemExit)
    assert said in done.output


@pytest.mark.parametrize(("found", "said"), [(None, "has no vocab_size, expected"), ("x", "vocab_size is 'x', exp")])
def test_so_are_a_targets(found: str | None, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((TARGET / "config.json").read_text())
    inner = {**json.loads((TARGET / "config.json").read_text())["text_config"], "vocab_size": found}
    changed(tmp_path / "config.json", {"text_config": inner})
    done = ran(tmp_path, DRAFT)
    assert (done.exit_code, done.exception.__class__) == (1, SystemExit)
    assert "target's config.json " in done.output
    assert said in done.output


@pytest.mark.parametrize("stored", ["float16", "float32", None])
def test_a_draft_served_in_another_dtype_than_its_target_is_refused(stored: str | None, draft: Path) -> None:
    save_file(load_file(DRAFT / "model.safetensors"), draft / "model.safetensors")
    changed(draft / "config.json", {"dtype": stored})
    done = ran(TARGET, draft)
    assert done.exit_code == 1
    assert "the draft is served in float16" in done.output
    assert "the target in bfloat16, and its states are not converted: start with --dtype bfloat16" in done.output
    assert ran(TARGET, draft, "--dtype", "bfloat16").exit_code == 0


def test_a_layer_that_is_named_twice_is_captured_twice(draft: Path) -> None:
    changed(draft / "config.json", {"eagle_config": {keys_.IDS: [1, 5, 5]}})
    assert "named twice" not in ran(TARGET, draft).output


def test_a_model_that_is_not_here_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    done = ran("nobody/no-such-target", DRAFT)
    assert done.exit_code == 2
    assert "target nobody/no-such-target: no folder has that name" in done.output
    assert "remedy     hf download nobody/no-such-target" in done.output
    for path in ("./no-such-draft", str(tmp_path / "no-such-draft")):
        done = ran(TARGET, path)
        assert done.exit_code == 2
        assert "no-such-draft: there is no such folder\n" in done.output
        assert "hf download" not in done.output


def test_two_that_are_swapped_are_told_so() -> None:
    done = ran(DRAFT, TARGET)
    assert done.exit_code == 1
    assert "the target's config.json architectures is LlamaForCausalLMEagle3, an EAGLE-3 draft" in done.output
    assert "config.json architectures is KimiK25ForConditionalGeneration, a whole model" in done.output
    assert f"swap them: {TARGET} as the target, {DRAFT} as its draft" in done.output
    assert "[5, 8] are no layers" not in ran(DRAFT, DRAFT).output, "of a model that is no target"
    assert f"give the whole model that {DRAFT} was trained for as the target" in ran(DRAFT, DRAFT).output
    assert "swap" not in ran(TARGET, TARGET).output


def test_other_models_and_broken_files_are_refused(draft: Path) -> None:
    changed(draft / "config.json", {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None})
    assert "no EAGLE-3 draft known here" in ran(TARGET, draft).output
    shutil.copy(DRAFT / "config.json", draft)
    (draft / "model.safetensors").write_bytes(b"<html>" * 10)
    assert "is no readable safetensors file" in ran(TARGET, draft).output
    (draft / "model.safetensors").unlink()
    assert "has no safetensors file" in ran(TARGET, draft).output


def test_neither_upstream_nor_torch_is_imported() -> None:
    code = (
        "import sys; from sglang_patches.draft.check import inspect\n"
        f"assert inspect({str(TARGET)!r}, {str(DRAFT)!r}).fits\n"
        "print(sorted({'torch', 'sglang', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def a_vocabulary() -> tuple[vocabulary.Ids, vocabulary.Mask]:
    """The bundled draft's tokens, and ``t2d``."""
    tensors = _maps()
    return tensors["d2t"] + np.arange(3072), tensors["t2d"]


def _maps() -> dict[str, Any]:
    from sglang_patches.draft.checkpoint import read_headers

    checkpoint = read_headers(DRAFT)
    assert checkpoint is not None
    return {name: checkpoint.read(name) for name in ("d2t", "t2d")}


def test_both_forms_of_d2t_are_told_apart() -> None:
    ids, mask = a_vocabulary()
    offsets = ids - np.arange(len(ids))
    for known in (mask, None):
        assert vocabulary.form(offsets, known, 4096) == "offsets"
        assert vocabulary.form(ids, known, 4096) == "token ids"
    # Token ids so low that they are a vocabulary as offsets, too: by the mask, and by rising at every step.
    low = np.arange(1000)
    marked = np.zeros(4096, bool)
    marked[low] = True
    assert vocabulary.form(low, marked, 4096) == "token ids"
    assert vocabulary.form(low, None, 4096) == "token ids"
    marked = np.zeros(4096, bool)
    marked[2 * low] = True
    assert vocabulary.form(low, marked, 4096) == "offsets"
    # A whole vocabulary: all zero, or counting.
    assert vocabulary.form(np.zeros(4096, np.int64), None, 4096) == "offsets"
    assert vocabulary.form(np.arange(4096), None, 4096) == "token ids"


def test_a_vocabulary_that_is_none_is_refused_as_offsets() -> None:
    wrong = np.array([5, 5, 9000])
    assert vocabulary.form(wrong, None, 4096) == "offsets"
    found = list(vocabulary.findings(wrong, None, 4096, "d2t", "offsets"))
    assert found[0][0]
    assert "to 9002, but the target has ids 0 to 4095" in found[0][1]


@pytest.mark.parametrize(("entries", "refuse"), [(9, True), (10, False), (30, False)])
def test_a_mask_of_another_length_must_hold_every_token(entries: int, refuse: bool) -> None:
    ids = np.array([1, 4, 9])
    found = list(vocabulary.findings(ids, np.ones(entries, bool), 20, "d2t", "token ids"))
    assert found == [(refuse, f"tensor t2d has {entries} entries, but the target's vocab_size is 20")]


def test_speculators_sizes_come_from_the_layer_and_its_defaults() -> None:
    raw = {
        "speculators_model_type": "eagle3", "draft_vocab_size": 32000, "eagle_aux_hidden_state_layer_ids": [2, 30, 58],
        "transformer_layer_config": {"model_type": "llama", "hidden_size": 7168, "num_hidden_layers": 1},
    }  # fmt: skip
    reading = conventions.read_config(raw, None)
    assert reading.refused == []
    wanted = {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 7168, "num_hidden_layers": 1,
        "intermediate_size": 11008, "num_aux_hidden_states": 3, "norm_before_residual": True,
        "draft_vocab_size": 32000, "speculators_model_type": "eagle3",
    }  # fmt: skip
    assert {key: reading.config[key] for key in wanted} == wanted


def test_without_headers_only_keys_are_read() -> None:
    raw = {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 4096}
    assert conventions.read_config(raw, None).changed == {"draft_vocab_size": None}
    head = {"lm_head.weight": TensorInfo("BF16", (4096, 256), Path())}
    assert conventions.read_config(raw, head).changed == {"draft_vocab_size": 4096}


def test_a_head_in_the_file_counts_more_than_tied_embeddings() -> None:
    raw = {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 4096, "tie_word_embeddings": True}
    head = {"lm_head.weight": TensorInfo("BF16", (3072, 256), Path())}
    assert conventions.read_config(raw, head).changed == {"tie_word_embeddings": False, "draft_vocab_size": 3072}
    assert conventions.read_config(raw, {}).changed == {"draft_vocab_size": 4096}


def test_a_quantized_head_is_a_head() -> None:
    raw = {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 4096, "draft_vocab_size": 4096}
    assert conventions.read_config(raw, {}).changed == {"draft_vocab_size": None}
    quantized = {"lm_head.qweight": TensorInfo("I32", (32, 4096), Path())}
    assert conventions.read_config(raw, quantized).changed == {}


def test_post_norm_states_as_tensorrt_llm_names_them() -> None:
    raw = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {"return_hidden_post_norm": True}}
    assert conventions.read_config({**raw, "draft_vocab_size": 9}, None).changed == {"norm_output": True}


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        ("midlayer.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("midlayer.2.mlp.up_proj.weight", "layers.2.mlp.up_proj.weight"),
        ("model.layers.0.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        ("aux_norm_mid.weight", "fc_norm.1.weight"),
        ("layers.0.self_attn.fused_qkv_a_proj.weight", "layers.0.self_attn.fused_qkv_a_proj_with_mqa.weight"),
        ("decoder.midlayer.fc.weight", "decoder.midlayer.fc.weight"),
    ],
)
def test_names(stored: str, wanted: str) -> None:
    assert conventions.canonical(stored) == wanted


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 16384),
        (
            {"max_position_embeddings": 4096,
             "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}}, 4096,
        ),
        ({}, 2048),
    ],
)  # fmt: skip
def test_positions_are_counted_as_upstream_does(config: dict[str, Any], wanted: int) -> None:
    assert check.positions(config) == wanted
