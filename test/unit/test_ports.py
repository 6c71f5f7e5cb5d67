"""Whether a port can be bound where a server will bind it, and what is told of who holds it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from sglang_patches import ports, processes
from sglang_patches.bench import server
from sglang_patches.errors import PatchError


@contextmanager
def listening(host: str, port: int = 0) -> Iterator[int]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as taken:
        yield taken.getsockname()[1]


def has_ipv6() -> bool:
    try:
        with listening("::1"):
            return True
    except OSError:
        return False


NEEDS_IPV6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 address of its own")


@pytest.mark.parametrize(
    ("taken", "wanted", "free"),
    [
        ("127.0.0.1", "127.0.0.1", False),
        ("127.0.0.1", "127.0.0.2", True),
        ("127.0.0.2", "127.0.0.1", True),
        ("127.0.0.2", "0.0.0.0", False),
        ("127.0.0.2", "", False),
        ("0.0.0.0", "127.0.0.1", False),
        ("127.0.0.1", "localhost", False),
        pytest.param("::1", "::", False, marks=NEEDS_IPV6),
        pytest.param("::1", "::1", False, marks=NEEDS_IPV6),
        pytest.param("127.0.0.1", "::1", True, marks=NEEDS_IPV6),
        pytest.param("127.0.0.1", "::", True, marks=NEEDS_IPV6),
    ],
)
def test_a_port_is_tried_where_it_will_be_bound(taken: str, wanted: str, free: bool) -> None:
    with listening(taken) as port:
        refused = ports.refused(wanted, port)
        assert (refused is None) is free, refused
        if refused is not None:
            assert refused.in_use
            assert f"port {port} is in use on " in refused.seen
            assert f"by pid {os.getpid()} (" in refused.seen
    assert ports.refused(wanted, port) is None


def test_who_listens_elsewhere_is_not_blamed() -> None:
    """Two processes on one port, at different addresses."""
    code = (
        "import socket, sys; s = socket.create_server((sys.argv[1], int(sys.argv[2]))); print(1, flush=True); input()"
    )
    with listening("127.0.0.2") as port:
        other = subprocess.Popen(
            [sys.executable, "-c", code, "127.0.0.3", str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert other.stdout is not None
        other.stdout.readline()
        try:
            at_three, at_all = ports.refused("127.0.0.3", port), ports.refused("0.0.0.0", port)
        finally:
            other.communicate(b"\n")
    assert at_three is not None
    assert at_all is not None
    assert f"pid {other.pid} (" in at_three.seen
    assert f"pid {os.getpid()} (" not in at_three.seen
    assert f"pid {other.pid} (" in at_all.seen
    assert f"pid {os.getpid()} (" in at_all.seen


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("192.0.2.1", "192.0.2.1, which this machine has not"),  # TEST-NET-1: nobody's
        ("no-such-host.invalid", "no known name"),
        ("1.2.3.4.5", "no known name"),
        ("a" * 64 + ".invalid", "no known name"),  # longer than a label may be
    ],
)
def test_a_host_that_is_none(host: str, said: str) -> None:
    refused = ports.refused(host, 31999)
    assert refused is not None
    assert said in refused.seen
    assert "0.0.0.0 for all" in refused.remedy
    assert not refused.in_use
    with pytest.raises(PatchError, match="--host an address of this machine"):
        server.free_port(host)


def test_a_holder_whom_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of another user's process."""
    with listening("127.0.0.1") as port:
        hidden = SimpleNamespace(
            status=psutil.CONN_LISTEN, laddr=SimpleNamespace(ip="127.0.0.1", port=port), pid=None
        )  # fmt: skip
        monkeypatch.setattr(psutil, "net_connections", lambda kind: [hidden])
        refused = ports.refused("127.0.0.1", port)
    assert refused is not None
    assert "by a process that this user may not see" in refused.seen
    assert f"sport = :{port}" in refused.remedy


def test_a_server_that_holds_the_port_can_be_stopped_and_its_key_is_not_shown(tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(
        "import socket\nheld = socket.create_server(('127.0.0.1', 0))\n"
        "print(held.getsockname()[1], flush=True)\ninput()\n"
    )
    command = [sys.executable, "-m", "sglang.launch_server", "--api-key", "horse-battery"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env={"SGLANG_PATCHES": "none"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    port = int(process.stdout.readline())
    try:
        refused = ports.refused("127.0.0.1", port)
    finally:
        process.communicate("\n")
    assert refused is not None
    assert f"pid {process.pid} (" in refused.seen
    assert "horse-battery" not in refused.seen
    assert refused.remedy == f"another --port, or: sglang-patches stop --port {port}"


@pytest.mark.parametrize(
    ("words", "host"),
    [
        ((), "127.0.0.1"),
        (("--host", "0.0.0.0"), "0.0.0.0"),
        (("--host=::", "--port", "1"), "::"),
        (("--config", "FILE"), "10.1.2.3"),
        (("--config", "FILE", "--host", "localhost"), "localhost"),
    ],
)
def test_where_a_server_listens(words: Sequence[str], host: str, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("host: 10.1.2.3\ntp-size: 8\n")
    assert ports.bound_host([str(file) if word == "FILE" else word for word in words]) == host


def test_a_long_command_is_cut() -> None:
    command = [sys.executable, "-c", "print(flush=True); input()", "x" * 200]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        shown = processes.shown(psutil.Process(process.pid))
    finally:
        process.communicate(b"\n")
    assert len(shown) == 100
    assert shown.endswith("...")
    assert processes.shown(psutil.Process(os.getpid())) != "gone"
