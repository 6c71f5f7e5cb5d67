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
