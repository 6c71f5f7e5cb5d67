"""Fixtures of the unit tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from .carried import Ports
from .sandbox import Sandbox


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    """A fresh upstream with an empty series."""
    made = Sandbox(tmp_path)
    made.make()
    return made


@pytest.fixture
def port(tmp_path: Path) -> Ports:
    return Ports(tmp_path)
