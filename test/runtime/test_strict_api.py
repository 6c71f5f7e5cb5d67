"""strict-api: each check alone. Whole requests are in test_strict_api_http.py, a served model in e2e/test_api.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.responses import StreamingResponse
from pydantic import ValidationError
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
)
from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.utils.common import ImageData

from sglang_patches.runtime import strict_api
from sglang_patches.runtime.strict_api import answers, media, requests

SERVED = SimpleNamespace(
    served_model_name="s3://bucket/tiny",
    model_path="/models/tiny",
    model_config=SimpleNamespace(vocab_size=100),
    tokenizer=["token"] * 120,
)


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


MANAGER: Any = SimpleNamespace(
    model_config=SimpleNamespace(vocab_size=100, is_multimodal=True), tokenizer=["token"] * 120, mm_processor=None
)


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
    {"rid": "HEALTH_CHECK_1", "input_ids": [0], "log_metrics": False},
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
        ({"sampling_params": {"n": None}}, "n is null"),
        ({"sampling_params": {"top_k": 2**40}}, "top_k is"),
        ({"sampling_params": {"top_k": 0}}, r"top_k is 0; it must be -1 .* between 1 and"),
        ({"sampling_params": {"repetition_penalty": 1000}}, "between 0.001 and 2"),
        ({"sampling_params": {"stop": ""}}, "stop holds an empty string"),
        ({"sampling_params": {"stop": ["a", ""]}}, "stop holds an empty string"),
        ({"sampling_params": {"custom_params": 5}}, "custom_params is 5"),
        ({"text": "x", "input_ids": [5]}, "Both text and input_ids"),
        ({"text": "x", "positional_embed_overrides": 5}, "positional_embed_overrides"),
        ({"sampling_params": {"stop_token_ids": [5, 100]}}, "stop_token_ids holds 100"),
        ({"sampling_params": {"logit_bias": {"5": -1e39}}}, "logit_bias of token 5"),
        ({"sampling_params": {"logit_bias": {"5": float("nan")}}}, "logit_bias of token 5"),
        ({"sampling_params": {"stop_regex": ["a", "("]}}, "no regular expression"),
        ({"top_logprobs_num": 101}, "101 top log-probabilities"),
        ({"top_logprobs_num": [5, -2]}, "-2 top log-probabilities"),
        ({"text": "one", "rid": ["a", "b"]}, "rid is a list of 2"),
        ({"text": "one", "rid": "HEALTH_CHECK_1"}, "server's own"),
        ({"text": ["a", "b"], "rid": ["a", "HEALTH_CHECK_1"]}, "server's own"),
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
    ({"seed": 5}, "'seed'"),
    ({"": None}, "''"),
]


@pytest.mark.parametrize(("params", "named"), WRONG_TYPES)
def test_sampling_parameters_of_a_wrong_type_or_size_are_named(params: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        strict_api.check_request(MANAGER, generate(text="x", sampling_params=params))


def test_every_sampling_parameter_may_have_its_default() -> None:
    from sglang.srt.sampling.sampling_params import SamplingParams

    defaults = SamplingParams()
    params = {name: getattr(defaults, name) for name in requests._sampling_types()}
    params |= {"custom_params": {"a": 1}, "watermark": None}
    params |= {"logit_bias": {"5": 1}, "stop": ["a"], "stop_token_ids": [7, 8], "temperature": 1, "top_k": -1}
    strict_api.check_request(MANAGER, generate(text="x", sampling_params=params))


def test_a_pattern_longer_than_upstream_takes_is_left_to_its_refusal() -> None:
    strict_api.check_request(MANAGER, generate(text="x", sampling_params={"stop_regex": "(" * 100_000}))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"text": "a", "sampling_params": [{}]}, "sampling_params is a list of 1, but there is one prompt"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params has a value for 1 prompts, but there are 2"),
        ({"text": ["a", "b"], "sampling_params": []}, "wrong type or length"),
        ({"text": "a", "sampling_params": {"n": None}}, "wrong type or length"),
        ({"text": "a", "return_logprob": [True]}, "return_logprob is a list"),
        ({"text": ["a", "b"], "top_logprobs_num": [1, 2, 3]}, "top_logprobs_num has a value for 3"),
        ({"text": [], "sampling_params": {}}, "list of prompts is empty"),
    ],
)
def test_lists_of_another_length_than_prompts_are_named(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        GenerateReqInput(**fields).normalize_batch_and_arguments()


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "a"},
        {"text": "a", "sampling_params": {"n": 3}, "return_logprob": True},
        {"text": ["a", "b"], "sampling_params": {"n": 2}},
        {"text": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 2}]},
        {"text": ["a", "b"], "sampling_params": [{}, {}], "top_logprobs_num": [1, 2], "return_logprob": [True, False]},
        {"input_ids": [[1], [2]], "rid": ["a", "b"]},
    ],
)
def test_lists_of_the_right_length_pass(fields: dict[str, Any]) -> None:
    GenerateReqInput(**fields).normalize_batch_and_arguments()


@pytest.mark.parametrize(
    ("request_type", "fields", "told"),
    [
        (CompletionRequest, {"best_of": 3}, "best_of is 3 and n is 1"),
        (CompletionRequest, {"best_of": 1, "n": 2}, "best_of is 1 and n is 2"),
        (CompletionRequest, {"suffix": "end"}, "suffix"),
        (ChatCompletionRequest, {"top_logprobs": 2}, "top_logprobs is 2"),
        (ChatCompletionRequest, {"max_tokens": 0}, "max_tokens is 0"),
        (ChatCompletionRequest, {"max_completion_tokens": 0}, "max_completion_tokens is 0"),
        (DetokenizeRequest, {"tokens": [5, -1]}, "token id -1; .* 0 to 119"),
        (DetokenizeRequest, {"tokens": [[5], [120]]}, "token id 120"),
    ],
)
def test_what_is_not_done_is_refused(request_type: Any, fields: dict[str, Any], told: str) -> None:
    base: dict[Any, Any] = {
        CompletionRequest: {"prompt": "x"},
        ChatCompletionRequest: {"messages": [{"role": "user", "content": "x"}]},
    }
    with pytest.raises(ValueError, match=told):
        strict_api.refusal(Serving(), request_type(**base.get(request_type, {}), **fields))


@pytest.mark.parametrize("fields", [{"best_of": 2, "n": 2}, {"suffix": ""}, {"max_tokens": 1}, {"stop": []}])
def test_fields_that_change_nothing_pass(fields: dict[str, Any]) -> None:
    assert strict_api.refusal(Serving(), CompletionRequest(prompt="x", **fields)) is None


REMOTE = ["http://host/a.png", "https://host/etc/passwd", "data:image/png;base64,AAAA"]


@pytest.mark.parametrize("source", REMOTE)
def test_urls_stay_as_they_are(source: str) -> None:
    assert strict_api.admit_source(source) == source


@pytest.mark.parametrize("source", ["iVBORw0K", "secretfile12", "/9j/" + "A" * 5000])
def test_base64_cannot_be_taken_for_a_path(source: str) -> None:
    assert strict_api.admit_source(source) == f"data:application/octet-stream;base64,{source}"


LOCAL = [
    "/etc/passwd",
    "file:///etc/passwd",
    "file:/etc/passwd",
    "FILE:///etc/passwd",
    "../../etc/passwd",
    "secret.png",
    "/9j/short",
    "video:/etc/passwd",
    "ftp://host/a.png",
    "HTTP://host/a.png",
    " http://host/a.png",
]


@pytest.mark.parametrize("source", LOCAL)
@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: [s], lambda s: [[s], None], lambda s: {"url": s}, ImageData])
@pytest.mark.parametrize("field", ["image_data", "video_data", "audio_data"])
def test_local_files_are_refused_in_every_form(source: str, wrap: Any, field: str) -> None:
    with pytest.raises(media.MediaError, match="local file"):
        strict_api.check_request(MANAGER, generate(text="x", **{field: wrap(source)}))


def test_a_program_that_calls_the_engine_reads_its_own_files() -> None:
    request = generate(text="x", image_data="/data/own.png")
    strict_api.check_request(MANAGER, request, local=True)
    assert request.image_data == "/data/own.png"


def test_only_files_below_the_allowed_folder_pass_whatever_leads_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed, secret = tmp_path / "allowed", tmp_path / "secret.png"
    (allowed / "in").mkdir(parents=True)
    secret.write_bytes(b"x")
    inside = allowed / "in" / "a b.png"
    inside.write_bytes(b"x")
    (allowed / "link.png").symlink_to(secret)
    (tmp_path / "allowed-too").mkdir()
    (tmp_path / "allowed-too" / "a.png").write_bytes(b"x")
    (tmp_path / "door").symlink_to(allowed)
    monkeypatch.setenv(media.ALLOWED_PATH, str(tmp_path / "door"))
    expected = f"file://{allowed}/in/a%20b.png"
    assert strict_api.admit_source(str(inside)) == expected
    assert strict_api.admit_source(expected) == expected
    for outside in (
        secret,
        allowed / "link.png",
        allowed / ".." / "secret.png",
        tmp_path / "allowed-too" / "a.png",
        f"file://{allowed}/%2e%2e/secret.png",
    ):
        with pytest.raises(media.MediaError, match="outside"):
            strict_api.admit_source(str(outside))
    for no_file in (allowed / "in", allowed / "absent.png"):
        with pytest.raises(media.MediaError, match="no file"):
            strict_api.admit_source(str(no_file))


@pytest.mark.parametrize(
    ("cause", "told"), [(ValueError, media.MediaError), (KeyError, media.MediaError), (MemoryError, RuntimeError)]
)
def test_errors_of_loading_hold_nothing_of_what_was_read(cause: type[Exception], told: type[Exception]) -> None:
    @strict_api.load_errors
    def load(cls: Any, data: Any, modality: Any) -> None:
        raised_by_upstream = ValueError if cause is ValueError else RuntimeError
        raise raised_by_upstream(f"Error while loading data {data}") from cause("secret")

    with pytest.raises(told) as raised:
        load(object, b"secret", SimpleNamespace(name="IMAGE"))
    assert "secret" not in str(raised.value)
    assert "image" in str(raised.value)


async def chunks(*given: str) -> AsyncIterator[str]:
    for chunk in given:
        yield chunk


def answer(*given: str) -> Any:
    @strict_api.refuse_before_streaming
    async def endpoint() -> Any:
        return StreamingResponse(chunks(*given))

    return asyncio.run(endpoint())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (['data: {"error": {"message": "no", "code": 400}}\n\n', "data: [DONE]\n\n"], 400),
        (['data: {"error": {"message": "no", "code": 503}}\n\n'], 503),
        (
            [
                'event: message_start\ndata: {"type": "message_start"}\n\n',
                'event: error\ndata: {"type": "error", "error": {"type": "invalid_request_error"}}\n\n',
            ],
            400,
        ),
    ],
)
def test_an_error_before_the_first_word_is_no_stream(given: list[str], status: int) -> None:
    response = answer(*given)
    assert response.status_code == status
    assert json.loads(response.body)["error"]


@pytest.mark.parametrize(
    "given",
    [
        ['data: {"text": "an \\"error\\": {}"}\n\n', "data: [DONE]\n\n"],
        ['data: {"type": "message_start"}\n\n', 'data: {"type": "delta"}\n\n', 'data: {"error": {"code": 400}}\n\n'],
        [],
    ],
)
def test_other_streams_pass_whole(given: list[str]) -> None:
    async def read() -> list[Any]:
        @strict_api.refuse_before_streaming
        async def endpoint() -> Any:
            return StreamingResponse(chunks(*given))

        return [chunk async for chunk in (await endpoint()).body_iterator]

    assert asyncio.run(read()) == given


def test_validation_errors_name_fields_and_no_files() -> None:
    with pytest.raises(ValidationError) as raised:
        ChatCompletionRequest.model_validate({"messages": "hello", "n": "many" * 100})
    errors = [{**error, "loc": ("body", *error["loc"])} for error in raised.value.errors()]
    told = answers.tell_fields(errors)  # type: ignore[arg-type]
    assert "n: Input should be a valid integer" in told
    assert "messages: " in told
    assert "function-after" not in told
    assert len(told) < 800
