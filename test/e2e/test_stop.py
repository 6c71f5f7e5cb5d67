"""A server that ends leaves no process, port, shared memory or socket behind, however and whenever it is told to."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import lane_table
import psutil
import pytest

from sglang_patches import selection, serve
from sglang_patches.bench.server import free_port

from .conftest import MODEL
from .server import Server, serve_command

Start = Callable[..., Server]
LANE_HAS_CLEAN_STOP = pytest.mark.skipif(
    not lane_table.has("clean-stop"), reason="on Ctrl-C upstream prints a traceback of each process"
)


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
    # Upstream kills its children itself, some of them twice.
    assert "was ended by" not in server.log()


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


STOPPING = "sglang-patches: Ctrl-C: stopping"
STOPPED = re.compile(r"sglang-patches: stopped after \d+\.\d s")


@pytest.fixture
def at_terminal() -> Iterator[Start]:
    """Starts a server in the foreground of a terminal of its own; it is killed if still alive."""
    started: list[Server] = []

    def run(command: list[str], port: int) -> Server:
        started.append(Server(command, port, MODEL, None, {}, terminal=True))
        return started[-1]

    yield run
    for server in started:
        server.kill()


def _shown_after_ctrl_c(server: Server) -> list[str]:
    """Lines on the terminal from the first ^C on, which the terminal itself shows."""
    server.screen_is_read()
    shown = server.log()
    return [line.strip() for line in shown[shown.index("^C") + 2 :].splitlines() if line.strip()]


@LANE_HAS_CLEAN_STOP
def test_ctrl_c_at_a_server_that_launch_started(at_terminal: Start) -> None:
    """Two lines, status 0, nothing left; before that, the request to try."""
    port = free_port()
    program = str(Path(sys.prefix) / "bin" / "sglang-patches")
    server = at_terminal([program, "launch", "tiny-cpu", "--no-doctor", "--port", str(port), "--draft", ""], port)
    server.wait_ready()
    deadline = time.monotonic() + 30
    while not (found := re.search(r"launch: ready after .* Try:\s+(curl .*)", server.log())) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.5)
    assert found, server.log_tail()
    assert f"http://127.0.0.1:{port}/v1/chat/completions" in found[1]
    tree = server.tree()
    server.type("\x03")
    assert server.leftovers(tree) == []
    stopping, stopped = _shown_after_ctrl_c(server)
    assert stopping.startswith(STOPPING)
    assert STOPPED.fullmatch(stopped)
    assert server.process.returncode == 0


@LANE_HAS_CLEAN_STOP
@pytest.mark.parametrize("when", ["imports", "loads"])
def test_ctrl_c_at_make_serve_while_it_starts(at_terminal: Start, when: str) -> None:
    """make says nothing of an error. It ends of the signal too, as its shell expects of it."""
    port = free_port()
    arguments = [f"VENV={sys.prefix}", f"PORT={port}", f"MODEL={MODEL}", "DRAFT="]
    server = at_terminal(["make", "serve", *arguments], port)
    deadline = time.monotonic() + 200
    reached = {
        "imports": lambda: any("libtorch" in maps for maps in _maps(server.tree())),
        "loads": lambda: "sglang::scheduler" in _titles(server.tree()),
    }[when]
    while not reached() and time.monotonic() < deadline:
        assert server.process.poll() is None, server.log_tail()
        time.sleep(0.1)
    tree = server.tree()
    server.type("\x03")
    assert server.leftovers(tree) == []
    shown = _shown_after_ctrl_c(server)
    # Workers may have been writing a line or two of their own.
    assert "Traceback" not in server.log()
    assert "make:" not in server.log()
    assert len(shown) <= 4, shown
    assert any(line.startswith(STOPPING) for line in shown)
    assert STOPPED.fullmatch(shown[-1])
    assert server.process.returncode == -signal.SIGINT


@LANE_HAS_CLEAN_STOP
def test_a_second_ctrl_c_does_not_wait_for_requests(at_terminal: Start) -> None:
    """At upstream's own command. The first lets a request go on, the second cuts it off and kills."""
    port = free_port()
    planned = serve.plan(str(MODEL), "", 1, port, [], cuda=selection.has_gpu(), environ=os.environ)
    server = at_terminal(["env", *(f"{k}={v}" for k, v in serve.cpu_environment().items()), *planned.argv], port)
    server.wait_ready()
    body = {"model": MODEL.name, "prompt": "It was", "max_tokens": 3500, "stream": True, "ignore_eos": True}
    tree = server.tree()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        server.type("\x03")
        deadline = time.monotonic() + 20
        while STOPPING not in server.log() and time.monotonic() < deadline:
            next(lines)
        for _ in range(5):
            assert next(lines).startswith("data: {")
        began = time.monotonic()
        server.type("\x03")
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    assert server.leftovers(tree) == []
    assert time.monotonic() - began < 30
    shown = _shown_after_ctrl_c(server)
    assert "Traceback" not in server.log()
    assert shown[-1] == "sglang-patches: Ctrl-C again: killing what is left"
    assert server.process.returncode == -signal.SIGINT


def _maps(tree: list[psutil.Process]) -> Iterator[str]:
    for process in tree:
        with contextlib.suppress(OSError):
            yield Path(f"/proc/{process.pid}/maps").read_text()


def _titles(tree: list[psutil.Process]) -> str:
    titles = []
    for process in tree:
        try:
            titles.append(" ".join(process.cmdline()))
        except psutil.NoSuchProcess:
            continue
    return "\n".join(titles)
