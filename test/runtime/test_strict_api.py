"""strict-api: which model names pass. The served endpoints are tested in e2e/test_api.py."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase

from sglang_patches.runtime import strict_api

SERVED = SimpleNamespace(served_model_name="s3://bucket/tiny", model_path="/models/tiny")


class Serving(OpenAIServingBase):
    """Upstream's base class without what only a running server has."""

    def __init__(self) -> None:
        self.tokenizer_manager = SERVED  # type: ignore[assignment]

    def _request_id_prefix(self) -> str:
        return ""

    def _convert_to_internal_request(self, request: Any, raw_request: Any = None) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    "model", ["s3://bucket/tiny", "/models/tiny", "s3://bucket/tiny:adapter", "/models/tiny:adapter", "default"]
)
def test_served_names_pass(model: str) -> None:
    request = CompletionRequest(model=model, prompt="x")
    assert strict_api.refusal(Serving(), request) is None


def test_no_name_passes() -> None:
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}])
    assert strict_api.refusal(Serving(), request) is None


@pytest.mark.parametrize("model", ["gpt-4o", "", "tiny", "s3://bucket/tiny2", "other:adapter", "s3:adapter"])
def test_other_names_get_404_naming_what_is_served(model: str) -> None:
    response = strict_api.refusal(Serving(), CompletionRequest(model=model, prompt="x"))
    assert response is not None
    assert response.status_code == 404
    body = json.loads(bytes(response.body))
    assert repr(model) in body["message"]
    assert "s3://bucket/tiny" in body["message"]
    assert body["param"] == "model"
