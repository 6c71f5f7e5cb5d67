"""Provenance documents for tests, complete and small."""

from __future__ import annotations

from typing import Any

from sglang_patches.document.schema import Code, Document, Gpu, Library, Machine, Model, PatchState, Process


def patch(name: str, on: bool = True, sha256: str = "11", reason: str = "") -> PatchState:
    """One patch, applied or off."""
    return PatchState(name=name, on=on, state="applied" if on else "off", reason=reason, sha256=sha256)


def library(name: str = "libnccl.so.2", size: int = 5, sha256: str | None = "aa") -> Library:
    """One loaded library."""
    return Library(name=name, path=f"/lib/{name}", size=size, sha256=sha256)


def made(id: str = "0123456789ab", **changed: Any) -> Document:
    """A document of a server on one GPU, with patches `one` on and `two` off.

    Args:
        changed: fields of the document; `patches`, `files`, `libraries`, and fields of the machine as well.
    """
    patches = changed.pop("patches", [patch("one"), patch("two", on=False)])
    process = Process(
        name="http",
        patch_set_id=id,
        files=changed.pop("files", []),
        libraries=changed.pop("libraries", [library()]),
        nccl=changed.pop("nccl", "2.30.7"),
    )
    host: dict[str, Any] = {
        "cpu": "EPYC", "cpus": 8, "memory_gib": 64.0, "kernel": "6.1", "container": None, "driver": "580",
        "gpus": [Gpu(name="H200", uuid="GPU-1", power_limit=700)], "topology": "1x H200", "topology_fingerprint": "ff",
    }  # fmt: skip
    host |= {name: changed.pop(name) for name in list(changed) if name in host}
    fields: dict[str, Any] = {
        "code": Code(id=id, release=changed.pop("release", "0.5.23"), version="0.1.0", active=True, patches=patches),
        "processes": [process],
        "versions": {"torch": "2.14.1"},
        "command": ["python"],
        "server_args": {"tp_size": 1, "port": 30000},
        "environment": {"NCCL_PROTO": "LL"},
        "models": {"target": Model(path="m", revision=None, config_sha256="c", index_sha256="i")},
        "machine": Machine(**host),
    }
    return Document(**{**fields, **changed})
