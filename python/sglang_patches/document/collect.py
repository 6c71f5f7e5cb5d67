"""Collecting a document from the process that asks.

Cheap by default: nothing is imported that is not loaded, and hashing shared libraries, which are gigabytes, ends after
a fraction of a second. Hashes are kept in `<SGLANG_PATCHES_CACHE>/libraries.json` by path, size and time of change, so
that what one process has hashed costs the others nothing; not where another user could write that file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from sglang_patches import activate, cache, provenance
from sglang_patches.document import machine, secrets
from sglang_patches.document.schema import Code, Document, File, Library, PatchState, Process
from sglang_patches.errors import PatchError
from sglang_patches.trust import distrusted
from sglang_patches.upstream import Upstream, digest, locate

_DISTRIBUTIONS = {
    "torch": ("torch",),
    "triton": ("triton",),
    "flashinfer": ("flashinfer-python",),
    "sgl_kernel": ("sglang-kernel", "sgl-kernel"),
    "transformers": ("transformers",),
    "nccl_package": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
}
# What computes, talks between GPUs, or allocates; not the interpreter's own modules.
_RELEVANT = re.compile(
    r"/(torch|nvidia|triton|flashinfer\w*|sgl_kernel\w*|deep_gemm|deep_ep|flash_mla|flashmla|nvshmem|vllm|xformers)/|"
    r"/lib(nccl|cuda|cublas|cudnn|nvidia|nvrtc|nvshmem|nvJitLink|torch|c10|gomp|iomp|omp|mkl|tcmalloc|jemalloc|ucp|"
    r"ibverbs|mlx5)[^/]*$"
)
# Below what sha256 does on any server's core, so that a budget in seconds holds.
_BYTES_PER_SECOND = 3e8
#: Seconds a server may spend on hashing when it is first asked.
SERVER_BUDGET = 0.3


def _installed() -> Upstream:
    found = locate()
    if found is None:
        raise PatchError("SGLang is not installed here\n  remedy     pip install sglang-patches, which pins it")
    return found


def code() -> Code:
    """Release and patches of this process. Raises PatchError where selection or installation is unusable."""
    from sglang_patches import series
    from sglang_patches.status import states

    upstream = _installed()
    state = provenance.code_state()
    on = {patch["name"] for patch in state["patches"]}
    patches = [
        PatchState(
            name=patch.name, on=patch.name in on, state=said, reason=reason, sha256=provenance.code_sha256(patch)
        )
        for patch, said, reason in states(upstream, series.load(upstream.release))
    ]
    return Code(
        id=state["id"], release=state["release"], version=state["version"], active=state["active"], patches=patches
    )


def loaded() -> list[File]:
    """The loaded files of `sglang` that are not what the wheel's RECORD says."""
    root, recorded = _installed().root, provenance.upstream_hashes()
    files = []
    for module, file, sha in provenance.loaded_files():
        place = os.path.abspath(file)
        if installed_file := place.startswith(os.path.join(root, "sglang") + os.sep):
            path = os.path.relpath(place, root).replace(os.sep, "/")
        else:  # a patched copy in the cache
            path = module.replace(".", "/") + ("/__init__.py" if file.endswith("/__init__.py") else ".py")
        if sha != recorded.get(os.path.join(root, *path.split("/"))):
            files.append(File(path=path, sha256=sha, by="edit" if installed_file else "patch"))
    return files


def on_disk() -> list[File]:
    """The files of the installed `sglang` that are not what RECORD says, and those that patches replace."""
    root, recorded = _installed().root, provenance.upstream_hashes()
    overlay = activate.overlay()
    files = []
    for place, sha in sorted(recorded.items()):
        path = os.path.relpath(place, root).replace(os.sep, "/")
        if not path.startswith("sglang/"):
            continue
        try:
            data = Path(place).read_bytes()
        except FileNotFoundError:
            files.append(File(path=path, sha256=None, by="edit"))
            continue
        if digest(data) != sha:
            files.append(File(path=path, sha256=digest(data), by="edit"))
        if overlay is not None and path in overlay.by_path:
            patched = overlay.patched(path, overlay.check(path, data, place))
            files.append(File(path=path, sha256=digest(patched), by="patch"))
    return files


