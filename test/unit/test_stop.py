"""`sglang-patches stop`: it ends the server on a port with its children, and refuses everything else.

The servers here are real processes, trees and sockets with the command line of a launched SGLang; the end-to-end tests
stop the real thing.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sglang_patches import processes
from sglang_patches.errors import PatchError
from sglang_patches.stop import find_server, stop_server

SERVER = """
    import os, signal, socket, subprocess, sys, time
    port, stubborn = int(sys.argv[sys.argv.index("--port") + 1]), "--stubborn" in sys.argv
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)" if stubborn else "import time; time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code])
    def end(*_):
        if not stubborn:
            child.terminate(); child.wait()
            sys.exit(0)
    signal.signal(signal.SIGTERM, end)
    with socket.create_server(("127.0.0.1", port)):
        print("ready", child.pid, flush=True)
        while True:
            time.sleep(0.05)
"""  # noqa: E501


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Started:
    """A process tree that listens; `child` is its worker's pid."""

    def __init__(self, folder: Path, module: str, port: int, *arguments: str) -> None:
        package = folder / module.partition(".")[0]
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / f"{module.rpartition('.')[2]}.py").write_text(textwrap.dedent(SERVER))
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "--port", str(port), *arguments],
            cwd=folder,
            env={"SGLANG_PATCHES": "none"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        word, child = self.process.stdout.readline().split()
        assert word == "ready"
        self.child = psutil.Process(int(child))

    def close(self) -> None:
        for process in (self.child, self.process):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()


@pytest.fixture
def bystander() -> Iterator[psutil.Process]:
    """A process that nobody may end; its command line mentions the server's."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "sglang.launch_server"])
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()


def test_ends_the_server_and_its_children_and_nothing_else(
    tmp_path: Path, port: int, bystander: psutil.Process
) -> None:
    server = Started(tmp_path, "sglang.launch_server", port)
    said: list[str] = []
    try:
        stop_server(port, timeout=20, echo=said.append)
        assert not processes.alive(processes.tree(server.process.pid))
        assert not server.child.is_running()
        assert bystander.is_running()
        assert said[0].startswith(f"port {port}: ending pid {server.process.pid} (")
        assert said[0].endswith("and 1 child processes")
        assert said[-1].startswith(f"port {port}: ended after ")
    finally:
        server.close()
    with pytest.raises(PatchError, match="nothing listens there"):
        stop_server(port, timeout=1)


def test_kills_what_does_not_end_in_time(tmp_path: Path, port: int, bystander: psutil.Process) -> None:
    server = Started(tmp_path, "sglang.launch_server", port, "--stubborn")
    said: list[str] = []
    started = time.monotonic()
    try:
        stop_server(port, timeout=1, echo=said.append)
        assert 1 <= time.monotonic() - started < 10
        assert not processes.alive(processes.tree(server.process.pid))
        assert not server.child.is_running() or server.child.status() == psutil.STATUS_ZOMBIE
        assert bystander.is_running()
        (killed,) = [line for line in said if "killing" in line]
        assert str(server.child.pid) in killed
        assert str(server.process.pid) in killed
    finally:
        server.close()


def test_refuses_a_free_port(port: int) -> None:
    with pytest.raises(PatchError) as caught:
        stop_server(port, timeout=1)
    assert str(caught.value) == (f"port {port}: nothing listens there\n  remedy     check the port; nothing was ended")


@pytest.mark.parametrize("arguments", [(), ("sglang.launch_server",)])
def test_refuses_another_program(tmp_path: Path, port: int, arguments: tuple[str, ...]) -> None:
    other = Started(tmp_path, "other.server", port, *arguments)
    try:
        with pytest.raises(PatchError) as caught:
            stop_server(port, timeout=1)
        assert f"port {port}: pid {other.process.pid} listens there and is not an SGLang server" in str(caught.value)
        assert "  expected   python -m sglang.launch_server, or sglang serve" in str(caught.value)
        assert other.process.poll() is None
        assert other.child.is_running()
    finally:
        other.close()


def test_a_client_of_the_server_is_not_the_server(tmp_path: Path, port: int) -> None:
    server = Started(tmp_path, "sglang.launch_server", port)
    try:
        with socket.create_connection(("127.0.0.1", port)):
            assert find_server(port).pid == server.process.pid
    finally:
        server.close()


@pytest.mark.parametrize("arguments", [["--port", "0"], ["--port", "70000"], ["--port", "x"], []])
def test_the_tool_refuses_bad_ports(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "sglang_patches.cli", "stop", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_the_tool_says_that_nothing_listens(port: int) -> None:
    command = [sys.executable, "-m", "sglang_patches.cli", "stop", "--port", str(port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.partition("\n")[0]) == (
        2,
        f"sglang-patches: port {port}: nothing listens there",
    )
