"""Grammar-constrained requests, speculative or not: the text obeys, or the request gets a 4xx; the server lives on."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from .server import Server

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["ship", "whale"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
# Bounded, so that the text ends by itself whatever the model likes.
REGEX = r"(yes|no), [a-c]{3,5}!"
EBNF = 'root ::= "<" [0-9] [0-9] ("." [0-9])? ">"'


@pytest.fixture(params=["spec_server", "tree_server", "plain_server"])
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(request.param)
    return found


def generate(server: Server, **params: Any) -> httpx.Response:
    document = {"text": "It is", "sampling_params": {"max_new_tokens": 48, "temperature": 0.0, **params}}
    return httpx.post(f"{server.url}/generate", json=document, timeout=300)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["regex", "ebnf"])
def test_text_obeys(server: Server, kind: str, temperature: float) -> None:
    params = {"regex": REGEX} if kind == "regex" else {"ebnf": EBNF}
    text = generate(server, temperature=temperature, **params).raise_for_status().json()["text"]
    assert re.fullmatch(REGEX if kind == "regex" else r"<\d\d(\.\d)?>", text), text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_chat_completion_with_a_json_schema(server: Server, temperature: float) -> None:
    document = {
        "model": server.model_path.name,
        "messages": [{"role": "user", "content": "Who is it?"}],
        "max_tokens": 400,
        "temperature": temperature,
        "response_format": {"type": "json_schema", "json_schema": {"name": "who", "schema": SCHEMA, "strict": True}},
        # White space between tokens is legal JSON without end, and an untrained model may never stop it.
        "logit_bias": _against_white_space(server),
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=document, timeout=300).raise_for_status().json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    value = json.loads(answer["choices"][0]["message"]["content"])
    assert set(value) == {"name", "age", "kind"}
    assert re.fullmatch("[a-z]{1,8}", value["name"])
    assert 0 <= value["age"] <= 99
    assert value["kind"] in ("ship", "whale")


def _against_white_space(server: Server) -> dict[str, float]:
    ids = set()
    for blank in (" ", "  ", "\n", "\t", "\r"):
        document = {"prompt": blank, "add_special_tokens": False}
        ids.update(httpx.post(f"{server.url}/tokenize", json=document, timeout=60).raise_for_status().json()["tokens"])
    return {str(token): -100.0 for token in ids}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "params",
    [
        {"regex": "(["},
        {"ebnf": "x"},
        {"json_schema": "{"},
        {"json_schema": '{"type": "strin"}'},
        {"ebnf": 'root ::= root "a"'},
        {"regex": "a{3}", "min_new_tokens": 10},
        {"regex": "a", "ebnf": 'root ::= "a"'},
    ],
    ids=lambda params: " ".join(params) + " " + str(next(iter(params.values()))),
)
def test_what_cannot_be_met_is_refused(server: Server, params: dict[str, Any], temperature: float) -> None:
    answer = generate(server, temperature=temperature, **params)
    assert answer.status_code == 400, answer.text
    assert len(answer.json()["error"]["message"]) > 20
    assert server.healthy()


def test_grammar_rows_and_free_rows_share_batches(server: Server) -> None:
    free = {"temperature": 0.0, "max_new_tokens": 24}
    alone = generate(server, **free).json()["text"]
    requests: list[dict[str, Any]] = [
        free,
        {"regex": REGEX},
        {"ebnf": EBNF, "temperature": 1.0},
        {"ebnf": "root ::= root"},
    ]
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(lambda params: generate(server, **params), requests))
    assert [answer.status_code for answer in answers] == [200, 200, 200, 400]
    assert answers[0].json()["text"] == alone
    assert re.fullmatch(REGEX, answers[1].json()["text"])
    assert re.fullmatch(r"<\d\d(\.\d)?>", answers[2].json()["text"])
