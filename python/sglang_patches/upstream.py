"""Where the installed SGLang is, and which release it is."""

from __future__ import annotations

import os
import re
import sys
from hashlib import sha256
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

from sglang_patches.errors import PatchError

_VERSION = re.compile(r"^__version__\s*(?:=\s*\w+\s*)?=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
_DIST_INFO = re.compile(r"sglang-(.+)\.dist-info")


class Upstream(NamedTuple):
    """One installed SGLang: `root` is the folder that holds the package `sglang`."""

    root: str
    release: str
    release_from: str

    def path(self, relative: str) -> str:
        """The installed file of an upstream path such as `sglang/srt/server_args.py`."""
        return os.path.join(self.root, *relative.split("/"))

    def read(self, relative: str) -> bytes | None:
        """That file's bytes; None where upstream has no such file."""
        try:
            with open(self.path(relative), "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None


def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
    """The import system's answer for a module as if this distribution were not there."""
    for finder in sys.meta_path:
        if getattr(finder, "is_sglang_patches", False) or not hasattr(finder, "find_spec"):
            continue
        spec = finder.find_spec(name, path, target)
        if spec is not None:
            return spec
    return None


def locate() -> Upstream | None:
    """The SGLang that `import sglang` would load; None where there is none.

    Raises:
        PatchError: it is there and does not say which release it is.
    """
    spec = find_spec("sglang")
    if spec is None or not spec.origin or not spec.submodule_search_locations:
        return None
    package = os.path.dirname(os.path.abspath(spec.origin))
    root = os.path.dirname(package)
    # importlib.metadata would answer as well, at ten times the price of a process's whole activation.
    version_file = os.path.join(package, "_version.py")
    try:
        with open(version_file, encoding="utf-8") as file:
            match = _VERSION.search(file.read())
        if match:
            return Upstream(root, match[1], version_file)
    except FileNotFoundError:
        pass
    found = [match[1] for match in map(_DIST_INFO.fullmatch, sorted(os.listdir(root))) if match]
    if len(found) == 1:
        return Upstream(root, found[0], os.path.join(root, f"sglang-{found[0]}.dist-info"))
    raise PatchError(
        f"cannot tell which SGLang release is installed in {root}\n"
        f"  seen       no version in {version_file}, and {len(found)} sglang-*.dist-info folders\n"
        f"  expected   a released sglang wheel\n"
        f"  remedy     reinstall SGLang, or run it without patches: SGLANG_PATCHES=none"
    )


def digest(data: bytes) -> str:
    """sha256 in hexadecimal, as headers and messages carry it."""
    return sha256(data).hexdigest()
