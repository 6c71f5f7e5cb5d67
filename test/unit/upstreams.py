"""Small upstream releases as wheels, and patches on them."""

from __future__ import annotations

import base64
import zipfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from sglang_patches import editing
from sglang_patches.port.wheels import Wheel
from sglang_patches.series import Patch, parse_patch

PATH = "sglang/srt/engine.py"
OLD, NEW = "0.5.23", "0.5.24"
TEXT = """\
import os
from sglang.srt import other

LIMIT = 3


class Engine:
    \"\"\"Runs.\"\"\"

    @staticmethod
    def kind():
        return "engine"

    def start(self, port):
        port = port or 1
        self.port = port
        table = {
            "triton": self.kind,
            "flashinfer": self.kind,
        }
        return table

    def stop(self):
        del self.port


def launch(port):
    engine = Engine()
    engine.start(port)
    return engine
"""


def make_wheel(folder: Path, release: str, files: Mapping[str, str]) -> Wheel:
    """Write a wheel of `sglang` with these files and a RECORD."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"sglang-{release}-py3-none-any.whl"
    record = f"sglang-{release}.dist-info/RECORD"
    rows = []
    with zipfile.ZipFile(file, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
            sha = base64.urlsafe_b64encode(sha256(text.encode()).digest()).rstrip(b"=").decode()
            rows.append(f"{path},sha256={sha},{len(text)}\n")
        archive.writestr(record, "".join(rows) + f"{record},,\n")
    return Wheel(str(file), release, str(file))


def make_patch(
    edited: Mapping[str, str],
    upstream: Mapping[str, str],
    name: str = "a-patch",
    header: str = "",
    folder: Path = Path(),
) -> Patch:
    """The patch that makes the `edited` files of upstream's."""
    files = {
        path: (upstream[path].encode(), editing.insertions_between(upstream[path].encode(), text.encode(), path))
        for path, text in edited.items()
    }
    head = (
        f"Description: Test patch {name}\nWhy: ours\nForwarded: no\nRemove-When: never\nDefault: on\n"
        f"Last-Update: 2026-01-31\n{header}"
    )
    file = folder / f"{name}.patch"
    return parse_patch(editing.assemble(head, files, file), file)


def above(text: str, line: str, added: str) -> str:
    """`text` with `added` put in front of its only line `line`."""
    assert text.count(line) == 1, line
    return text.replace(line, added + line)


def behind(text: str, line: str, added: str) -> str:
    """`text` with `added` put behind its only line `line`."""
    assert text.count(line) == 1, line
    return text.replace(line, line + added)
