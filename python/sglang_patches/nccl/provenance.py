"""What made a figure: provenance document, versions, topology, settings; without upstream, what can be told then."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import sys
from pathlib import Path
from typing import Any

from sglang_patches.nccl.settings import Settings
from sglang_patches.nccl.topology import Topology


def code_sha256() -> str:
    """sha256 over the modules of this package: what measured."""
    total = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        total.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def whole() -> dict[str, Any]:
    """The provenance document of this environment (docs/provenance.md) with the libraries that torch loads; GPUs by a
    digest, since this goes into results.

    Returns: ``document``, None where there can be none, and then ``no_document``, which says why: tuning needs neither
    upstream nor pydantic on the machine.
    """
    with contextlib.suppress(Exception):  # whatever it is, the ranks tell it better
        import torch  # noqa: F401
    try:
        from sglang_patches.document import collect
        from sglang_patches.document.unnamed import unnamed
        from sglang_patches.errors import PatchError
    except ImportError as error:
        return {"document": None, "no_document": f"the series engine does not import: {error}"}
    try:
        this = collect.process("environment", None, collect.on_disk())
        return {"document": unnamed(collect.document(this).model_dump(mode="json"))}
    except PatchError as error:
        return {"document": None, "no_document": str(error).splitlines()[0]}


def driver_version() -> str | None:
    """Of the NVIDIA driver; None where there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            version = pynvml.nvmlSystemGetDriverVersion()
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no module, no driver, no GPU: all mean that there is none to tell
        return None
    return version.decode() if isinstance(version, bytes) else str(version)


def document(settings: Settings, topology: Topology, versions: dict[str, Any]) -> dict[str, Any]:
    """All of it, JSON-able: `whole`, and what it does not hold.

    Args:
        versions: as the ranks told them.
    """
    return {
        **whole(),
        "nccl_package_sha256": code_sha256(),
        "command": ["sglang-patches", "nccl", *sys.argv[1:]],
        "versions": {**versions, "python": platform.python_version(), "driver": driver_version()},
        "topology": topology.describe(),
        "topology_json": topology.to_json(),
        "fingerprint": topology.fingerprint(),
        "environment": {name: settings.environment[name] for name in sorted(settings.by)},
        "set_by": settings.by,
        "kernel": platform.release(),
    }
