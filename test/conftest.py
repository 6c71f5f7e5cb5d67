"""What a test finds must not depend on the shell that starts it: the variables that steer the server and this project
are taken out of the environment before anything reads them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# By prefix. Where a checkout's patches and its cache are is no behaviour, so these two stay.
_STEERING = (
    "SGLANG_",
    "SGL_",
    "NCCL_",
    "OMP_",
    "MKL_NUM",
    "MAKE",  # a make that a test starts is nobody's part
    "MFLAGS",
    "COLUMNS",
    "LINES",
    "FORCE_COLOR",
    "PYTHONDONTWRITEBYTECODE",
)
_PLACES = ("SGLANG_PATCHES_CACHE", "SGLANG_PATCHES_DIR")

for _name in list(os.environ):
    if _name.startswith(_STEERING) and _name not in _PLACES:
        del os.environ[_name]

# The models are small: a second thread gains nothing, and where other processes have its core, the first one waits for
# it in every matrix product, thirty times as long as the product takes.
os.environ["OMP_NUM_THREADS"] = "1"

# Behind the variables above: it reads the patches.
import lane_table  # noqa: E402


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the files that do not hold for the installed lane, which may not even import there."""
    return True if collection_path.suffix == ".py" and lane_table.why_not(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that do not hold for the installed lane."""
    for item in items:
        whole = getattr(item, "originalname", item.name)
        if why := lane_table.why_not(item.path, whole) or lane_table.why_not(item.path, item.name):
            item.add_marker(pytest.mark.skip(reason=f"lane {lane_table.release()}: {why}"))
