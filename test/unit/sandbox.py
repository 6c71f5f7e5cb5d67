"""A small upstream of our own with a series on it, and interpreters that run there.

The engine cannot tell it from SGLang: it is a package `sglang` that says it is release 0.5.23, first on the path. The
tests on the real upstream are in test_real_upstream.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

RELEASE = "0.5.23"
FILES = {
    "sglang/__init__.py": "NAME = 'sglang'\n",
    "sglang/_version.py": f"__version__ = version = '{RELEASE}'\n",
    "sglang/launch.py": (
        "import sys\n\nWORDS = ['upstream']\nif __name__ == '__main__':\n    print(*WORDS, *sys.argv[1:])\n"
    ),
    "sglang/srt/one.py": "def one():\n    return 1\n\n\ndef two():\n    return 2\n",
    "sglang/srt/data.py": (
        "from pathlib import Path\n\nHERE = Path(__file__).resolve().parent\nTEXT = (HERE / 'data.txt').read_text()\n"
        "UP = (HERE.parent / 'up.txt').read_text()\n"
    ),
    "sglang/srt/data.txt": "data\n",
    "sglang/up.txt": "up\n",
    "sglang/srt/pack/__init__.py": "from sglang.srt.pack import inner\n",
    "sglang/srt/pack/inner.py": "VALUE = 'inner'\n",
}


@dataclass(frozen=True)
class Sandbox:
    """Folders of one test: `site` holds upstream, `patches` the series, `cache` the patched copies."""

    root: Path

    @property
    def site(self) -> Path:
        return self.root / "site"

    @property
    def lane(self) -> Path:
        return self.root / "patches" / RELEASE

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    def make(self) -> None:
        """Write upstream and an empty series."""
        for path, text in FILES.items():
            (self.site / path).parent.mkdir(parents=True, exist_ok=True)
            (self.site / path).write_text(text)
        self.lane.mkdir(parents=True)
        (self.lane / "series").write_text("# test series\n")

    def add(self, name: str, hunks: Mapping[str, Mapping[int, str]], header: str = "Default: on\n") -> Path:
        """Add a patch that inserts, at each path, text after the line numbers given."""
        images, diffs = "", ""
        for path, inserted in hunks.items():
            data = (self.site / path).read_bytes()
            images += f"Pre-Image: {sha256(data).hexdigest()} {path}\n"
            diffs += f"--- a/{path}\n+++ b/{path}\n"
            added = 0
            for after, text in inserted.items():
                lines = text.splitlines()
                count = "" if len(lines) == 1 else f",{len(lines)}"
                diffs += f"@@ -{after},0 +{after + 1 + added}{count} @@\n" + "".join(f"+{line}\n" for line in lines)
                added += len(lines)
        file = self.lane / f"{name}.patch"
        file.write_text(
            f"Description: Test patch {name}\nWhy: ours\nForwarded: not-needed\nRemove-When: never\n"
            f"Last-Update: 2026-01-31\n{header}{images}\n{diffs}"
        )
        with (self.lane / "series").open("a") as series:
            series.write(f"{name}.patch\n")
        return file

    def environment(self, selection: str | None = None, **more: str) -> dict[str, str]:
        """The variables of an interpreter that sees this sandbox."""
        drop = ("SGLANG_PATCHES", "PYTHONDONTWRITEBYTECODE")
        inherited = {name: value for name, value in os.environ.items() if name not in drop}
        ours = {
            "PYTHONPATH": str(self.site),
            "SGLANG_PATCHES_DIR": str(self.lane.parent),
            "SGLANG_PATCHES_CACHE": str(self.cache),
        }
        return {**inherited, **ours, **({} if selection is None else {"SGLANG_PATCHES": selection}), **more}

    def run(
        self, *arguments: str, selection: str | None = None, python: str = sys.executable, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `python ARGUMENTS` here; code to execute goes after `-c`."""
        environment = self.environment(selection, **more)
        return subprocess.run([python, *arguments], env=environment, capture_output=True, text=True, timeout=300)

    def cli(self, *arguments: str, selection: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run the command line tool here."""
        return self.run("-m", "sglang_patches.cli", *arguments, selection=selection)

    def copies(self) -> list[Path]:
        """The patched copies in the cache."""
        return sorted(file for file in self.cache.rglob("*.py") if not file.is_symlink())


def message(done: subprocess.CompletedProcess[str]) -> str:
    """What a refusing process says, without the time-stamped log lines."""
    return "\n".join(line for line in done.stderr.splitlines() if not line.startswith("[20"))


def lines(*entries: str) -> str:
    """Join the lines of an expected message."""
    return "\n".join(entries)


def words(text: str) -> Sequence[str]:
    """Split on white space, for comparisons that do not care for table layout."""
    return text.split()
