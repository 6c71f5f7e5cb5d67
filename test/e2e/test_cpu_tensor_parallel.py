"""Several ranks without a GPU: upstream's own server, the real checkpoints, one process a rank.

Six heads, and experts of 112 rows: two ranks share the heads evenly, four do not, so that upstream fills heads, experts
and the draft's keys and values up with zeros.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from benchmark.tiny_kimi import reference
from transformers import AutoTokenizer

from sglang_patches.bench.server import free_port

from .conftest import DRAFT, MODEL
from .server import READY_SECONDS, REPO, Server, serve_command
from .test_lossless import generate

TOKENS = 32
# With speculation and without.
RANKS = {2: None, 4: DRAFT}
# Upstream waits 5 s with what it has to say of a dead child; the rest is for a busy machine.
END_SECONDS = 30.0


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], list[int]]]:
    """Prompts and their greedy continuations by transformers, which knows of no ranks."""
    tokenizer, model = AutoTokenizer.from_pretrained(MODEL), reference.load_text_model(MODEL)
    lines = (REPO / "test/models/prompts.jsonl").read_text().splitlines()[:4]
    prompts = [tokenizer(json.loads(line)["text"])["input_ids"] for line in lines]
    return [(ids, reference.greedy(model, ids, TOKENS)) for ids in prompts]


@pytest.fixture(scope="module", params=RANKS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of so many ranks, by `make serve`; the last test ends it."""
    port, draft = free_port(), RANKS[request.param]
    command = ["make", "serve", f"VENV={sys.prefix}", f"PORT={port}", f"MODEL={MODEL}", f"DRAFT={draft or ''}"]
    command += [f"TP={request.param}", "ARGS=--skip-server-warmup"]
    running = Server(command, port, MODEL, draft, {})
    yield running
    running.kill()


def ranks(server: Server) -> dict[int, psutil.Process]:
    """The server's schedulers by rank."""
    found = {}
    for process in server.tree():
        if title := re.match(r"sglang::scheduler_TP(\d+)", " ".join(process.cmdline())):
            found[int(title[1])] = process
    return found


def test_ranks_together_give_the_tokens_of_transformers(
    server: Server, expected: list[tuple[list[int], list[int]]]
) -> None:
    server.wait_ready()
    print(f"ready after {server.ready_seconds:.0f} s")
    ids, wanted = expected[0]
    assert generate(server, ids, TOKENS) == wanted
    assert generate(server, ids + wanted[:10], TOKENS - 10) == wanted[10:], "from the radix cache"
    with ThreadPoolExecutor(len(expected)) as pool:
        outputs = list(pool.map(lambda pair: generate(server, pair[0], TOKENS), expected))
    assert outputs == [wanted for _, wanted in expected]

    info = server.get("/server_info")
    assert sorted(ranks(server)) == list(range(info["tp_size"]))
    accepted = info["sglang_patches"]["accept_length"]
    assert accepted is None if server.draft_path is None else accepted > 2
    summed = re.findall(r'sglang_patches_allreduce_calls_total\{.*group="tp".*path="(\w+)".*\} (\S+)', server.metrics())
    assert {path for path, _ in summed} == {"torch"}
    assert sum(float(count) for _, count in summed) > 2 * TOKENS


def test_a_killed_rank_ends_the_server_and_the_log_names_it(server: Server) -> None:
    """At two ranks the other one than the first, in the middle of an answer; at four the first one, idle."""
    server.wait_ready()
    tree, schedulers = server.tree(), ranks(server)
    if len(schedulers) > 2:
        victim = schedulers[0]
        victim.kill()
    else:
        victim = schedulers[1]
        with pytest.raises(httpx.RemoteProtocolError):
            _kill_in_the_middle_of_an_answer(server, victim)
        assert not victim.is_running()
    began = time.monotonic()
    server.process.wait(END_SECONDS)
    print(f"ended after {time.monotonic() - began:.0f} s")
    # Upstream's watchdog, or the patch clean-stop where another rank was quicker to notice.
    told = rf"\(pid={victim.pid}\) crashed with exit code -9|process {victim.pid} \(.*\) .* was ended by SIGKILL"
    assert re.search(told, server.log()), server.log_tail()
    assert server.leftovers(tree) == []


def _kill_in_the_middle_of_an_answer(server: Server, victim: psutil.Process) -> None:
    """Raises httpx.RemoteProtocolError where the answer breaks off, as it must."""
    body = {"text": "It was", "stream": True, "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=END_SECONDS) as stream:
        for events, _ in enumerate(stream.iter_lines()):
            if events == 4:
                victim.kill()


def test_a_rank_with_another_patch_set_does_not_start() -> None:
    """Two launches that are to make one server, as on two hosts, where one has a patch off."""
    meet = f"127.0.0.1:{free_port()}"
    servers = []
    for rank, selection in enumerate(("", "-whole-stop-strings")):
        arguments = ["--nnodes", "2", "--node-rank", str(rank), "--dist-init-addr", meet]
        port = free_port()
        command = serve_command(port, MODEL, None, arguments, tp=2)
        servers.append(Server(command, port, MODEL, None, {"SGLANG_PATCHES": selection}))
    try:
        for server in servers:
            server.process.wait(READY_SECONDS)
        ids = [re.findall(r"patch set (\w+) on sglang", server.log())[0] for server in servers]
        assert ids[0] != ids[1]
        for rank, server in enumerate(servers):
            assert server.process.poll() not in (None, 0)
            other = 1 - rank
            assert f"rank {rank} has {ids[rank]}, but rank {other} has {ids[other]}" in server.log(), server.log_tail()
            assert "`sglang-patches status` shows them on each host" in server.log()
    finally:
        for server in servers:
            server.kill()
