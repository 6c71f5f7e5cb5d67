"""What the tests of measuring share."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_patches.bench import options, workload
from sglang_patches.bench.turns import Setup
from sglang_patches.series import Series

from . import fake_server

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def series() -> Series:
    """The real one."""
    return options.installed_series()


@pytest.fixture
def fake(tmp_path: Path) -> str:
    """The word of a selection that has the fake server serve."""
    return f"python:{fake_server.interpreter(tmp_path)}"


@pytest.fixture
def setup(tmp_path: Path) -> Callable[..., Setup]:
    """Makes a setup of two short prompts into tmp_path/out."""

    def make(count: int = 2, output_tokens: int = 8, warm_up: int = 0, **changed: object) -> Setup:
        drawn = workload.draw(4, count, 4096, seed=1)
        given = {
            "model": str(REPO / "test/models/tiny-kimi"), "draft": "", "tp": 1, "server_args": (), "prompts": drawn,
            "workload": drawn.workload(output_tokens, 1, warm_up), "folder": tmp_path / "out", "ready_timeout": 60.0,
            "turn_timeout": 60.0,
        }  # fmt: skip
        return Setup(**{**given, **changed})  # type: ignore[arg-type]

    return make


def killed_after(turns: int, words: list[str], out: Path) -> None:
    """Run a command that measures into `out`, and kill it as soon as it has kept so many turns."""
    ours = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    kept = out / "turns.jsonl"
    try:
        deadline = time.monotonic() + 900
        while not kept.exists() or len(kept.read_text().splitlines()) < turns:
            assert ours.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        ours.kill()
        ours.wait()
