"""Reading this machine into a `Host`. Every source fails softly: None, and `Host.unread` says why.

Nothing starts CUDA in this process. What torch and sgl_kernel load is seen in a process of their own (`probe`).
"""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, TypeVar

from sglang_patches import import_path, selection
from sglang_patches.doctor import pci
from sglang_patches.doctor.host import Gpu, Host, Kernels, Library, Node, Patch, Refusal, Serving
from sglang_patches.document import machine, secrets
from sglang_patches.errors import PatchError
from sglang_patches.nccl import topology

T = TypeVar("T")
_OfNvml = tuple[str | None, str | None, tuple[Gpu, ...], tuple[Refusal, ...]]

# nvmlGpuP2PStatus_t of nvml.h; 0 is OK.
_REFUSALS = {
    1: "chipset not supported",
    2: "GPU not supported",
    3: "topology not supported",
    4: "disabled by a driver option",
    5: "not supported",
    6: "unknown",
}
_ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "LD_LIBRARY_PATH", "LD_PRELOAD",
    "SGLANG_NCCL_SO_PATH", "SGLANG_PATCHES", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE",
    "NCCL_CUMEM_ENABLE", "NCCL_CUMEM_HOST_ENABLE", "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE",
)  # fmt: skip
_DISTRIBUTIONS = ("sglang", "torch", "sglang-kernel", "flashinfer-python", "transformers", "triton")
_NCCL = re.compile(r"nvidia-nccl-cu\d+$")
_PROBE_SECONDS = 180


class _Reader:
    """Runs one source after another and remembers why one failed."""

    def __init__(self) -> None:
        self.unread: dict[str, str] = {}

    def __call__(self, source: str, ask: Callable[[], T], otherwise: T) -> T:
        try:
            return ask()
        except Exception as error:  # whatever a driver, a kernel or a container makes of it, the other checks go on
            self.unread[source] = f"{error}" if isinstance(error, (PatchError, OSError)) else repr(error)
            return otherwise


def read(serving: Serving, environ: Mapping[str, str] | None = None, nvml: Any = None, root: Path = Path("/")) -> Host:
    """This machine.

    Args:
        serving: what is to be served, as `models.serving` reads it.
        environ: of the server; by default that of this process.
        nvml: instead of the module ``pynvml``.
        root: of /proc, /sys and /dev.
    """
    environ = os.environ if environ is None else environ
    ask = _Reader()
    shown = ask(
        "GPUs",
        lambda: topology.read(environ, nvml, root / "sys/bus/pci/devices"),
        topology.Topology(absent="could not be read"),
    )
    of_nvml: _OfNvml = (None, None, (), ())
    driver, driver_cuda, gpus, refusals = ask("NVML", lambda: _nvml(shown, nvml), of_nvml)
    gpus = ask("PCIe links", lambda: _own_links(gpus, shown, root), gpus)
    found: dict[str, Any] = ask("torch and sgl_kernel", lambda: probe(environ), {})
    no_patches: tuple[tuple[Patch, ...], str | None] = ((), None)
    patches, patch_problem = ask("patches", lambda: _patches(environ), no_patches)
    unknown: tuple[int | None, int | None] = (None, None)
    shm, shm_free = ask("/dev/shm", lambda: _size(root / "dev/shm"), unknown)
    cpus: set[int] = ask("CPUs", lambda: os.sched_getaffinity(0), set())
    return Host(
        topology=shown,
        gpus=gpus,
        refusals=refusals,
        driver_present=selection.has_gpu(),
        driver=driver,
        driver_cuda=driver_cuda,
        torch_cuda=found.get("cuda"),
        cuda_problem=found.get("cuda_problem"),
        iommu=ask("IOMMU", lambda: pci.iommu(root, [gpu.bus for gpu in shown.gpus]), None),
        acs=ask("ACS", lambda: pci.acs([gpu.bus for gpu in shown.gpus], root), None),
        driver_options=ask("driver options", lambda: _driver_options(root), None),
        container=ask("container", lambda: machine.container(root), None),
        cpus=tuple(sorted(cpus)),
        nodes=ask("NUMA nodes", lambda: _nodes(root), ()),
        numa_balancing=ask("NUMA balancing", lambda: _balancing(root), None),
        memory_available=ask("memory", lambda: _memory(root), None),
        shm=shm,
        shm_free=shm_free,
        limits=ask("limits", _limits, {}),
        environment={
            name: secrets.mask_text(value)
            for name, value in environ.items()
            if name in _ENVIRONMENT or name.startswith("NCCL_")
        },
        import_path=ask("import path", lambda: import_path.exposed(environ), {}),
        installed=_installed(),
        pinned=ask("pinned versions", _pinned, {}),
        nccl=tuple(Library(**library) for library in found["nccl"]) if "nccl" in found else None,
        kernels=Kernels(**found["kernels"]) if "kernels" in found else None,
        patches=patches,
        patch_problem=patch_problem,
        serving=serving,
        unread=ask.unread,
    )


