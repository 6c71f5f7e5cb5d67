"""What the commands that start servers read from their command line."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_patches.bench import options
from sglang_patches.bench.progress import Progress
from sglang_patches.bench.turns import Setup

REPO = Path(__file__).resolve().parents[2]


def setup(model: str, draft: str | None, **changed: Any) -> Setup:
    given: dict[str, Any] = {
        "tp": 1, "server_args": None, "prompts": 1, "prompt_tokens": 0, "vocabulary": 0, "workload_file": None,
        "output_tokens": 8, "concurrency": 1, "warm_up": 0, "seed": 0, "ready_timeout": 1, "turn_timeout": 1,
    }  # fmt: skip
    return options.setup("x", model=model, draft=draft, **{**given, **changed})


def made(model: str, draft: str | None) -> str:
    return setup(model, draft).draft


def test_the_command_as_typed_has_the_variables_that_steer_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_AT_START", {"HOME": "/root"})
    monkeypatch.setattr(sys, "argv", ["/bin/sglang-patches", "bench", "ab", "--a", "default"])
    assert options.typed() == ["sglang-patches", "bench", "ab", "--a", "default"]
    monkeypatch.setattr(options, "_AT_START", {"SGLANG_PATCHES": "-strict-api", "SGLANG_API_KEY": "hunter2"})
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "/set/by/upstream")
    assert options.typed()[:3] == ["env", "SGLANG_PATCHES=-strict-api", "sglang-patches"]


@pytest.mark.parametrize(("asked", "flying", "wanted"), [(0, 8, 0), (4, 8, 8), (4, 1, 4), (4, 4, 4)])
def test_a_warm_up_has_as_many_requests_as_are_in_flight(asked: int, flying: int, wanted: int) -> None:
    made = setup(str(REPO / options.MODEL), "", warm_up=asked, concurrency=flying)
    assert made.workload.warm_up == wanted


@pytest.mark.parametrize(
    "spelled", [options.MODEL, options.MODEL + "/", "./" + options.MODEL, str(REPO / options.MODEL)]
)
def test_the_bundled_model_has_its_draft_however_it_is_spelled(spelled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    assert made(spelled, None) == "test/models/tiny-kimi-eagle3"
    assert made(spelled, "") == ""
    assert made(os.path.relpath(REPO / "test/models/tiny-kimi-eagle3"), None) == ""


def test_a_servers_words_are_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Progress() as progress:
        progress.begin("turn 0")
        progress.phase("requests failed: [/usr] no such place")
        assert progress._bar is not None
        progress._bar.refresh()
