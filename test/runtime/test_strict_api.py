"""strict-api: which model names pass. The served endpoints are tested in e2e/test_api.py."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, ResponsesRequest
from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
from sglang.srt.managers.io_struct import GenerateReqInput

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


MANAGER: Any = SimpleNamespace(model_config=SimpleNamespace(vocab_size=100), tokenizer=["token"] * 120)


def generate(**fields: Any) -> GenerateReqInput:
    return GenerateReqInput(**{"text": None, "sampling_params": {}, **fields})


@pytest.mark.parametrize("ids", [[0, 99], [5] * 1000])
def test_token_ids_of_the_vocabulary_pass(ids: list[int]) -> None:
    strict_api.check_token_ids(MANAGER, generate(input_ids=ids), ids)


@pytest.mark.parametrize(("ids", "seen"), [([5, 100], "100"), ([-1, 5], "-1"), ([10**12], str(10**12))])
def test_other_token_ids_are_named(ids: list[int], seen: str) -> None:
    with pytest.raises(ValueError, match=rf"token id {seen}; .* 0 to 99"):
        strict_api.check_token_ids(MANAGER, generate(input_ids=ids), ids)


def test_placeholders_of_images_may_lie_beyond_the_embedding_but_not_beyond_the_tokenizer() -> None:
    strict_api.check_token_ids(MANAGER, generate(input_ids=[5, 119], image_data=["x"]), [5, 119])
    with pytest.raises(ValueError, match="0 to 119"):
        strict_api.check_token_ids(MANAGER, generate(input_ids=[5, 120], image_data=["x"]), [5, 120])


def test_a_prompt_without_tokens_is_refused_and_embeddings_need_none() -> None:
    with pytest.raises(ValueError, match="empty"):
        strict_api.check_token_ids(MANAGER, generate(text=""), [])
    strict_api.check_token_ids(MANAGER, generate(input_embeds=[[0.5]]), None)


GOOD: list[dict[str, Any]] = [
    {"sampling_params": None},
    {
        "sampling_params": {
            "n": 2,
            "top_k": -1,
            "stop_token_ids": [0, 99],
            "logit_bias": {"5": -100},
            "stop_regex": "a+",
        }
    },
    {"top_logprobs_num": 100},
    {"top_logprobs_num": [0, 5], "text": ["a", "b"], "rid": ["1", "2"]},
]


@pytest.mark.parametrize("fields", GOOD)
def test_what_the_server_can_do_passes(fields: dict[str, Any]) -> None:
    strict_api.check_request(MANAGER, generate(**fields))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"sampling_params": {"n": 0}}, "n is 0"),
        ({"sampling_params": [{"n": 1}, {"n": -3}], "text": ["a", "b"]}, "n is -3"),
        ({"sampling_params": {"top_k": 2**40}}, "top_k is"),
        ({"sampling_params": {"stop_token_ids": [5, 100]}}, "stop_token_ids holds 100"),
        ({"sampling_params": {"logit_bias": {"5": -1e39}}}, "logit_bias of token 5"),
        ({"sampling_params": {"logit_bias": {"5": float("nan")}}}, "logit_bias of token 5"),
        ({"sampling_params": {"stop_regex": ["a", "("]}}, "no regular expression"),
        ({"top_logprobs_num": 101}, "101 top log-probabilities"),
        ({"top_logprobs_num": [5, -2]}, "-2 top log-probabilities"),
        ({"text": "one", "rid": ["a", "b"]}, "rid is a list of 2"),
    ],
)
def test_what_would_end_the_server_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        strict_api.check_request(MANAGER, generate(**fields))


@pytest.mark.parametrize("body", [[1, 2], "text", 5])
@pytest.mark.parametrize("request_type", [ChatCompletionRequest, CompletionRequest, ResponsesRequest])
def test_a_body_of_the_wrong_type_is_a_validation_error(request_type: Any, body: Any) -> None:
    with pytest.raises(ValidationError):
        request_type.model_validate(body)


def test_a_validators_own_verdict_stays() -> None:
    with pytest.raises(ValidationError, match="invalid reasoning effort"):
        ChatCompletionRequest.model_validate({"messages": [], "reasoning": {"effort": "giant"}})


WRONG_TYPES = [
    ({"logit_bias": {"5": "x"}}, "logit_bias"),
    ({"logit_bias": {"5": None}}, "logit_bias"),
    ({"logit_bias": [1, 2]}, "logit_bias"),
    ({"top_k": 1e12}, "top_k"),
    ({"max_new_tokens": 3.5}, "max_new_tokens"),
    ({"max_new_tokens": True}, "max_new_tokens"),
    ({"min_new_tokens": "3"}, "min_new_tokens"),
    ({"stop_token_ids": ["999999"]}, "stop_token_ids"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 1e39}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"repetition_penalty": 1e-40}, "repetition_penalty"),
    ({"n": 1.5}, "n is 1.5"),
    ({"n": 10**8}, "n is 100000000"),
    ({"stop": 5}, "stop"),
    ({"stop_regex": "a{99999999999999}"}, "stop_regex"),
    ({"stop_regex": 7}, "stop_regex"),
]


@pytest.mark.parametrize(("params", "named"), WRONG_TYPES)
def test_sampling_parameters_of_a_wrong_type_or_size_are_named(params: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        strict_api.check_request(MANAGER, generate(text="x", sampling_params=params))


def test_every_sampling_parameter_may_have_its_default() -> None:
    from sglang.srt.sampling.sampling_params import SamplingParams

    defaults = SamplingParams()
    params = {name: getattr(defaults, name) for name in strict_api._sampling_types()}
    params |= {"logit_bias": {"5": 1}, "stop": ["a"], "stop_token_ids": [7, 8], "temperature": 1, "top_k": -1}
    strict_api.check_request(MANAGER, generate(text="x", sampling_params=params))


def test_a_pattern_longer_than_upstream_takes_is_left_to_its_refusal() -> None:
    strict_api.check_request(MANAGER, generate(text="x", sampling_params={"stop_regex": "(" * 100_000}))
