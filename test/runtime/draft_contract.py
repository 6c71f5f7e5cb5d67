"""The draft contract of an edited draft with the bundled target: what it refuses and what it remarks on."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.utils.hf_transformers_utils import get_config

from sglang_patches import lane
from sglang_patches.draft.contract import Pair, check
from sglang_patches.runtime import _outcome
from sglang_patches.runtime.kimi_k25_eagle3_delegation import alarm, settings, startup

Config = dict[str, Any]


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has checked nothing yet, without settings."""
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


def ids(*numbers: int) -> Config:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(numbers), "use_aux_hidden_state": True}}
