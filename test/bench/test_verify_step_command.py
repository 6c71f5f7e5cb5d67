"""bench/verify_step: what the command refuses before a folder is made or an engine started, and how it is written."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_patches.bench.verify_step import arguments, command, render, workers
from sglang_patches.errors import PatchError

from .cycles_made import made_grid, records


def test_a_folder_of_other_code_is_not_continued(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 77}')
    chosen = arguments.Chosen(tmp_path, tmp_path, dummy=False, cuda=False, grid=made_grid())
    of = records(4, "b", [2.0])
    of[0]["arguments"] = chosen.shown(4)
    command._check_same(of, chosen, [2, 4])
    of[0]["document"] = {"code": {"id": "0123456789ab"}}
    with pytest.raises(PatchError, match=r"another patch set \(4 tokens\)\n +there +0123456789ab"):
        command._check_same(of, chosen, [2, 4])
    of[0] |= {"document": None, "arguments": ["--other"]}
    with pytest.raises(PatchError, match="another server arguments"):
        command._check_same(of, chosen, [4])
    command._check_same(of, chosen, [2])  # that engine is not asked for
    of[0] |= {"arguments": chosen.shown(4), "share": "12 layers, bf16, dummy routers"}
    with pytest.raises(PatchError, match=r"another model .*\n +there +12 layers, bf16, dummy routers\n +now +a folder"):
        command._check_same(of, chosen, [2])


def test_what_cannot_be_served_here_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No share of Kimi-K2.5 without a GPU, and no folder that holds no model: told before a folder is made."""
    monkeypatch.setattr(command.selection, "has_gpu", lambda: False)
    out = tmp_path / "result"
    for model, draft, said in (
        ("", "", "--model test/models/tiny-kimi"),
        (str(tmp_path), str(tmp_path), "config.json"),
    ):
        with pytest.raises(PatchError, match=re.escape(said)):
            command.verify_step(out, model=model, draft=draft)
    assert not out.exists()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"contexts": "32,4001"}, r"--contexts 4001: .* 96 tokens .* 4097 .*\n.*--model .*tiny-kimi allows 4096"),
        ({"contexts": "4000", "tokens": 33}, "remedy     --contexts of at most 3999"),
        (
            {"contexts": "32", "server": ["--context-length", "5000"]},
            "--context-length 5000: --model .* 4096 positions",
        ),
        ({"contexts": "41000", "model": "", "draft": ""}, "the share allows 40960"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_contexts_beyond_a_models_positions_are_refused_before_any_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], said: str
) -> None:
    models = Path(__file__).parents[1] / "models"
    pair = {"model": str(models / "tiny-kimi"), "draft": str(models / "tiny-kimi-eagle3")}
    monkeypatch.setattr(command.selection, "has_gpu", lambda: True)
    monkeypatch.setattr(workers, "measure", None)
    with pytest.raises(PatchError, match=said):
        command.verify_step(tmp_path / "result", **{**pair, **asked})
    assert not (tmp_path / "result").exists()


def test_the_drafts_positions_count_where_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    target = {"text_config": {"max_position_embeddings": 2000}}
    draft = {"architectures": ["LlamaForCausalLMEagle3"], "max_position_embeddings": 1000}
    of = made_grid(contexts=[1000])
    arguments.check_positions(of, {"t": target}, [])
    with pytest.raises(PatchError, match=r"seen +d allows 1000(.|\n)*--contexts of at most 904"):
        arguments.check_positions(of, {"t": target, "d": draft}, [])
    with pytest.raises(PatchError, match="a model with more positions"):
        arguments.check_positions(of, {"t": {"max_position_embeddings": 50}}, [])
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    arguments.check_positions(of, {"t": target, "d": draft}, [])


@pytest.mark.parametrize(("option", "word"), [("weights", "fp4"), ("drawn", "trained")])
def test_an_unknown_share_is_refused_before_a_folder_is_made(tmp_path: Path, option: str, word: str) -> None:
    asked: dict[str, Any] = {option: word}
    with pytest.raises(PatchError, match=f"--{option} '{word}'\n +expected"):
        command.verify_step(tmp_path / "result", **asked)
    assert not (tmp_path / "result").exists()


def test_the_command_that_is_written_has_the_variables_that_steer_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = Path(__file__).parents[1] / "models"
    asked: list[arguments.Chosen] = []
    monkeypatch.setattr(command.selection, "has_gpu", lambda: False)
    monkeypatch.setattr(workers, "measure", lambda left, chosen, *rest: asked.append(chosen))
    monkeypatch.setattr(render, "write", lambda folder: SimpleNamespace(headline="nothing"))
    monkeypatch.setattr(sys, "argv", ["sglang-patches", "bench", "verify-step", "--out", "x"])
    monkeypatch.setenv("SGLANG_PATCHES", "-mla-verify-split-kv")
    (tmp_path / "table.md").write_text("")
    command.verify_step(
        tmp_path, model=str(models / "tiny-kimi"), draft=str(models / "tiny-kimi-eagle3"), contexts="32"
    )
    words = asked[0].command
    assert words[0] == "env"
    assert "SGLANG_PATCHES=-mla-verify-split-kv" in words[: words.index("sglang-patches")]
    assert words[-4:] == ["bench", "verify-step", "--out", "x"]


@pytest.mark.parametrize("text", ["1,x", "0", "-3", "1.5"])
def test_numbers_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(PatchError, match="--batch-sizes"):
        command._numbers(text, "--batch-sizes")