def _nvml(shown: topology.Topology, nvml: Any) -> _OfNvml:
    """(driver, its CUDA, state of each GPU, pairs without peer access)."""
    if not shown.gpus:
        return None, None, (), ()
    nvml = nvml or importlib.import_module("pynvml")

    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(*arguments)
        except (nvml.NVMLError, AttributeError):
            return None

    nvml.nvmlInit()
    try:
        handles = [nvml.nvmlDeviceGetHandleByPciBusId(gpu.bus.encode()) for gpu in shown.gpus]
        gpus = []
        for handle in handles:
            capability, memory = (
                ask("nvmlDeviceGetCudaComputeCapability", handle),
                ask("nvmlDeviceGetMemoryInfo", handle),
            )
            gpus.append(
                Gpu(
                    sm=None if capability is None else capability[0] * 10 + capability[1],
                    memory=None if memory is None else memory.total,
                    memory_free=None if memory is None else memory.free,
                    generation=ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
                    width=ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
                    own_generation=ask("nvmlDeviceGetGpuMaxPcieLinkGeneration", handle),
                    performance_state=ask("nvmlDeviceGetPerformanceState", handle),
                )
            )
        refusals = []
        for link in shown.links:
            if not (link.read and link.write):
                # In turn for reading and writing (NVML_P2P_CAPS_INDEX_READ, _WRITE).
                told = [ask("nvmlDeviceGetP2PStatus", handles[link.a], handles[link.b], index) for index in (0, 1)]
                said = next((_REFUSALS.get(status, f"status {status}") for status in told if status), "not told")
                refusals.append(Refusal(link.a, link.b, said))
        cuda, driver = ask("nvmlSystemGetCudaDriverVersion"), ask("nvmlSystemGetDriverVersion")
        return (
            driver.decode() if isinstance(driver, bytes) else driver,
            None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
            tuple(gpus),
            tuple(refusals),
        )
    finally:
        nvml.nvmlShutdown()


def _own_links(gpus: tuple[Gpu, ...], shown: topology.Topology, root: Path) -> tuple[Gpu, ...]:
    """With the width that each GPU itself is capable of, which NVML does not tell and the kernel does."""
    if not gpus:  # NVML did not answer, which is told already
        return gpus
    return tuple(
        replace(gpu, own_width=pci.own_width(slot.bus, root)) for gpu, slot in zip(gpus, shown.gpus, strict=True)
    )


def _driver_options(root: Path) -> dict[str, str] | None:
    """What of the kernel module's parameters may concern peer access; None without the module."""
    file = root / "proc/driver/nvidia/params"
    if not file.exists():
        return None
    pairs = (line.partition(":") for line in file.read_text().splitlines())
    return {
        name.strip(): value.strip()
        for name, _, value in pairs
        if re.search(r"(?i)p2p|peer|registrydwords", name) and value.strip() not in ("", '""')
    }


def cpu_list(text: str) -> tuple[int, ...]:
    """The kernel's ``0-3,8`` as numbers."""
    out: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        out += range(int(first), int(last or first) + 1)
    return tuple(out)


