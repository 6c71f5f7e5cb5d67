"""eagle-verify-cuda-graph on a real server: every speculative forward is counted, and a required graph is a condition.

Without a GPU all forwards take the path "cpu"; on one, the same tests ask for "graph".
"""

from __future__ import annotations

import re
from typing import Any

import httpx
import torch

from sglang_patches.bench.server import free_port

from .conftest import DRAFT, MODEL
from .server import Server, serve_command

PHASES = ("verify", "draft_decode", "draft_extend")
PATH = "graph" if torch.cuda.is_available() else "cpu"
TOKENS = 24


def counted(server: Server) -> dict[str, Any]:
    told: dict[str, Any] = server.get("/server_info")["sglang_patches"]["outcomes"]["eagle-verify-cuda-graph"]
    return told


def total(told: dict[str, Any], phase: str) -> int:
    return sum(count for reasons in told["passes"][phase].values() for count in reasons.values())


def test_every_speculative_forward_is_counted_by_path_and_reason(spec_server: Server) -> None:
    before = counted(spec_server)
    passes = spec_server.get("/server_info")["sglang_patches"]["verify_passes"]
    body = {"text": "The river", "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}}
    httpx.post(f"{spec_server.url}/generate", json=body, timeout=120).raise_for_status()
    after = counted(spec_server)
    new = spec_server.get("/server_info")["sglang_patches"]["verify_passes"] - passes
    assert 0 < new < TOKENS
    for phase in PHASES:
        # One request alone: a pass per request is a pass of the batch. A scheduler that overlaps batches may run one
        # cycle more than it keeps.
        assert new <= total(after, phase) - total(before, phase) <= new + 1
        assert set(after["passes"][phase]) == {PATH}
        assert after["graph_share"][phase] == (1.0 if PATH == "graph" else 0.0)
    assert after["failures_inside"] == {}
    assert after["result"] == ("applied" if PATH == "graph" else "not needed")


def test_metrics_carry_the_counter(spec_server: Server) -> None:
    body = {"text": ["One", "Two", "Three"], "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    httpx.post(f"{spec_server.url}/generate", json=body, timeout=120).raise_for_status()
    told = counted(spec_server)
    found: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    for line in spec_server.metrics().splitlines():
        if line.startswith("sglang:spec_forward_total{"):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
            assert labels["path"] == PATH
            assert labels["reason"] in ({"captured", "padded"} if PATH == "graph" else {"cpu"})
            assert labels["model_name"]
            found[labels["phase"]] += float(line.rsplit(" ", 1)[1])
    assert found == {phase: total(told, phase) for phase in PHASES}


def test_a_server_that_must_have_graphs_does_not_start_on_a_cpu() -> None:
    port = free_port()
    command = serve_command(port, MODEL, DRAFT, ["--device", "cpu", "--attention-backend", "torch_native"])
    server = Server(command, port, MODEL, DRAFT, {"SGLANG_PATCHES_VERIFY_GRAPH": "require"})
    try:
        assert server.process.wait(timeout=120) != 0
    finally:
        server.kill()
    log = server.log()
    assert "SGLANG_PATCHES_VERIFY_GRAPH=require, but these speculative forwards would run without a CUDA graph" in log
    for phase in PHASES:
        assert re.search(rf"{phase} batch size 1-\d+: cpu", log)
    assert "scheduler" not in log.partition("GraphsRequired")[0]  # before any child process was started
