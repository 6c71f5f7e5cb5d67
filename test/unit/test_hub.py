"""Whether the hub can be reached: by a real socket, through proxies, and how long it is tried."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from sglang_patches import hub

CLOSED = "http://127.0.0.1:9"  # the discard service, which nobody runs


@pytest.fixture
def listening() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(hub.time, "sleep", slept.append)
    return slept


def test_a_hub_that_accepts_a_connection_is_asked_once(listening: str, waits: list[float]) -> None:
    begun = time.monotonic()
    assert hub.unreachable({"HF_ENDPOINT": f"{listening}/a/mirror/"}) == ""
    assert waits == [0.0]
    assert time.monotonic() - begun < 1


def test_one_that_is_not_there_is_told_with_its_reason_after_three_tries(waits: list[float]) -> None:
    assert hub.unreachable({"HF_ENDPOINT": CLOSED}) == f"{CLOSED} cannot be reached: Connection refused"
    assert waits == [0.0, 1.0, 2.0]
    told = hub.unreachable({"HF_ENDPOINT": "https://me:secret@nobody.invalid"})
    assert told.startswith("https://nobody.invalid cannot be reached: ")
    assert "secret" not in told


def test_one_that_comes_up_meanwhile_is_reached(monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    tries = iter([socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), OSError(101, "x"), None])

    def connect(_place: tuple[str, int], _timeout: float) -> socket.socket:
        if (error := next(tries)) is not None:
            raise error
        return socket.socket()

    monkeypatch.setattr(hub.socket, "create_connection", connect)
    assert hub.unreachable({}) == ""
    assert len(waits) == 3


def test_what_drops_packets_is_tried_once(monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    now, asked = [0.0], []

    def connect(place: tuple[str, int], timeout: float) -> socket.socket:
        asked.append((place, timeout))
        now[0] += timeout
        raise TimeoutError("timed out")

    monkeypatch.setattr(hub.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(hub.socket, "create_connection", connect)
    assert hub.unreachable({}) == "https://huggingface.co cannot be reached: timed out"
    assert asked == [(("huggingface.co", 443), 10.0)]
    hub.unreachable({"HF_HUB_ETAG_TIMEOUT": "20", "HF_ENDPOINT": "http://mirror"})
    assert asked[1:] == [(("mirror", 80), 20.0)]


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
def test_a_proxy_that_is_there_may_know_the_hub(listening: str, waits: list[float], variable: str) -> None:
    elsewhere = {"HF_ENDPOINT": "http://nobody.invalid"}
    assert hub.unreachable({**elsewhere, variable: listening}) == ""
    assert hub.unreachable({**elsewhere, variable: listening.removeprefix("http://")}) == ""
    told = hub.unreachable({**elsewhere, variable: "http://me:secret@127.0.0.1:9"})
    assert f"; {variable}=http://127.0.0.1:9 cannot be reached: Connection refused" in told
    assert "secret" not in told


def test_a_proxy_does_not_hide_a_hub_that_is_near(listening: str, waits: list[float]) -> None:
    assert hub.unreachable({"HF_ENDPOINT": listening, "http_proxy": CLOSED}) == ""


@pytest.mark.parametrize("endpoint", ["mirror.local", "http://[", "http://a:port", "file:///srv/models"])
def test_of_what_is_no_url_nothing_is_told(endpoint: str, waits: list[float]) -> None:
    assert hub.unreachable({"HF_ENDPOINT": endpoint}) == ""
    assert waits == []