def _nodes(root: Path) -> tuple[Node, ...]:
    nodes = []
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        free = re.search(r"MemFree:\s+(\d+) kB", (folder / "meminfo").read_text())
        cpus = cpu_list((folder / "cpulist").read_text())
        nodes.append(Node(int(folder.name[4:]), cpus, int(free[1]) * 1024 if free else None))
    return tuple(nodes)


def _balancing(root: Path) -> bool | None:
    file = root / "proc/sys/kernel/numa_balancing"
    return file.read_text().strip() not in ("0", "") if file.exists() else None


def _memory(root: Path) -> int:
    """Available host memory, within the limit of the container (cgroup 2, or 1).

    Of what the container uses, cached files that nobody read lately give way (as Kubernetes counts a working set);
    after a download of weights they are most of it.
    """
    found = re.search(r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
    if found is None:
        raise OSError("/proc/meminfo has no MemAvailable")
    available = int(found[1]) * 1024
    for folder, limit, used, cached in (
        ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        group = root / folder
        if (group / limit).exists() and (text := (group / limit).read_text().strip()).isdecimal():
            stat = (group / "memory.stat").read_text() if (group / "memory.stat").exists() else ""
            idle = re.search(rf"^{cached} (\d+)$", stat, re.MULTILINE)
            taken = int((group / used).read_text()) - (int(idle[1]) if idle else 0)
            available = min(available, max(0, int(text) - max(0, taken)))
    return available


def _size(folder: Path) -> tuple[int | None, int | None]:
    stat = os.statvfs(folder)
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def _limits() -> dict[str, int]:
    kinds = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "nproc": resource.RLIMIT_NPROC}
    return {name: resource.getrlimit(kind)[1] for name, kind in kinds.items()}


def _installed() -> dict[str, str]:
    out = {}
    for name in (*_DISTRIBUTIONS, *(name for name in _pinned_of("torch") if _NCCL.match(name))):
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            continue
    return out


def _pinned() -> dict[str, str]:
    """Exact versions that the installed SGLang and torch ask for."""
    asked = {**_pinned_of("torch"), **_pinned_of("sglang"), **_pinned_of("sglang-patches")}
    return {name: wanted for name, wanted in asked.items() if name in _DISTRIBUTIONS or _NCCL.match(name)}


def _pinned_of(distribution: str) -> dict[str, str]:
    try:
        lines = requires(distribution) or []
    except PackageNotFoundError:
        return {}
    found = (
        re.match(r"([\w.-]+)(?:\[[^]]*\])?==([^;\s]+)\s*(?:;(.*))?$", line) for line in lines if "extra ==" not in line
    )
    return {match[1].replace("_", "-").lower(): match[2] for match in found if match}


def _patches(environ: Mapping[str, str]) -> tuple[tuple[Patch, ...], str | None]:
    from sglang_patches import series
    from sglang_patches.status import states
    from sglang_patches.upstream import locate

    try:
        upstream = locate()
        if upstream is None:
            return (), "SGLang is not installed here"
        selected = environ.get(selection.VARIABLE, "")
        found = states(upstream, series.load(upstream.release), selected)
        return tuple(Patch(patch.name, *said) for patch, *said in found), None
    except PatchError as error:
        return (), str(error)


def probe(environ: Mapping[str, str]) -> dict[str, Any]:
    """What a process with this environment that imports torch and sgl_kernel loads, as `doctor.probe` prints it.

    Raises:
        PatchError: it ended without an answer, or took too long.
    """
    command = [sys.executable, "-P", "-m", "sglang_patches.doctor.probe"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False, env=dict(environ)
        )
    except subprocess.TimeoutExpired:
        raise PatchError(f"`import torch, sgl_kernel` took longer than {_PROBE_SECONDS} s") from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise PatchError(f"`import torch, sgl_kernel` ended with status {done.returncode}: {last[:200]}")
    return json.loads(lines[-1])
