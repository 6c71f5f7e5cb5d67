"""Fixtures of the unit tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from .sandbox import Sandbox


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    """A fresh upstream with an empty series."""
    made = Sandbox(tmp_path)
    made.make()
    return made
