"""Greedy output is the model's own: equal to transformers' forward of the same weights, token for token, float32.

The plain server is held to the reference too, so "EAGLE-3 equals no EAGLE-3" follows, and an error common to both
(upstream's torch_native MLA prefill was one) cannot hide.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from benchmark.tiny_kimi import reference

from .conftest import PROMPTS, TOKENS, Expected
from .server import Server


def generate(server: Server, ids: list[int], tokens: int = TOKENS, **sampling: Any) -> list[int]:
    """Greedy continuation of ``ids`` by the server, as token ids; always ``tokens`` long unless a stop is given."""
    answer = httpx.post(
        f"{server.url}/generate",
        json={
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **sampling},
        },
        timeout=300,
    )
    answer.raise_for_status()
    return answer.json()["output_ids"]


def flush(server: Server) -> None:
    """Empty the prefix cache, so that the next request is prefilled cold."""
    httpx.post(f"{server.url}/flush_cache", timeout=60).raise_for_status()


def check_alone(server: Server, expected: Expected) -> None:
    flush(server)
    for ids, wanted in zip(expected.prompts, expected.outputs, strict=True):
        assert generate(server, ids) == wanted, f"cold, {expected.tokenizer.decode(ids)!r}"
    # Warm: the prompt and part of the answer come from the radix cache, the rest is prefilled behind a prefix.
    for ids, wanted in zip(expected.prompts[:4], expected.outputs[:4], strict=True):
        assert generate(server, ids + wanted[:40], TOKENS - 40) == wanted[40:], "from the radix cache"


def check_batch(server: Server, expected: Expected) -> None:
    """Four requests of different lengths at once, each ending at another time and replaced by the next."""
    flush(server)
    lengths = [TOKENS - 29 * (i % 4) for i in range(PROMPTS)]
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda job: generate(server, *job), zip(expected.prompts, lengths, strict=True)))
    for output, wanted, length in zip(outputs, expected.outputs, lengths, strict=True):
        assert output == wanted[:length]


def test_unspeculated_equals_transformers(plain_server: Server, expected: Expected) -> None:
    check_alone(plain_server, expected)


@pytest.mark.main_job
def test_unspeculated_batch_equals_transformers(plain_server: Server, expected: Expected) -> None:
    check_batch(plain_server, expected)


@pytest.mark.main_job
def test_chain_is_lossless(spec_server: Server, expected: Expected) -> None:
    check_alone(spec_server, expected)


@pytest.mark.main_job
def test_chain_is_lossless_in_a_batch(spec_server: Server, expected: Expected) -> None:
    check_batch(spec_server, expected)


@pytest.mark.main_job
def test_tree_is_lossless(tree_server: Server, expected: Expected) -> None:
    check_alone(tree_server, expected)


def test_tree_is_lossless_in_a_batch(tree_server: Server, expected: Expected) -> None:
    check_batch(tree_server, expected)


def test_chunked_prefill_is_lossless(tree_server: Server, expected: Expected) -> None:
    """A prompt longer than one prefill chunk: its draft states must be right across the chunk's edge."""
    long = [token for ids, out in zip(expected.prompts, expected.outputs, strict=True) for token in ids + out][:1500]
    chunk = tree_server.get("/server_info")["chunked_prefill_size"]
    assert len(long) > chunk, f"prompt of {len(long)} tokens does not fill a chunk of {chunk}"
    wanted = reference.greedy(expected.model, long, 32)
    flush(tree_server)
    assert generate(tree_server, long, 32) == wanted


def test_cancelled_and_stopped_requests_disturb_nobody(spec_server: Server, expected: Expected) -> None:
    flush(spec_server)
    started = threading.Barrier(3)

    def cancel(ids: list[int]) -> int:
        """Open a stream, read a few events, hang up in the middle."""
        body = {
            "input_ids": ids,
            "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1000, "ignore_eos": True},
        }
        started.wait()
        with httpx.stream("POST", f"{spec_server.url}/generate", json=body, timeout=120) as stream:
            for events, line in enumerate(stream.iter_lines()):
                if events >= 10:
                    assert line is not None
                    return events
        raise AssertionError("the stream ended before it could be cancelled")

    def stop(ids: list[int], wanted: list[int]) -> list[int]:
        started.wait()
        text = expected.tokenizer.decode(wanted[60:64])
        return generate(spec_server, ids, stop=[text])

    with ThreadPoolExecutor(4) as pool:
        cancelled = pool.submit(cancel, expected.prompts[0])
        stopped = pool.submit(stop, expected.prompts[1], expected.outputs[1])
        started.wait()
        others = [pool.submit(generate, spec_server, expected.prompts[i]) for i in (2, 3)]
        assert [other.result() for other in others] == expected.outputs[2:4]
        assert cancelled.result() == 10
        out = stopped.result()
    assert out == expected.outputs[1][: len(out)]
    assert len(out) < TOKENS, "the stop string did not stop it"
    assert spec_server.healthy()
    # The cancelled request is gone, not still running to its 1000 tokens.
    running = [line for line in spec_server.metrics().splitlines() if line.startswith("sglang:num_running_reqs{")]
    assert running
    assert all(float(line.rsplit(" ", 1)[1]) == 0 for line in running)
    assert generate(spec_server, expected.prompts[4]) == expected.outputs[4]
