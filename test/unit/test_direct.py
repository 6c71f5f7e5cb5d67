"""A key goes to the server that was named: not to a proxy, and not where a redirect leads."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from sglang_patches import direct, ready
from sglang_patches.document import server
from sglang_patches.errors import PatchError
from sglang_patches.observe import scrape

KEY = "kimi-Zq7_-sesame"


class Told(HTTPServer):
    """A server that keeps what it is asked, and answers 200, or a redirect to its attribute `to`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str | None]] = []
        self.to = ""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Told

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["Authorization"]))
        self.send_response(302 if self.server.to else 200)
        if self.server.to:
            self.send_header("Location", self.server.to)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Told, Told]]:
    """The server that is named, and another, which the environment names as the proxy."""
    named, other = Told(), Told()
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("http_proxy", other.url)
    importlib.reload(direct)  # urllib reads the environment when an opener is made
    yield named, other
    for made in (named, other):
        made.shutdown()
        made.server_close()


ASK: dict[str, Callable[[str], object]] = {
    "/server_info": lambda url: server.ask(url, KEY),
    "/metrics": lambda url: scrape.fetch(url, KEY),
}


@pytest.mark.parametrize("path", ASK)
def test_a_proxy_gets_no_key(servers: tuple[Told, Told], path: str) -> None:
    named, other = servers
    with pytest.raises(PatchError):  # an empty answer
        ASK[path](named.url)
    assert named.asked == [(path, f"Bearer {KEY}")]
    assert other.asked == []


@pytest.mark.parametrize("path", ASK)
def test_a_redirect_is_not_followed(servers: tuple[Told, Told], path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    named, other = servers
    monkeypatch.delenv("http_proxy")
    named.to = other.url + path
    with pytest.raises(PatchError, match=r"(?s)answered 302.*redirects are not followed"):
        ASK[path](named.url)
    assert other.asked == []


def test_who_waits_for_a_server_asks_that_server(
    servers: tuple[Told, Told], capsys: pytest.CaptureFixture[str]
) -> None:
    named, other = servers
    ready.watch("serve", os.getpid(), named.url, "tiny", ("", ""))
    assert "serve: ready" in capsys.readouterr().out
    assert len(named.asked) == 1
    assert other.asked == []
