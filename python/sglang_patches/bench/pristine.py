"""Makes an interpreter that runs the installed SGLang as if sglang-patches were not there."""

from __future__ import annotations

import os
import site
import subprocess
import sys
from pathlib import Path

from sglang_patches import import_path
from sglang_patches.errors import PatchError

_OURS = "sglang_patches"


def make(folder: Path) -> Path:
    """A virtual environment that finds the packages of this one, and none of its start-up hooks of ours.

    Python runs `.pth` files of an environment's own site folders only, so the folders of this environment are on its
    path while our hook (`sglang_patches.pth`) does not run. Other packages' `.pth` files are copied, since their
    packages may need them. Same packages, same files: nothing else can make a difference.

    Returns: its python.

    Raises:
        PatchError: it cannot be made, or patches are active in it nevertheless.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        made = subprocess.run(
            [sys.executable, "-P", "-m", "venv", "--without-pip", str(folder)], capture_output=True, text=True
        )
        if made.returncode != 0:
            raise PatchError(
                f"{folder}: no virtual environment was made: {(made.stderr or made.stdout).strip()[-300:]}\n"
                f"  remedy     install Python's venv module, or name an interpreter with --python"
            )
    inside = next((folder / "lib").glob("python*/site-packages"))
    for place in _places():
        for file in place.glob("*.pth"):
            if _OURS not in file.name and not _finds_us(file):
                (inside / file.name).write_text(file.read_text())
    # After the copied ones by name, as site reads them in that order.
    (inside / "zz_packages.pth").write_text("".join(f"{place}\n" for place in _places()))
    _prove(python)
    return python.absolute()


def _places() -> list[Path]:
    """Folders that packages are imported from here, in order: PYTHONPATH's without our source tree, then site's."""
    named = [Path(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    places = [place for place in named if not (place / _OURS).is_dir()]
    places += [Path(entry) for entry in site.getsitepackages()]
    return [place.absolute() for place in dict.fromkeys(places) if place.is_dir()]


def _finds_us(file: Path) -> bool:
    """Whether a `.pth` file adds a folder that holds our package, as an editable installation does."""
    lines = [line.strip() for line in file.read_text().splitlines()]
    return any(line and not line.startswith(("#", "import")) and (Path(line) / _OURS).is_dir() for line in lines)


def _prove(python: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"SGLANG_PATCHES": "all", import_path.SAFE: "1"}
    code = (
        "import sys, sglang; print(sglang.__file__, any('sglang_patches' in type(f).__module__ for f in sys.meta_path))"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, env=env)
    words = done.stdout.split()
    if done.returncode != 0 or words[-1:] != ["False"]:
        raise PatchError(
            f"{python}: does not run a pristine SGLang: {(done.stderr or done.stdout).strip()[-300:]}\n"
            f"  remedy     --python names one: a virtual environment with `pip install sglang` alone"
        )
