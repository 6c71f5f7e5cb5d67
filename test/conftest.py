"""What a test finds must not depend on the shell that starts it: the variables that steer the server and this project
are taken out of the environment before anything reads them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

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


# Files of test/e2e/ whose servers are their own. Those of all others are shared, so one worker has to run them all.
_OWN_SERVERS = (
    "test_bench_ab", "test_pairs", "test_off_is_absent", "test_spec_plan", "test_stop", "test_verify_step",
    "test_cpu_tensor_parallel",
)  # fmt: skip


def scope(nodeid: str) -> str:
    """What one worker of pytest-xdist runs in one go and in this order: a file, or one half of the end-to-end tests."""
    file = Path(nodeid.partition("::")[0])
    if file.parent.name != "e2e":
        return str(file)
    return "own servers" if file.stem in _OWN_SERVERS else "shared servers"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Both halves of the end-to-end tests begin at once (e2e/conftest.py puts them first); files fill what is left."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    config.option.loadscopereorder = False
    return Scheduler(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that do not hold for the installed lane."""
    for item in items:
        whole = getattr(item, "originalname", item.name)
        if why := lane_table.why_not(item.path, whole) or lane_table.why_not(item.path, item.name):
            item.add_marker(pytest.mark.skip(reason=f"lane {lane_table.release()}: {why}"))
