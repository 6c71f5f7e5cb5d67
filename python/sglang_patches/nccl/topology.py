"""Which GPUs this host shows, and how each pair of them is connected.

Read through NVML, so that nothing starts CUDA in the process that asks. The result is plain data: it compares, hashes,
travels as JSON, and has a fingerprint that is the same for every host of the same make.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# NVML's names of what two PCIe functions have in common, by its numbers (nvmlGpuTopologyLevel_t), as nvidia-smi writes
# them. INTERNAL, two GPUs on one board, share that board's switch.
_LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
# nvmlGpuP2PCapsIndex_t and nvmlGpuP2PStatus_t; pynvml's own NVML_P2P_CAPS_INDEX_READ is a tuple by mistake.
_READ, _WRITE, _NVLINK, _OK = 0, 1, 2, 0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One visible GPU.

    Attributes:
        name: NVML's product name.
        pcie_generation, pcie_width: the best its slot allows, not the present one, which falls when the GPU idles.
        numa_node: of its PCIe slot; None where the system does not tell.
        bus: PCIe address, in no comparison of hosts.
    """

    name: str
    pcie_generation: int | None = None
    pcie_width: int | None = None
    numa_node: int | None = None
    bus: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """How two visible GPUs, by position with ``a < b``, reach each other.

    Attributes:
        level: PIX (one PCIe switch), PXB (several), PHB (one host bridge), NODE (one NUMA node), SYS (between sockets);
            None where NVML does not tell.
        nvlink: the pair has NVLink, directly or through switches; None where NVML does not tell (virtual machines).
        read, write: the driver allows peer access in both directions.
    """

    a: int
    b: int
    level: str | None
    nvlink: bool | None
    read: bool
    write: bool


