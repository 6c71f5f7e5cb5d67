"""What made a figure: code state, libraries, topology, environment. Needs neither upstream nor the series engine."""

from __future__ import annotations

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


def code_state() -> dict[str, Any]:
    """`sglang_patches.provenance.code_state`, or why there is none: tuning needs no upstream on the machine."""
    try:
        from sglang_patches.errors import PatchError
        from sglang_patches.provenance import code_state as state
    except ImportError as error:
        return {"unknown": f"the series engine does not import: {error}"}
    try:
        return state()
    except PatchError as error:
        return {"unknown": str(error).splitlines()[0]}


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
    """All of it, JSON-able.

    Args:
        versions: as the ranks told them.
    """
    return {
        "code_state": code_state(),
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
