"""The code state of a process: upstream's release, the patches that are on, and the hashes of both."""

from __future__ import annotations

import base64
import csv
import glob
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sglang_patches.errors import PatchError
from sglang_patches.series import Patch
from sglang_patches.upstream import digest, locate

_RUNTIME = Path(__file__).with_name("runtime")


def version() -> str | None:
    """The version of this distribution; None where it runs from a source tree on `PYTHONPATH`, not installed."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("sglang-patches")
    except PackageNotFoundError:
        return None


def code_sha256(patch: Patch) -> str:
    """sha256 over all a patch brings: its file, its module in `runtime/`, and the packages it provides."""
    module = patch.name.replace("-", "_")
    files = [_RUNTIME / f"{module}.py", *sorted((_RUNTIME / module).rglob("*.py"))]
    for package in patch.provides.values():
        spec = find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            files += sorted(file for file in Path(folder).rglob("*") if file.suffix in (".py", ".so"))
    lines = [patch.sha256] + [f"{file.name} {digest(file.read_bytes())}" for file in files if file.is_file()]
    return digest("\n".join(lines).encode())


def shared_sha256() -> str:
    """sha256 over code that patches run but no single patch owns: modules and packages `runtime/_*`, what chooses NCCL
    settings, and what reads draft checkpoints."""
    chooses_nccl = [_RUNTIME.with_name("nccl") / f"{name}.py" for name in ("profile", "topology")]
    reads_drafts = sorted(_RUNTIME.with_name("draft").glob("*.py"))
    owned_by_none = [*sorted(_RUNTIME.glob("_*.py")), *sorted(_RUNTIME.glob("_*/**/*.py"))]
    files = [*owned_by_none, *chooses_nccl, *reads_drafts]
    lines = [f"{file.name} {digest(file.read_bytes())}" for file in files]
    return digest("\n".join(lines).encode())


def patch_set(release: str, on: tuple[Patch, ...]) -> dict[str, Any]:
    """One JSON-able document on a set of patches.

    `id` (12 hexadecimal digits) is the same in two processes exactly if release, patches, their order and all of their
    code are.
    """
    patches = [{"name": patch.name, "sha256": code_sha256(patch)} for patch in on]
    lines = [release, shared_sha256()] + [f"{patch['name']} {patch['sha256']}" for patch in patches]
    return {"id": digest("\n".join(lines).encode())[:12], "release": release, "patches": patches}


def code_state() -> dict[str, Any]:
    """The code state of this process, as one JSON-able document.

    Keys: `id`, `release` (upstream's), `patches` (name and sha256 of each that is on, in order), `version` (this
    distribution's), `active` (whether this process loads patched modules at all).

    Raises:
        PatchError: SGLang is not installed, or the selection is not usable.
    """
    from sglang_patches import activate

    overlay = activate.overlay()
    if overlay is not None:
        return {**overlay.patch_set, "version": version(), "active": True}
    upstream = locate()
    if upstream is None:
        raise PatchError("SGLang is not installed here\n  remedy     pip install sglang-patches, which pins it")
    return {**patch_set(upstream.release, ()), "version": version(), "active": False}


def loaded_files() -> list[tuple[str, str, str]]:
    """(module, file, sha256 of the file) of every `sglang` module in this process that was loaded from a file."""
    found = []
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] == "sglang" and (file := getattr(module, "__file__", None)):
            found.append((name, file, digest(Path(file).read_bytes())))
    return found


def upstream_hashes() -> dict[str, str]:
    """Absolute path to sha256 (hexadecimal) of every file of the installed SGLang wheel, as its RECORD states them.

    Raises:
        PatchError: SGLang was not installed from a wheel.
    """
    upstream = locate()
    root = upstream.root if upstream else ""
    records = glob.glob(os.path.join(root, "sglang-*.dist-info", "RECORD")) if root else []
    if len(records) != 1:
        raise PatchError(
            f"{root or 'this environment'}: expected one sglang-*.dist-info/RECORD, found {len(records)}\n"
            f"  remedy     install SGLang from its wheel"
        )
    hashes = {}
    with open(records[0], encoding="utf-8", newline="") as file:
        for path, entry, _size in csv.reader(file):
            if entry.startswith("sha256="):
                raw = entry.removeprefix("sha256=")
                decoded = base64.urlsafe_b64decode(raw + "=" * (-len(raw) % 4))
                hashes[os.path.normpath(os.path.join(root, path))] = decoded.hex()
    return hashes