def mapped(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Paths of the relevant shared libraries this process has loaded; none where there is no /proc."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return []
    files = {line.split(maxsplit=5)[-1] for line in lines if ".so" in line and line.count("/")}
    return sorted(file for file in files if _RELEVANT.search(file) and os.path.isfile(file))


def libraries(budget: float | None = None) -> list[Library]:
    """The shared libraries of this process, smallest first into the hashing.

    Args:
        budget: seconds to spend on hashing what no process has hashed yet; None: as long as it takes.
    """
    end = None if budget is None else time.monotonic() + budget
    known, new, out = _known(), {}, []
    for file in sorted(mapped(), key=lambda path: (os.path.getsize(path), path)):
        stat = os.stat(file)
        key = f"{file}|{stat.st_size}|{stat.st_mtime_ns}"
        sha = known.get(key)
        if sha is None and (end is None or time.monotonic() + stat.st_size / _BYTES_PER_SECOND < end):
            with open(file, "rb") as data:
                sha = new[key] = hashlib.file_digest(data, "sha256").hexdigest()
        out.append(Library(name=os.path.basename(file), path=file, size=stat.st_size, sha256=sha))
    if new:
        _remember({**_known(), **new})
    return sorted(out, key=lambda library: (library.name, library.path))


def _known() -> dict[str, str]:
    try:
        file = os.path.join(cache.folder(), "libraries.json")
        if distrusted(file):
            return {}
        data = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _remember(hashes: dict[str, str]) -> None:
    # A cache that cannot be written costs time only.
    with contextlib.suppress(OSError):
        folder = cache.folder()
        kept = os.path.join(folder, "libraries.json")
        if distrusted(kept):
            return
        cache.make_folder(folder)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as file:
            json.dump(hashes, file)
        os.replace(file.name, kept)


def nccl_version() -> str | None:
    """Of the NCCL that is loaded, as it tells itself; None where none is."""
    from sglang_patches.nccl.bindings import Nccl, NcclError

    for file in mapped():
        if os.path.basename(file).startswith("libnccl.so"):
            with contextlib.suppress(NcclError, OSError, AttributeError):
                return Nccl(Path(file)).version()
    return None


def process(name: str, budget: float | None = SERVER_BUDGET, files: list[File] | None = None) -> Process:
    """What this process runs.

    Args:
        name: see `schema.Process`.
        budget: see `libraries`.
        files: instead of those that are loaded.
    """
    return Process(
        name=name,
        patch_set_id=provenance.code_state()["id"],
        files=loaded() if files is None else files,
        libraries=libraries(budget),
        nccl=nccl_version(),
    )


def versions() -> dict[str, str | None]:
    """Versions of Python and of the installed libraries that matter, and the CUDA that a loaded torch was built for."""
    out: dict[str, str | None] = {"python": sys.version.split()[0]}
    for name, candidates in _DISTRIBUTIONS.items():
        out[name] = next(_versions(candidates), None)
    torch = sys.modules.get("torch")
    if torch is not None:
        out["torch"] = str(torch.__version__)  # with the local part, such as +cu130, which metadata may lack
        out["cuda"] = torch.version.cuda
    return out


def _versions(candidates: tuple[str, ...]) -> Iterator[str]:
    for candidate in candidates:
        with contextlib.suppress(PackageNotFoundError):
            yield installed(candidate)


def document(
    this: Process, server_args: Mapping[str, Any] | None = None, with_time: bool = False, with_host: bool = False
) -> Document:
    """The document of this process.

    Args:
        this: as `process` tells it.
        server_args: resolved arguments, if it is a server.
        with_time, with_host: add when and where, which make two documents of one state differ.

    Raises:
        PatchError: selection or installation is unusable.
    """
    return Document(
        code=code(),
        processes=[this],
        versions=versions(),
        command=secrets.command(sys.orig_argv),
        server_args=None if server_args is None else secrets.mask(dict(server_args)),
        environment=secrets.environment(os.environ),
        models=machine.models(server_args),
        machine=machine.machine(),
        time=datetime.now(UTC).isoformat(timespec="seconds") if with_time else None,
        host=socket.gethostname() if with_host else None,
    )


def environment(with_time: bool = False, with_host: bool = False) -> Document:
    """The document of an environment: every file of upstream on disk, and the libraries that torch loads.

    Takes seconds: it imports torch, triton and `sgl_kernel` (where they import) and hashes what they load.
    """
    for name in ("torch", "triton", "sgl_kernel"):
        with contextlib.suppress(Exception):  # whatever it is, a library that does not load is not there
            __import__(name)
    return document(process("environment", None, on_disk()), None, with_time, with_host)
