"""Patches work in each other's presence and absence: real servers over a covering array of the series.

Every two patches meet with both on, both off and either one on, in as few servers as that takes (Katona 1973, "Two
applications of Sperner type theorems": m + 1 servers are enough for binom(m, floor(m / 2) + 1) patches). Each gives
the tokens that transformers gives.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from benchmark.tiny_kimi import reference
from transformers import AutoTokenizer

from sglang_patches.bench.server import free_port
from sglang_patches.series import load
from sglang_patches.upstream import locate

from .conftest import DRAFT, MODEL, SERVER_ARGS
from .server import Server, serve_command
from .test_lossless import generate

TOKENS = 24
# The server that has every patch on also changes its draft steps by batch size, as `spec plan` has them changed.
PLANNED = {"1": 3, "2": 1, "4": 0}
TOGETHER = ["The river", "In the morning", "Winter came", "My friend said", "A small bird"]
# Without these, upstream serves this checkpoint on a CPU wrongly or not at all.
ALWAYS = {"cpu-eagle3", "torch-native-mla", "kimi-k25-native-processor"}


def names() -> list[str]:
    """The patches of the installed release that can be left out here."""
    installed = locate()
    assert installed is not None
    return [patch.name for patch in load(installed.release).patches if patch.name not in ALWAYS]


def rows(columns: int) -> list[set[int]]:
    """Which columns are off in each row; with a row that has none off, every pair sees all four combinations.

    Each column is off in its own choice of floor(m / 2) + 1 of m rows: two such choices overlap, and neither holds the
    other.
    """
    m = next(m for m in itertools.count(1) if math.comb(m, m // 2 + 1) >= columns)
    chosen = itertools.islice(itertools.combinations(range(m), m // 2 + 1), columns)
    off: list[set[int]] = [set() for _ in range(m)]
    for column, where in enumerate(chosen):
        for row in where:
            off[row].add(column)
    return off


SELECTIONS = ["all"] + [
    ",".join(["all", *(f"-{names()[column]}" for column in sorted(off))]) for off in rows(len(names()))
]


@pytest.mark.parametrize("columns", [2, 3, 10, 15, 16, 35])
def test_every_pair_meets_in_every_combination(columns: int) -> None:
    table = [set[int](), *rows(columns)]
    for one, other in itertools.combinations(range(columns), 2):
        assert len({(one in off, other in off) for off in table}) == 4


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], list[int]]]:
    """Prompts and their greedy continuations by transformers."""
    tokenizer, model = AutoTokenizer.from_pretrained(MODEL), reference.load_text_model(MODEL)
    prompts = [tokenizer(text)["input_ids"] for text in TOGETHER]
    return [(ids, reference.greedy(model, ids, TOKENS)) for ids in prompts]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of a server that changes its draft steps by batch size."""
    file: Path = tmp_path_factory.mktemp("plan") / "plan.json"
    file.write_text(json.dumps({size: {"candidate_steps": [steps]} for size, steps in PLANNED.items()}))
    return ["--speculative-adaptive", "--speculative-adaptive-config", str(file)]


@pytest.fixture(scope="module")
def started() -> Iterator[dict[str, Server]]:
    """Servers by selection, those that have been started and not ended yet."""
    servers: dict[str, Server] = {}
    yield servers
    for server in servers.values():
        server.kill()


@pytest.fixture
def server(selection: str, started: dict[str, Server], planned: list[str]) -> Iterator[Server]:
    """The selection's server, ready; the next one's starts meanwhile, for which one core would be idle."""
    at = SELECTIONS.index(selection)
    for wanted in SELECTIONS[at : at + 2]:
        if wanted not in started:
            port = free_port()
            more = planned if wanted == "all" else []
            command = serve_command(port, MODEL, DRAFT, ["--skip-server-warmup", *more, *SERVER_ARGS])
            started[wanted] = Server(command, port, MODEL, DRAFT, {"SGLANG_PATCHES": wanted})
    yield started[selection].wait_ready()
    started.pop(selection).kill()


@pytest.mark.parametrize("selection", SELECTIONS, ids=range(len(SELECTIONS)))
def test_served_with_others_off(selection: str, server: Server, expected: list[tuple[list[int], list[int]]]) -> None:
    print(selection)
    off = {word[1:] for word in selection.split(",")[1:]}
    told = re.search(r"patch set \w+ on sglang \S+, pid \d+: (.+)", server.log())
    assert told is not None
    on = {word.strip() for word in told[1].split(";")[0].split(",")}
    assert on == ({*names()} | ALWAYS) - off
    ids, wanted = expected[0]
    assert generate(server, ids, TOKENS) == wanted
    if selection == "all":
        _steps_by_batch_size_lose_nothing(server, expected)


def _steps_by_batch_size_lose_nothing(server: Server, expected: list[tuple[list[int], list[int]]]) -> None:
    # Each ends at another time, so that the batch shrinks by and by.
    lengths = [TOKENS - 2 * at for at in range(len(expected))]
    for together in (len(expected), 2, 1):
        # One request: several come so far apart on a busy machine that the first are answered before the last come.
        params = [{"temperature": 0, "max_new_tokens": length, "ignore_eos": True} for length in lengths[:together]]
        asked = {"input_ids": [ids for ids, _ in expected[:together]], "sampling_params": params}
        answers = httpx.post(f"{server.url}/generate", json=asked, timeout=300).raise_for_status().json()
        wanted = [tokens[:length] for (_, tokens), length in zip(expected[:together], lengths, strict=False)]
        assert [answer["output_ids"] for answer in answers] == wanted
    taken = {int(steps) for steps in re.findall(r"Switch adaptive runtime state: steps \d+ -> (\d+)", server.log())}
    assert taken == set(PLANNED.values())
