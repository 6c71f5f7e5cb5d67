"""`sglang-patches top` beside servers: what cannot be read, one reading, several servers, one that comes back."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_patches.errors import PatchError
from sglang_patches.observe import top
from sglang_patches.observe.scrape import Scrape, fetch, parse

from .metrics_text import INFO, text


class Answers(BaseHTTPRequestHandler):
    """Answers with what its server holds: a status, and a text that counts up."""

    server: Any

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        body = self.server.text(len(self.server.asked)).encode()
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    made: Any = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    made.asked, made.status, made.text = [], 200, lambda turn: text(passes=10 * turn, tokens=100 * turn) + INFO
    made.url = f"http://127.0.0.1:{made.server_address[1]}"
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (404, "", "--enable-metrics"),
        (401, "", "SGLANG_API_KEY"),
        (500, "", "look at its log"),
        (200, "", "no metric of SGLang"),
        (200, "python_gc_total 3\n", "no metric of SGLang"),
    ],
)
def test_a_server_that_cannot_be_read_is_refused_with_what_helps(
    server: Any, status: int, answer: str, said: str
) -> None:
    server.status, server.text = status, lambda turn: answer
    with pytest.raises(PatchError) as error:
        fetch(server.url)
    assert said in str(error.value)
    assert "remedy" in str(error.value)


def test_nothing_that_listens_and_no_url() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        with pytest.raises(PatchError, match=r"Connection refused\n  remedy     name a running"):
            fetch(f"http://127.0.0.1:{probe.getsockname()[1]}")
    with pytest.raises(PatchError, match="not the URL of a server"):
        fetch("127.0.0.1:30000")


def test_once_prints_and_the_key_is_sent_from_the_variable(server: Any, tmp_path: Path) -> None:
    run = CliRunner().invoke(
        top.app,
        ["--url", server.url, "--once", "--json", "--interval", "0.1"],
        env={"SGLANG_API_KEY": "secret"},
    )
    assert run.exit_code == 0, run.output
    told = json.loads(run.output)
    assert told["output_tokens_per_s"] == pytest.approx(100 / told["seconds"])
    assert told["phases"]["verify"]["graph_share"] == 0.75
    assert server.asked == [("/metrics", "Bearer secret")] * 2
    (tmp_path / "key").write_text("filed\n")
    file = {"SGLANG_API_KEY_FILE": str(tmp_path / "key")}
    run = CliRunner().invoke(top.app, ["--url", server.url, "--once", "--interval", "0.1"], env=file)
    assert (run.exit_code, server.asked[-1]) == (0, ("/metrics", "Bearer filed")), run.output
    run = CliRunner().invoke(top.app, ["--url", server.url, "--once"], env={"SGLANG_API_KEY_FILE": str(tmp_path)})
    assert (run.exit_code, "cannot be read" in run.output) == (2, True)
    picture = tmp_path / "top.svg"
    run = CliRunner().invoke(top.app, ["--url", server.url, "--once", "--interval", "0.1", "--svg", str(picture)])
    assert run.exit_code == 0, run.output
    assert "acceptance" in picture.read_text()
    shown = CliRunner().invoke(top.app, ["--url", server.url, "--interval", "0.1"])  # no terminal: once
    assert "acceptance" in shown.output
    refused = CliRunner().invoke(top.app, ["--url", server.url, "--json"])
    assert (refused.exit_code, "add --once" in refused.output) == (2, True)
    server.status = 404
    assert CliRunner().invoke(top.app, ["--url", server.url, "--once"]).exit_code == 2


def test_several_servers_have_a_line_each(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    other: Any = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    other.asked, other.status, url = [], 200, f"http://127.0.0.1:{other.server_address[1]}"
    # Started anew between the readings, with another patch set.
    other.text = lambda turn: text(passes=1000 // turn**2, tokens=4000 // turn**2) + INFO.replace("abc", "def")
    threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{probe.getsockname()[1]}"
        arguments = [word for each in (server.url, url, nobody, url) for word in ("--url", each)]
        arguments += ["--once", "--interval", "0.2"]
        monkeypatch.setenv("COLUMNS", "110")
        run = CliRunner().invoke(top.app, arguments, env={"SGLANG_API_KEY": "secret"})
        assert run.exit_code == 0, run.output
        assert server.asked == other.asked == [("/metrics", "Bearer secret")] * 2
        lines = [" ".join(line.split()) for line in run.output.splitlines()]
        (mine,) = [line for line in lines if line.startswith(f"{server.url} ")]
        assert re.fullmatch(rf"{server.url} [\d.]+ 3 - 10% 2\.30 10\.00 75%", mine)
        assert f"{url}: the server was restarted" in lines
        assert f"{nobody} - - - - - - -" in lines
        assert any(line.startswith(f"{nobody}: no answer, asking again: {nobody}/metrics: [Errno") for line in lines)
        assert f"patch sets differ: {server.url} abc, {url} def" in lines
        told = json.loads(CliRunner().invoke(top.app, [*arguments, "--json"]).output)
        assert list(told) == [server.url, url, nobody]
        assert (told[server.url]["patch_set_id"], told[nobody]) == ("abc", None)
        assert told[url]["restarted"]
        none = CliRunner().invoke(top.app, ["--url", nobody, "--url", f"{nobody}/x", "--once"])
        assert (none.exit_code, none.output.count("Connection refused")) == (2, 2)
    other.shutdown()
    other.server_close()


def test_a_server_that_goes_away_and_comes_back_is_watched_on() -> None:
    answers: list[Scrape | PatchError] = [
        parse(text(), 0.0),
        parse(text(passes=50), 2.0),
        PatchError("here: Connection refused\n  remedy  none"),
        parse(text(passes=4), 9.0),
        parse(text(passes=8), 10.0),
    ]

    def read() -> Scrape:
        answer = answers.pop(0)
        if isinstance(answer, PatchError):
            raise answer
        return answer

    watch = top.Watch(read)
    watch.look()
    assert watch.found is None
    watch.look()
    assert watch.found is not None
    before = watch.found
    watch.look()
    assert (watch.found, watch.note) == (before, "no answer, asking again: here: Connection refused")
    watch.look()
    assert (watch.found, watch.note) == (before, "")
    watch.look()
    assert (watch.found.seconds, watch.found.restarted) == (1.0, False)


def own_terminal() -> None:
    """A terminal of its own for Ctrl-C to come from, whose signal a background job of a shell ignores."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "ctrl-c"])
def test_the_live_view_runs_in_a_terminal_and_ends_by_a_key(server: Any, key: bytes) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "sglang_patches.cli", "top", "--url", server.url, "--interval", "0.2"]
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, ours)
        process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=own_terminal,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "110", "LINES": "60"},
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        os.close(theirs)
        seen = b""
        deadline = time.monotonic() + 60
        while b"acceptance" not in seen and time.monotonic() < deadline:
            if select.select([ours], [], [], 0.5)[0]:
                seen += os.read(ours, 65536)
        assert b"acceptance" in seen
        os.write(ours, key)
        while process.poll() is None and time.monotonic() < deadline:
            if select.select([ours], [], [], 0.2)[0]:
                with contextlib.suppress(OSError):  # the other side is closed
                    seen += os.read(ours, 65536)
        assert process.returncode == 0
        assert b"\x1b[?1049l" in seen, "the screen that was there before is shown again"
