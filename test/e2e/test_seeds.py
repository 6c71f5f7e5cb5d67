"""A seed decides what a request gets, exactly: with or without speculation, alone or among others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from .server import Server

PROMPT = "In the beginning of the voyage the captain"
SEEDED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8, "sampling_seed": 1},
    "top-k": {"temperature": 1.0, "top_k": 20, "sampling_seed": -2},
    "top-p": {"temperature": 1.0, "top_p": 0.8, "sampling_seed": 3},
    "min-p": {"temperature": 1.0, "min_p": 0.05, "sampling_seed": 4},
    "penalties": {
        "temperature": 0.7,
        "frequency_penalty": 0.8,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.4,
        "sampling_seed": 5,
    },
    "bias": {"temperature": 0.6, "logit_bias": {"100": 5.0, "200": 4.0}, "frequency_penalty": 1.0, "sampling_seed": 6},
    "greedy with penalties": {"temperature": 0.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "greedy with min_new_tokens": {"temperature": 0.0, "min_new_tokens": 20, "stop_token_ids": list(range(3, 4000, 7))},
}


def generate(server: Server, params: dict[str, Any]) -> Any:
    document = {"text": PROMPT, "sampling_params": {"max_new_tokens": 32, **params}}
    return httpx.post(f"{server.url}/generate", json=document, timeout=300).raise_for_status().json()


@pytest.mark.parametrize("name", SEEDED)
def test_speculation_changes_no_token(plain_server: Server, spec_server: Server, name: str) -> None:
    plain, spec = (generate(server, SEEDED[name])["output_ids"] for server in (plain_server, spec_server))
    assert spec == plain


def test_neighbours_in_the_batch_change_no_token(spec_server: Server) -> None:
    alone = {name: generate(spec_server, params)["output_ids"] for name, params in SEEDED.items()}
    with ThreadPoolExecutor(len(SEEDED)) as pool:
        together = list(pool.map(lambda params: generate(spec_server, params)["output_ids"], SEEDED.values()))
    assert dict(zip(SEEDED, together, strict=True)) == alone


def test_choices_of_one_request_differ_and_come_again(spec_server: Server) -> None:
    params = {"temperature": 1.0, "sampling_seed": 7, "ignore_eos": True}
    first, again = ([choice["output_ids"] for choice in generate(spec_server, {**params, "n": 4})] for _ in range(2))
    assert first == again
    assert len({tuple(ids) for ids in first}) == 4
    assert first[0] == generate(spec_server, params)["output_ids"]


def test_without_a_seed_texts_differ(spec_server: Server) -> None:
    choices = generate(spec_server, {"temperature": 1.0, "n": 8, "ignore_eos": True})
    assert len({tuple(choice["output_ids"]) for choice in choices}) == 8
