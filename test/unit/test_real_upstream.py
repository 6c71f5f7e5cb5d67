"""The shipped series on the installed upstream."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang_patches import provenance, upstream
from sglang_patches.overlay import Overlay
from sglang_patches.selection import select
from sglang_patches.series import load

BUDGET_S = 1


@pytest.fixture(scope="module")
def clean() -> dict[str, str]:
    drop = ("SGLANG_PATCHES", "SGLANG_PATCHES_DIR", "SGLANG_PATCHES_CACHE", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in os.environ.items() if name not in drop}


def test_verify_passes(clean: dict[str, str]) -> None:
    command = [sys.executable, "-m", "sglang_patches.cli", "verify"]
    done = subprocess.run(command, capture_output=True, text=True, env=clean, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_refresh_changes_nothing_that_is_committed(clean: dict[str, str], tmp_path: Path) -> None:
    installed = upstream.locate()
    assert installed is not None
    series = load(installed.release)
    lane = tmp_path / installed.release
    shutil.copytree(series.folder, lane)
    for patch in series.patches:
        command = [sys.executable, "-m", "sglang_patches.cli", "refresh", patch.name]
        env = {**clean, "SGLANG_PATCHES_DIR": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
        assert (done.stdout, done.returncode) == (f"{patch.name}: unchanged\n", 0), done.stderr
    for file in series.folder.iterdir():
        assert (lane / file.name).read_bytes() == file.read_bytes()


SELECTIONS = {
    "none": "with SGLANG_PATCHES=none every module that `import sglang` brings is the wheel's, byte for byte",
    "all": "with every patch on, only the files the series names differ",
}


@pytest.mark.parametrize("selection", SELECTIONS)
def test_what_import_sglang_loads(selection: str, clean: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import sys; path = [getattr(f, '__name__', type(f).__name__) for f in sys.meta_path]\n"
        "import sglang, sglang.srt.entrypoints.openai.protocol, sglang.srt.server_args, json\n"
        "ours = [n for n in sys.modules if n.startswith('sglang_patches.')]\n"
        "from sglang_patches.provenance import loaded_files; print(json.dumps([path, ours, loaded_files()]))"
    )
    env = {**clean, "SGLANG_PATCHES": selection, "SGLANG_PATCHES_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    path, ours, files = json.loads(done.stdout.splitlines()[-1])
    assert len(files) > 40
    hashes = provenance.upstream_hashes()
    differing = {file for _module, file, sha in files if hashes.get(file) != sha}
    if selection == "none":
        assert differing == set()
        assert "PatchFinder" not in path
        assert ours == ["sglang_patches.activate"]
        assert not list(tmp_path.iterdir())
    else:
        assert path[0] == "PatchFinder"
        installed = upstream.locate()
        assert installed is not None
        touched = {path for patch in load(installed.release).patches for path in patch.touches}
        assert all(file.partition("/sglang/")[2] in {p.removeprefix("sglang/") for p in touched} for file in differing)


def test_first_apply_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the series, checking every pre-image and writing every patched copy, cold."""
    installed = upstream.locate()
    assert installed is not None
    taken = []
    for turn in range(3):
        monkeypatch.setenv("SGLANG_PATCHES_CACHE", str(tmp_path / str(turn)))
        started = time.process_time(), time.perf_counter()
        series = load(installed.release)
        overlay = Overlay(installed, select(series, "all"))
        for module in overlay.by_module:
            file = installed.path(overlay.by_module[module]).removesuffix("/__init__.py")  # a package is in its parent
            spec = overlay.find_spec(module, [os.path.dirname(file)])
            assert spec is not None
            assert str(spec.origin).startswith(str(tmp_path))
        taken.append(min(time.process_time() - started[0], time.perf_counter() - started[1]))
    median = statistics.median(taken)
    print(f"first apply: {len(series.patches)} patches, {len(overlay.by_module)} files, {median:.3f} s (median of 3)")
    assert median < BUDGET_S
