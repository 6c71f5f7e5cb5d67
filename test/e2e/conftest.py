"""Servers for the end-to-end tests: each configuration starts once, when the first test asks for it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import lane_table
import pytest
from benchmark.tiny_kimi import reference

from sglang_patches.bench.server import free_port

from .server import REPO, Server, serve_command

# Configuration -> speculation, arguments that `make serve` does not give by itself.
CONFIGURATIONS: dict[str, tuple[bool, list[str]]] = {
    "plain": (False, []),
    "spec": (True, []),
    # The same with the draft that reads the embedding's output.
    "embedding": (True, ["--speculative-draft-model-path", str(REPO / "test/models/tiny-kimi-embedding-eagle3")]),
    # Small prefill chunks too, so that one server shows both.
    "tree": (
        True,
        ["--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "8", "--chunked-prefill-size", "256"],
    ),
}
# Tests run in this order of the servers they need, so that no more than two are alive and none starts twice.
SCHEDULE = [
    set(),
    {"spec"},
    {"embedding", "spec"},
    {"plain", "spec"},
    {"plain"},
    {"plain", "tree"},
    {"tree"},
]
MAX_ALIVE = 2
MODEL = Path(os.environ.get("TEST_MODEL", REPO / "test/models/tiny-kimi"))
# Added to every server's command line, for example to run these tests on another attention backend or on a GPU.
SERVER_ARGS = shlex.split(os.environ.get("TEST_SERVER_ARGS", ""))
DRAFT = Path(os.environ.get("TEST_DRAFT", REPO / "test/models/tiny-kimi-eagle3"))
# Of the held-out prompts, and of the continuation of each, that answers are compared with.
PROMPTS, TOKENS = 20, 128


def _needs(item: pytest.Item) -> set[str]:
    named = {*getattr(item, "fixturenames", ())}
    if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
        # A test may also take a configuration as its parameter and fetch the fixture of that name.
        named |= {value for value in item.callspec.params.values() if isinstance(value, str)}
    return {name for name in CONFIGURATIONS if f"{name}_server" in named}


def _is_here(item: pytest.Item) -> bool:
    return Path(__file__).parent in item.path.parents


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the end-to-end tests by the servers they need, each file's order kept within a group.

    They come after all others; in a worker of pytest-xdist before them, see `pytest_xdist_make_scheduler`.
    """
    ours = [item for item in items if _is_here(item)]
    ours.sort(key=lambda item: SCHEDULE.index(_needs(item)) if _needs(item) in SCHEDULE else len(SCHEDULE))
    others = [item for item in items if not _is_here(item)]
    items[:] = ours + others if hasattr(config, "workerinput") else others + ours


class Servers:
    """The running servers by configuration; starting one more than `MAX_ALIVE` stops the one used longest ago."""

    def __init__(self) -> None:
        self._alive: dict[str, Server] = {}
        self.leftovers: dict[str, list[str]] = {}

    def get(self, name: str) -> Server:
        """The server of this configuration, ready; RuntimeError with the log's end when it does not come up."""
        if name not in self._alive:
            while len(self._alive) >= MAX_ALIVE:
                self.stop(next(iter(self._alive)))
            speculation, arguments = CONFIGURATIONS[name]
            port = free_port()
            draft = DRAFT if speculation else None
            server = Server(serve_command(port, MODEL, draft, [*arguments, *SERVER_ARGS]), port, MODEL, draft, {})
            try:
                server.wait_ready()
            except BaseException:  # Ctrl-C too: nobody else knows of the server yet
                server.stop()
                raise
            print(f"\n{name} server ready after {server.ready_seconds:.0f} s, log: {server.log_path}")
            self._alive[name] = server
        server = self._alive.pop(name)
        self._alive[name] = server
        if server.process.poll() is not None:
            raise RuntimeError(f"the {name} server has ended (exit {server.process.returncode}):\n{server.log_tail()}")
        return server

    def stop(self, name: str) -> None:
        """Stop one server and note what it leaves behind."""
        self.leftovers[name] = self._alive.pop(name).stop()

    def stop_all(self) -> None:
        """Stop every server; AssertionError if any of the session left something behind."""
        for name in list(self._alive):
            self.stop(name)
        # Upstream alone leaves temporary files and semaphores behind.
        left = {name: what for name, what in self.leftovers.items() if what and lane_table.has("clean-stop")}
        assert not left, f"servers left behind: {left}"


_POOL = pytest.StashKey[Servers]()


@pytest.fixture(scope="session")
def servers(pytestconfig: pytest.Config) -> Iterator[Servers]:
    """All servers of the session, for tests that choose by name."""
    pool = pytestconfig.stash[_POOL] = Servers()
    yield pool
    pool.stop_all()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop the servers with the last test that may need one: other tests may follow for long."""
    if _POOL in item.config.stash and nextitem is not None and not _is_here(nextitem):
        item.config.stash[_POOL].stop_all()


@pytest.fixture
def spec_server(servers: Servers) -> Server:
    """EAGLE-3 with a chain draft: 3 steps, topk 1, 4 draft tokens."""
    return servers.get("spec")


@pytest.fixture
def embedding_server(servers: Servers) -> Server:
    """EAGLE-3 as `spec_server`, with the draft that reads the embedding's output."""
    return servers.get("embedding")


@pytest.fixture
def tree_server(servers: Servers) -> Server:
    """EAGLE-3 with a tree draft: 3 steps, topk 4, 8 draft tokens."""
    return servers.get("tree")


@pytest.fixture
def plain_server(servers: Servers) -> Server:
    """No speculation."""
    return servers.get("plain")


class Expected:
    """Prompts as token ids and their greedy continuations by transformers, `TOKENS` each."""

    def __init__(self) -> None:
        rows = [json.loads(line) for line in (REPO / "test/models/prompts.jsonl").read_text().splitlines()]
        self.tokenizer = lane_table.tokenizer(MODEL)
        texts = [row["text"] for row in rows[:: len(rows) // PROMPTS][:PROMPTS]]
        assert len(texts) == PROMPTS
        self.prompts: list[list[int]] = [self.tokenizer(text)["input_ids"] for text in texts]
        self.model = reference.load_text_model(MODEL)
        self.outputs = reference.greedy_each(self.model, self.prompts, TOKENS)


@pytest.fixture(scope="session")
def expected() -> Expected:
    """Once a session: a module's fixture would be made anew each time that the servers' order comes back to it."""
    return Expected()
