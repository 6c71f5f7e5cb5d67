"""Grids, models and records of `bench verify-step` for tests: small, with numbers that are worked by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_patches.bench.verify_step import grid, journal

TARGET = {
    "dense": 1000, "captured_states": 0, "embedding_row": 10, "experts": {"1": 100, "2": 200},
    "kv_token": 6, "vocabulary": 50,
}  # fmt: skip
DRAFT = {"dense": 70, "captured_states": 30, "embedding_row": 10, "experts": {}, "kv_token": 2, "vocabulary": 40}
MODELS = {"target": TARGET, "draft": DRAFT}
EXPERTS = {"verify": {"1": 5.5, "2": 3.0}}


def made_grid(**named: Any) -> grid.Grid:
    given: dict[str, Any] = {"batch_sizes": [1, 8], "contexts": [1024, 32768], "modes": ["graph", "eager"]}
    return grid.Grid(**{**given, "rounds": 2, "tokens": 32, **named})


def cycles(engine: int, run: str, mode: str, values: list[float], turn: int = 1) -> dict[str, Any]:
    parts = {"decode": 0.75} if engine == 0 else {"draft_decode": 0.25, "verify": 0.5, "draft_extend": 0.25}
    fixed = {**parts, "sampling": 0.125, "host_gap": 0.0625}
    ms = {**{name: [value] * len(values) for name, value in fixed.items()}, "cycle": values}
    cell = {"batch_size": 2, "context": 100, "mode": mode, "round": turn}
    return {
        "record": "cycles",
        "engine": engine,
        "run": run,
        **cell,
        "prefilled": 1,
        "ms": ms,
        "graphs": {"Runner": [int(mode == "graph"), 1]},
    }


def records(engine: int, run: str, values: list[float], done: bool = True) -> list[dict[str, Any]]:
    key = "verify" if engine else "decode"
    facts = {"models": MODELS, "device": "a device", "copy": {"gb_per_s": 0.001, "copied_mib": 64}}
    common = {"engine": engine, "run": run}
    command = ["sglang-patches", "bench", "verify-step", "--out", "a b"]
    head = {
        "arguments": ["--some"],
        "command": command,
        "start_seconds": 1.5,
        "facts": facts,
        "document": None,
        "no_document": "a test",
    }
    routing = {"experts": {key: EXPERTS["verify"]}, "forwards": {key: 3}, "failed": "", "contexts": [100, 112]}
    made = [
        {"record": "engine", **common, **head},
        {"record": "routing", **common, "batch_size": 2, "context": 100, **routing},
        cycles(engine, run, "graph", values),
        cycles(engine, run, "graph", [values[0]], turn=2),
        cycles(engine, run, "eager", [40.0]),
    ]
    return [*made, {"record": "done", **common}] if done else made


def write(folder: Path, of: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    for record in of:
        journal.append(folder, record)
