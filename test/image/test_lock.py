"""scripts/audit.py, part of `make lint`: the committed lock passes, and each thing that it is for makes it fail."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
LOCK = "docker/lock/0.5.23-cu13.txt"


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("audit", ROOT / "scripts/audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that are read, to change."""
    shutil.copytree(ROOT / "docker/lock", tmp_path / "docker/lock")
    shutil.copytree(ROOT / "lanes", tmp_path / "lanes")
    for lane in (ROOT / "patches").iterdir():
        (tmp_path / "patches" / lane.name).mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_committed_lock_is_right() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/audit.py"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (ROOT / LOCK).stat().st_size < 1 << 20


@pytest.mark.parametrize(
    ("seen", "instead", "said"),
    [
        (r"^rich==\S+", "rich>=13", "does not pin one version"),
        (r"^rich==\S+", "rich @ https://example.org/rich.whl", "does not pin one version"),
        (r"^rich==(\S+)", r"rich==\1\nrich==\1", "rich is locked twice"),
        (r"\A", "--index-url https://example.org/simple\n", "is no package"),
        (r"\A", "-e .\n", "is no package"),
        (r"^(rich==.*?) \\\n(?:    --hash.*\n)+", r"\1\n", "has 0 hashes"),
        (r"^(rich==.*?) \\\n    --hash=sha256:\w", r"\1 \\\n    --hash=sha256:", "every file needs --hash=sha256:"),
        (r"^rich==.*\n(?:    --hash.*\n)+", "", "has rich None, wanted is 'rich>=13'"),
        (r"^sglang==0.5.23", "sglang==0.5.22", "has sglang 0.5.22, wanted is 'sglang==0.5.23'"),
        (r"^torch==\S+", "torch==2.14.0", "has torch 2.14.0, wanted is 'torch==2.14.1'"),
    ],
)
def test_a_lock_that_is_wrong(audit: ModuleType, checkout: Path, seen: str, instead: str, said: str) -> None:
    text = (checkout / LOCK).read_text()
    changed, count = re.subn(seen, instead, text, count=1, flags=re.MULTILINE)
    assert count == 1
    (checkout / LOCK).write_text(changed)
    problems, _ = audit.audit(checkout)
    assert any(said in problem for problem in problems), problems
    assert audit.main([str(checkout)]) == 1


def test_a_requirement_that_was_added_and_not_locked(audit: ModuleType, checkout: Path) -> None:
    file = checkout / "pyproject.toml"
    file.write_text(file.read_text().replace('  "rich>=13",', '  "rich>=13",\n  "not-locked>=1",'))
    (problem,) = audit.audit(checkout)[0]
    assert problem == f"{LOCK}: has not-locked None, wanted is 'not-locked>=1'; run docker/lock.sh"


def test_the_newest_lane_is_the_one_that_is_locked(audit: ModuleType, checkout: Path) -> None:
    assert audit.audit(checkout)[0] == []
    (checkout / "patches/0.5.100").mkdir()
    with pytest.raises(FileNotFoundError, match=r"lanes/0\.5\.100\.txt"):
        audit.audit(checkout)


# In place of the package index: writes what it is told to, or fails.
UV = """#!/bin/sh
echo "$@" >>"$0.log"
while [ $# -gt 0 ]; do [ "$1" = --output-file ] && to=$2; shift; done
[ -z "$UV_FAILS" ] && echo "${UV_LOCKS:-resolved}" >"$to"
"""


@pytest.fixture
def locking(checkout: Path) -> Path:
    """The checkout with docker/lock.sh in it, a resolver that is none, and fresh locks."""
    shutil.copy(ROOT / "docker/lock.sh", checkout / "docker")
    (checkout / "uv").write_text(UV)
    (checkout / "uv").chmod(0o700)
    assert lock(checkout).returncode == 0
    return checkout


def lock(checkout: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run docker/lock.sh there."""
    environment = {"PATH": f"{checkout}:{os.environ['PATH']}", **more}
    command = [str(checkout / "docker/lock.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_the_lock_script_takes_the_newest_lane_with_its_stack(locking: Path) -> None:
    assert (locking / LOCK).read_text() == "# Made by docker/lock.sh from pyproject.toml; do not edit.\nresolved\n"
    asked = (locking / "uv.log").read_text().splitlines()
    assert asked[0].startswith("pip compile pyproject.toml --constraint lanes/0.5.23.txt --universal ")
    assert asked[1].startswith("pip compile docker/lock/tools.in --universal ")
    (locking / "patches/0.5.100").mkdir()
    done = lock(locking)
    assert (done.returncode, done.stderr.split(":")[1]) == (1, " lanes/0.5.100.txt is missing")


def test_the_lock_script_checks_and_leaves_what_it_cannot_resolve(locking: Path) -> None:
    before = (locking / LOCK).read_bytes()
    assert lock(locking, "--check").returncode == 0
    done = lock(locking, "--check", UV_LOCKS="another")
    assert (done.returncode, f"{LOCK} is not what pyproject.toml resolves to" in done.stderr) == (1, True)
    done = lock(locking, UV_FAILS="1")
    assert (done.returncode, "pyproject.toml was not resolved" in done.stderr) == (1, True)
    assert (locking / LOCK).read_bytes() == before
    assert lock(locking, UV_LOCKS="another").returncode == 0
    assert "another" in (locking / LOCK).read_text()


@pytest.mark.parametrize(
    ("stated", "passes"),
    [
        ("Apache-2.0", True),
        ("LGPL-3.0-only", True),
        ("BSD License", True),
        ("GPL-3.0-or-later", False),
        ("MIT AND AGPL-3.0", False),
        ("Server Side Public License (SSPL)", False),
        ("my own", False),
        ("", False),
    ],
)
def test_licences(audit: ModuleType, monkeypatch: pytest.MonkeyPatch, stated: str, passes: bool) -> None:
    monkeypatch.setattr(audit, "licence", lambda *_: stated)
    assert (audit.unlicensed({"some-package": "1"}) == []) == passes


def test_licences_are_read(audit: ModuleType) -> None:
    assert "MIT" in audit.licence("rich", version("rich"))
    assert "Apache" in audit.licence("humming-kernels", version("humming-kernels"))  # states none, has the file
    assert audit.licence("rich", "0.1") is None
    assert audit.licence("no-such-package", "1") is None


def test_the_lock_script_refuses_what_it_does_not_know() -> None:
    done = subprocess.run(
        [ROOT / "docker/lock.sh", "--frozen"],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"]},
        timeout=60,
    )
    assert (done.returncode, "unknown argument --frozen" in done.stderr) == (2, True)
