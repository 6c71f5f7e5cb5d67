"""The machine and the models of a document."""

from __future__ import annotations

import functools
import glob
import hashlib
import importlib
import json
import os
import platform
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_patches.document.schema import Gpu, Machine, Model
from sglang_patches.document.secrets import mask_text
from sglang_patches.nccl import topology
from sglang_patches.upstream import digest

# Of a sample of weights: how many blocks in all, and their bytes.
_BLOCKS, _BLOCK = 256, 4096
_PATIENCE_S = 2.0


def machine(environ: Mapping[str, str] | None = None, nvml: Any = None) -> Machine:
    """What this process runs on; never starts CUDA.

    Args:
        environ: instead of `os.environ` (``CUDA_VISIBLE_DEVICES``).
        nvml: instead of the module ``pynvml``.
    """
    import psutil

    shown = topology.read(environ, nvml)
    driver, gpus = _gpus(shown, nvml)
    return Machine(
        cpu=_cpu(),
        cpus=len(os.sched_getaffinity(0)),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        kernel=platform.release(),
        container=container(),
        driver=driver,
        gpus=gpus,
        topology=shown.describe(),
        topology_fingerprint=shown.fingerprint(),
    )


def _cpu() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.processor() or platform.machine()


def container(root: Path = Path("/")) -> str | None:
    """The image where the engine tells it (podman), else the kind of container; None where it is none we know."""
    try:
        found = re.search(r'^image="(.*)"$', (root / "run/.containerenv").read_text(), re.MULTILINE)
        return mask_text(found[1]) if found else "podman"
    except OSError:
        pass
    if (root / ".dockerenv").exists():
        return "docker"
    try:
        found = re.search(r"docker|kubepods|containerd|lxc", (root / "proc/1/cgroup").read_text())
    except OSError:
        return None
    return found[0] if found else None


def _gpus(shown: topology.Topology, nvml: Any) -> tuple[str | None, list[Gpu]]:
    """(driver, GPUs); without what NVML does not tell."""
    if not shown.gpus:
        return None, []
    nvml = nvml or importlib.import_module("pynvml")

    def ask(name: str, *arguments: Any) -> Any:
        try:
            told = getattr(nvml, name)(*arguments)
        except (nvml.NVMLError, AttributeError):
            return None
        return told.decode() if isinstance(told, bytes) else told

    nvml.nvmlInit()
    try:
        gpus = []
        for gpu in shown.gpus:
            handle = ask("nvmlDeviceGetHandleByPciBusId", gpu.bus.encode())
            if handle is None:
                gpus.append(Gpu(name=gpu.name))
                continue
            power = ask("nvmlDeviceGetEnforcedPowerLimit", handle)
            gpus.append(
                Gpu(
                    name=gpu.name,
                    uuid=ask("nvmlDeviceGetUUID", handle),
                    sm_clock=ask("nvmlDeviceGetClockInfo", handle, 1),  # NVML_CLOCK_SM
                    memory_clock=ask("nvmlDeviceGetClockInfo", handle, 2),  # NVML_CLOCK_MEM
                    max_sm_clock=ask("nvmlDeviceGetMaxClockInfo", handle, 1),
                    max_memory_clock=ask("nvmlDeviceGetMaxClockInfo", handle, 2),
                    power_limit=None if power is None else power / 1000,  # mW
                )
            )
        return ask("nvmlSystemGetDriverVersion"), gpus
    finally:
        nvml.nvmlShutdown()


def models(server_args: Mapping[str, Any] | None) -> dict[str, Model]:
    """Identity of target and draft that the arguments of a server name."""
    if not server_args:
        return {}
    named = {
        "target": (server_args.get("model_path"), server_args.get("revision")),
        "draft": (
            server_args.get("speculative_draft_model_path"),
            server_args.get("speculative_draft_model_revision"),
        ),
    }
    return {role: model(str(path), revision) for role, (path, revision) in named.items() if path}


def model(path: str, revision: str | None = None) -> Model:
    """Identity of one model: a folder, or a hub name that is in the local cache. Downloads nothing."""
    folder = Path(path) if os.path.isdir(path) else _cached(path, revision)
    if folder is None:
        return Model(path=mask_text(path), revision=revision, config_sha256=None, index_sha256=None)
    # In the hub's cache a snapshot's folder is named by its commit.
    commit = folder.name if folder.parent.name == "snapshots" else None
    indexes = sorted(glob.glob(str(folder / "*.safetensors.index.json")))
    return Model(
        path=mask_text(path),
        revision=commit or revision,
        config_sha256=_sha256(folder / "config.json"),
        index_sha256=_sha256(Path(indexes[0])) if indexes else _weights(folder),
        weights_sample_sha256=_sample(folder),
    )


def _cached(name: str, revision: str | None) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except (ImportError, ValueError):  # no such library; not a hub name
        return None
    return Path(found).parent if isinstance(found, str) else None


def _sha256(file: Path) -> str | None:
    try:
        return digest(file.read_bytes())
    except OSError:
        return None


def _weight_files(folder: Path) -> list[Path]:
    """Those that the loader reads: what the index names, else all of the first format that there is.

    A folder may have more, an optimizer's state or the same weights in another format.
    """
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        return [folder / name for name in sorted(named)]
    for pattern in ("*.safetensors", "pytorch_model*.bin", "*.bin", "*.gguf"):
        if files := sorted(folder.glob(pattern)):
            return files
    return []


def _weights(folder: Path) -> str | None:
    files = _weight_files(folder)
    if not files:
        return None
    return digest(json.dumps([[file.name, file.stat().st_size] for file in files]).encode())


def _sample(folder: Path) -> str | None:
    """A megabyte of the weights is read: all of them would take minutes, and training changes every layer.

    None where a file is missing, or a network's disk takes longer than `_PATIENCE_S` for it: a server is asked too.
    """
    try:
        states = [(file, file.stat()) for file in _weight_files(folder)]
        return _sampled(tuple((str(file), state.st_size, state.st_mtime_ns) for file, state in states))
    except OSError:
        return None


@functools.lru_cache(maxsize=16)  # a server is asked again and again, and a network's disk takes a while
def _sampled(files: tuple[tuple[str, int, int], ...]) -> str | None:
    if not files:
        return None
    each = max(4, _BLOCKS // len(files))
    seen = hashlib.sha256()
    end = time.monotonic() + _PATIENCE_S
    for name, size, _changed in files:
        if time.monotonic() > end:
            return None
        seen.update(json.dumps([os.path.basename(name), size]).encode())
        last = max(0, size - _BLOCK)
        with open(name, "rb", buffering=0) as file:
            for offset in sorted({last * at // (each - 1) for at in range(each)}):
                seen.update(os.pread(file.fileno(), _BLOCK, offset))
    return seen.hexdigest()
