"""A draft that reads the embedding's output, on a real server: the layers it tells, its output, its accept length."""

from __future__ import annotations

import pytest

from .conftest import Expected
from .server import Server
from .test_lossless import generate

TOKENS = 64


def outcome(server: Server) -> dict[str, object]:
    return server.get("/server_info")["sglang_patches"]["outcomes"]["deepseek-v2-embedding-capture"]


def accept_length(server: Server, expected: Expected) -> float:
    """Mean tokens per verify pass over some of the prompts, whose output must be the reference's."""
    before = server.get("/server_info")["sglang_patches"]
    for ids, wanted in zip(expected.prompts[::4], expected.outputs[::4], strict=True):
        assert generate(server, ids, TOKENS) == wanted[:TOKENS]
    after = server.get("/server_info")["sglang_patches"]
    tokens = after["accepted_tokens"] - before["accepted_tokens"]
    return tokens / (after["verify_passes"] - before["verify_passes"])


def test_a_guessed_convention_is_told(spec_server: Server) -> None:
    told = outcome(spec_server)
    assert told["result"] == "applied"
    assert told["guessed"] is True
    assert told["layers"] == ["output of layer 1", "output of layer 5", "output of layer 8"]
    assert told["other_reading"] == ["output of layer 0", "output of layer 4", "output of layer 7"]


@pytest.mark.main_job
def test_the_embedding_draft_is_as_good_as_the_other(
    embedding_server: Server, spec_server: Server, expected: Expected
) -> None:
    told = outcome(embedding_server)
    assert told["result"] == "applied"
    assert told["guessed"] is False
    assert told["layers"] == ["embedding output", "output of layer 5", "output of layer 8"]
    line = "deepseek-v2-embedding-capture: applied: captures embedding output, output of layer 5, output of layer 8"
    assert embedding_server.log().count(line) == 1
    # With a wrong state in place of the embedding it would be 1.1: see test/models/test_checkpoints.py.
    second, first = accept_length(embedding_server, expected), accept_length(spec_server, expected)
    print(f"accept length {second:.3f} with the embedding draft, {first:.3f} with the first")
    assert second >= first - 0.1
