"""A server that ends leaves no process, port, shared memory or socket behind, however and whenever it is told to."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest

from sglang_patches.bench.server import free_port

from .conftest import MODEL
from .server import Server, serve_command

Start = Callable[..., Server]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts an unspeculated server of the test's own, by a command that may be given; it is killed if still alive."""
    started: list[Server] = []

    def run(command: list[str] | None = None) -> Server:
        port = free_port()
        filled = [word.replace("PORT_", str(port)) for word in command] if command else None
        started.append(Server(filled or serve_command(port, MODEL, None), port, MODEL, None, {}))
        return started[-1]

    yield run
    for server in started:
        server.kill()


def test_make_serve_prints_a_request_that_works_and_stops_clean_on_sigterm(start: Start) -> None:
    server = start(["make", "serve", f"VENV={sys.prefix}", "PORT=PORT_", f"MODEL={MODEL}", "DRAFT="])
    server.wait_ready()
    deadline = time.monotonic() + 30
    while not (found := re.search(r"Try:\n\s+(curl .*)", server.log())) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert found, server.log_tail()
    reply = subprocess.run(["bash", "-c", found[1]], capture_output=True, text=True, timeout=120, check=True)
    assert '"choices"' in reply.stdout
    assert server.stop(signal.SIGTERM) == []


def test_sigint_while_a_request_runs(start: Start) -> None:
    server = start().wait_ready()
    body = {"model": MODEL.name, "prompt": "It was", "max_tokens": 256, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        tree = server.tree()
        server.process.send_signal(signal.SIGINT)
        # uvicorn lets running requests finish.
        assert list(lines)[-1] == "data: [DONE]"
    assert server.leftovers(tree) == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_stop_during_start_up(start: Start, how: signal.Signals) -> None:
    server = start()
    deadline = time.monotonic() + 200
    while "sglang::scheduler" not in _titles(server.tree()) and time.monotonic() < deadline:
        assert server.process.poll() is None, server.log_tail()
        time.sleep(0.2)
    assert "sglang::scheduler" in _titles(server.tree())
    began = time.monotonic()
    assert server.stop(how) == []
    assert time.monotonic() - began < 30


def _titles(tree: list[psutil.Process]) -> str:
    titles = []
    for process in tree:
        try:
            titles.append(" ".join(process.cmdline()))
        except psutil.NoSuchProcess:
            continue
    return "\n".join(titles)
