"""What the tests of measuring share."""

from __future__ import annotations

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