@dataclass(frozen=True, slots=True)
class Topology:
    """The GPUs a process would see, in CUDA's order on a host of equal GPUs, and the connection of every pair.

    Attributes:
        links: one for each pair, ordered by (a, b).
        peer_access_off: ``NCCL_P2P_DISABLE`` or ``NCCL_P2P_LEVEL`` keeps NCCL from using any direct path.
        absent: why there are no GPUs; None where there are.
    """

    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    peer_access_off: bool = False
    absent: str | None = None

    def link(self, a: int, b: int) -> Link:
        """The connection of two different positions, in any order. Raises KeyError where there is none."""
        low, high = sorted((a, b))
        for link in self.links:
            if (link.a, link.b) == (low, high):
                return link
        raise KeyError(f"no pair ({a}, {b}) among {len(self.gpus)} GPUs")

    def subset(self, ranks: Iterable[int]) -> Topology:
        """The topology of some GPUs, by position, as if no others were visible. Raises IndexError for a position that
        is not there."""
        kept = list(ranks)
        if wrong := [rank for rank in kept if not 0 <= rank < len(self.gpus)]:
            raise IndexError(f"no GPU at position {wrong[0]}: {len(self.gpus)} are visible")
        links = []
        for (new_a, a), (new_b, b) in itertools.combinations(enumerate(kept), 2):
            old = self.link(a, b)
            links.append(Link(new_a, new_b, old.level, old.nvlink, old.read, old.write))
        return Topology(tuple(self.gpus[rank] for rank in kept), tuple(links), self.peer_access_off, self.absent)

    def full_nvlink(self, ranks: Iterable[int] | None = None) -> bool:
        """Whether every pair (of `ranks`, by position; all by default) has NVLink that NCCL may use.

        True for fewer than two GPUs, which have no pair that lacks it; False where NVML does not tell.
        """
        part = self if ranks is None else self.subset(ranks)
        return not part.links or (not part.peer_access_off and all(link.nvlink for link in part.links))

    def nvlink_untold(self) -> bool:
        """Whether NVML leaves open if every pair has NVLink that NCCL may use: no pair is known to lack it."""
        told = {link.nvlink for link in self.links}
        return not self.peer_access_off and None in told and False not in told

    def fingerprint(self) -> str:
        """12 hexadecimal digits, equal for hosts of the same make: GPU models, slots and connections of every pair.

        Does not depend on the order of the GPUs, on addresses, serial numbers or NUMA numbering. Colours of GPUs and
        pairs are refined by the colours around them (two-dimensional Weisfeiler-Leman) and hashed as a multiset, so
        two islands of four differ from any other host whose GPUs have three near neighbours each.
        """
        places = range(len(self.gpus))
        colour = {(a, a): _hash(gpu.name, gpu.pcie_generation, gpu.pcie_width) for a, gpu in enumerate(self.gpus)}
        for link in self.links:
            nodes = self.gpus[link.a].numa_node, self.gpus[link.b].numa_node
            same_node = None if None in nodes else nodes[0] == nodes[1]
            value = _hash(link.level, link.nvlink, link.read, link.write, same_node)
            colour[link.a, link.b] = colour[link.b, link.a] = value
        for _ in places:
            colour = {
                (a, b): _hash(colour[a, b], *sorted(colour[a, c] + colour[c, b] for c in places)) for a, b in colour
            }
        return _hash(self.peer_access_off, *sorted(colour.values()))[:12]

    def describe(self) -> str:
        """One clause for people, such as "8x NVIDIA H200, all pairs NVLink"."""
        if self.absent or not self.gpus:
            return f"no GPU ({self.absent or 'none visible'})"
        names = sorted({gpu.name for gpu in self.gpus})
        said = f"{len(self.gpus)}x {' / '.join(names)}"
        if self.links:
            joined = sum(link.nvlink is True for link in self.links)
            untold = sum(link.nvlink is None for link in self.links)
            levels = "+".join(sorted({link.level or "?" for link in self.links}))
            peers = sum(link.read and link.write for link in self.links)
            total = len(self.links)
            said += f", {levels}, NVLink on {joined} and peer access on {peers} of {total} pairs"
            said += f" (NVLink not told for {untold})" if untold else ""
        return said + (", peer access switched off for NCCL" if self.peer_access_off else "")

    def to_json(self) -> str:
        """One line of JSON that `from_json` reads."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Raises ValueError for text that is no topology."""
        try:
            data = json.loads(text)
            gpus = tuple(Gpu(**gpu) for gpu in data["gpus"])
            links = tuple(Link(**link) for link in data["links"])
            return cls(gpus, links, bool(data["peer_access_off"]), data["absent"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a topology: {error!r} in {text[:80]!r}") from error


def read(
    environ: Mapping[str, str] | None = None, nvml: Any = None, sysfs: Path = Path("/sys/bus/pci/devices")
) -> Topology:
    """The topology of the GPUs that a process with this environment would see.

    ``CUDA_VISIBLE_DEVICES`` is respected; positions are NVML's (PCIe) order, which is CUDA's where all GPUs are alike
    or ``CUDA_DEVICE_ORDER=PCI_BUS_ID``. A missing NVML, driver or GPU is an answer, not an error: `Topology.absent`.

    Args:
        environ: instead of `os.environ`.
        nvml: instead of the module ``pynvml`` (nvidia-ml-py).
        sysfs: folder of PCI devices that tells their NUMA nodes.
    """
    environ = os.environ if environ is None else environ
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return Topology(absent="NVML missing: the module pynvml (nvidia-ml-py) is not installed")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Topology(absent=f"NVML missing: {error}")
    try:
        return _read(environ, nvml, sysfs)
    except nvml.NVMLError as error:
        return Topology(absent=f"NVML failed: {error}")
    finally:
        nvml.nvmlShutdown()


@dataclass(slots=True)
class _Device:
    handle: Any
    uuid: str
    gpu: Gpu = field(default_factory=lambda: Gpu(""))


def _read(environ: Mapping[str, str], nvml: Any, sysfs: Path) -> Topology:
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        found.append(_Device(handle, _text(nvml.nvmlDeviceGetUUID(handle))))
    if not found:
        return Topology(absent="NVML lists no GPU")
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    devices = _visible(found, wanted)
    if not devices:
        return Topology(absent=f"CUDA_VISIBLE_DEVICES={wanted!r} shows none of {len(found)} GPUs")
    for device in devices:
        device.gpu = _gpu(nvml, device.handle, sysfs)
    links = [
        _link(nvml, (a, first.handle), (b, second.handle))
        for (a, first), (b, second) in itertools.combinations(enumerate(devices), 2)
    ]
    return Topology(tuple(device.gpu for device in devices), tuple(links), _peer_access_off(environ))


def _visible(found: list[_Device], wanted: str | None) -> list[_Device]:
    """CUDA's rule: numbers or (abbreviated) UUIDs in the order given, up to the first that names no device."""
    if wanted is None:
        return found
    chosen: list[_Device] = []
    for entry in (part.strip() for part in wanted.split(",")):
        if entry.isdecimal():
            match = found[int(entry) : int(entry) + 1]
        else:
            match = [device for device in found if entry and device.uuid.startswith(entry)]
        if len(match) != 1 or match[0] in chosen:
            break
        chosen += match
    return chosen


def _gpu(nvml: Any, handle: Any, sysfs: Path) -> Gpu:
    bus = _text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower()
    # NVML writes the PCI domain with 8 digits, the kernel with 4.
    kernel_bus = bus[4:] if len(bus.partition(":")[0]) == 8 else bus
    try:
        node = int((sysfs / kernel_bus / "numa_node").read_text())
    except (OSError, ValueError):
        node = -1
    return Gpu(
        name=_text(nvml.nvmlDeviceGetName(handle)),
        pcie_generation=_told(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_width=_told(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        numa_node=node if node >= 0 else None,
        bus=kernel_bus,
    )


def _link(nvml: Any, first: tuple[int, Any], second: tuple[int, Any]) -> Link:
    (a, one), (b, two) = first, second

    def both_ways(capability: int) -> bool | None:
        there = _told(nvml, nvml.nvmlDeviceGetP2PStatus, one, two, capability)
        back = _told(nvml, nvml.nvmlDeviceGetP2PStatus, two, one, capability)
        if any(answer not in (None, _OK) for answer in (there, back)):
            return False
        return None if None in (there, back) else True

    level = _told(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, one, two)
    return Link(
        a,
        b,
        level=None if level is None else _LEVELS.get(int(level)),
        nvlink=both_ways(_NVLINK),
        read=bool(both_ways(_READ)),
        write=bool(both_ways(_WRITE)),
    )


def _told(nvml: Any, ask: Any, *arguments: Any) -> Any:
    """NVML's answer, or None where this device or virtual machine does not give it."""
    try:
        return ask(*arguments)
    except nvml.NVMLError:
        return None


def _peer_access_off(environ: Mapping[str, str]) -> bool:
    level = environ.get("NCCL_P2P_LEVEL", "").strip().upper()
    return environ.get("NCCL_P2P_DISABLE", "0").strip() not in ("", "0") or level in ("LOC", "0")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _hash(*values: object) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
