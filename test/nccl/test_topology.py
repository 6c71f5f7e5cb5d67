"""topology: what NVML tells becomes plain data, with a fingerprint of the make of a host.

`topologies/` holds hosts in the form `Topology.to_json` writes, composed by hand after what nvidia-smi shows on such
hosts; `Nvml` plays them back through NVML's own functions.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_patches.nccl import topology
from sglang_patches.nccl.topology import Gpu, Link, Topology

HOSTS = Path(__file__).with_name("topologies")
EIGHT = ["eight-on-two-sockets", "two-switch-islands-of-four", "nvlink-host"]
ANCESTOR = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}


def host(name: str) -> Topology:
    return Topology.from_json((HOSTS / f"{name}.json").read_text())


class Nvml:
    """The functions of pynvml that are used, over a recorded host; handles are positions in NVML's order."""

    class NVMLError(Exception):
        pass

    def __init__(self, recorded: Topology, silent: tuple[str, ...] = ()) -> None:
        self.recorded = recorded
        self.silent = silent
        self.open = False

    def nvmlInit(self) -> None:
        if "init" in self.silent:
            raise self.NVMLError("NVML Shared Library Not Found")
        self.open = True

    def nvmlShutdown(self) -> None:
        self.open = False

    def _answer(self, kind: str, value: Any) -> Any:
        assert self.open
        if kind in self.silent:
            raise self.NVMLError("Not Supported")
        return value

    def nvmlDeviceGetCount(self) -> int:
        return self._answer("count", len(self.recorded.gpus))

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle:02d}ab"

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return self.recorded.gpus[handle].name.encode()

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return type("Pci", (), {"busId": f"0000{self.recorded.gpus[handle].bus}".upper()})

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> Any:
        return self._answer("pcie", self.recorded.gpus[handle].pcie_generation)

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> Any:
        return self._answer("pcie", self.recorded.gpus[handle].pcie_width)

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, two: int) -> int:
        return self._answer("ancestor", ANCESTOR[self.recorded.link(one, two).level or ""])

    def nvmlDeviceGetP2PStatus(self, one: int, two: int, capability: int) -> int:
        link = self.recorded.link(one, two)
        return self._answer("p2p", 0 if (link.read, link.write, link.nvlink)[capability] else 5)


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """NUMA nodes as the kernel tells them, of every recorded GPU."""
    for name in [*EIGHT, "two-gpus"]:
        for gpu in host(name).gpus:
            folder = tmp_path / gpu.bus
            folder.mkdir(exist_ok=True)
            (folder / "numa_node").write_text(f"{gpu.numa_node}\n")
    return tmp_path


@pytest.mark.parametrize("name", [*EIGHT, "two-gpus"])
def test_a_host_is_read_as_it_was_recorded(name: str, sysfs: Path) -> None:
    for gpu in host(name).gpus:
        (sysfs / gpu.bus / "numa_node").write_text(f"{gpu.numa_node}\n")
    assert topology.read({}, Nvml(host(name)), sysfs) == host(name)


@pytest.mark.parametrize(
    ("nvml", "told"),
    [(Nvml(host("no-gpu")), "no-gpu"), (Nvml(host("no-gpu"), ("init",)), "nvml-missing")],
    ids=["no GPU", "NVML missing"],
)
def test_a_host_without_gpus_says_why(nvml: Nvml, told: str) -> None:
    seen = topology.read({}, nvml)
    assert seen == host(told)
    assert seen.full_nvlink()
    assert seen.absent is not None
    assert seen.absent in seen.describe()


def test_this_machine_is_read_without_an_error() -> None:
    seen = topology.read()
    assert bool(seen.gpus) != bool(seen.absent)


def test_what_a_virtual_machine_does_not_tell_stays_open(tmp_path: Path) -> None:
    seen = topology.read({}, Nvml(host("two-gpus"), ("pcie", "ancestor", "p2p")), tmp_path)
    assert seen.gpus[0] == Gpu("NVIDIA GeForce RTX 4090", bus="0000:19:00.0")
    assert seen.links == (Link(0, 1, None, None, False, False),)
    assert (seen.full_nvlink(), seen.nvlink_untold()) == (False, True)
    assert "NVLink not told for 1" in seen.describe()
    assert seen.fingerprint() != replace(seen, links=(replace(seen.links[0], nvlink=False),)).fingerprint()


def test_a_pair_known_to_lack_nvlink_or_peer_access_switched_off_leaves_nothing_open() -> None:
    nvlink = host("nvlink-host")
    untold = replace(nvlink, links=(replace(nvlink.links[0], nvlink=None), *nvlink.links[1:]))
    assert not nvlink.nvlink_untold()
    assert untold.nvlink_untold()
    assert not replace(untold, peer_access_off=True).nvlink_untold()
    assert not replace(untold, links=(*untold.links[:-1], replace(untold.links[-1], nvlink=False))).nvlink_untold()


@pytest.mark.parametrize(
    ("visible", "positions"),
    [
        ("0,1", [0, 1]),
        ("5,2", [5, 2]),
        ("GPU-03ab, GPU-01", [3, 1]),
        ("1,99,2", [1]),
        ("1,1,2", [1]),
        ("GPU-0,1", []),
        ("", []),
        ("-1", []),
    ],
)
def test_cuda_visible_devices_is_respected(visible: str, positions: list[int], sysfs: Path) -> None:
    recorded = host("nvlink-host")
    seen = topology.read({"CUDA_VISIBLE_DEVICES": visible}, Nvml(recorded), sysfs)
    assert [gpu.bus for gpu in seen.gpus] == [recorded.gpus[place].bus for place in positions]
    assert (seen.absent is None) == bool(positions)
    if positions:
        assert seen.links == recorded.subset(positions).links


@pytest.mark.parametrize("name", EIGHT)
def test_the_fingerprint_knows_no_order_no_addresses_and_no_numbering(name: str) -> None:
    recorded = host(name)
    order = list(range(len(recorded.gpus)))
    for seed in range(5):
        random.Random(seed).shuffle(order)
        mixed = recorded.subset(order)
        renamed = replace(
            mixed, gpus=tuple(replace(gpu, bus="", numa_node=1 - (gpu.numa_node or 0)) for gpu in mixed.gpus)
        )
        assert renamed.fingerprint() == recorded.fingerprint()


def test_fingerprints_tell_hosts_apart() -> None:
    whole = host("two-switch-islands-of-four")
    fewer = [whole.subset(ranks) for ranks in ([0, 1], [0, 4], [0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 2, 4])]
    lost = replace(whole, links=(replace(whole.links[0], read=False), *whole.links[1:]))
    slot = replace(whole, gpus=(replace(whole.gpus[0], pcie_width=8), *whole.gpus[1:]))
    others = [lost, slot, replace(whole, peer_access_off=True), host("eight-on-two-sockets"), host("nvlink-host")]
    seen = [which.fingerprint() for which in (whole, *fewer, *others)]
    assert len(set(seen)) == len(seen)
    assert all(len(value) == 12 and int(value, 16) >= 0 for value in seen)


def test_islands_differ_from_a_cube_where_every_gpu_also_has_three_near_neighbours() -> None:
    gpus = tuple(Gpu("card") for _ in range(8))

    def near(a: int, b: int, cube: bool) -> bool:
        return (a ^ b) in (1, 2, 4) if cube else a // 4 == b // 4

    def built(cube: bool) -> Topology:
        pairs = itertools.combinations(range(8), 2)
        return Topology(gpus, tuple(Link(a, b, "SYS", near(a, b, cube), True, True) for a, b in pairs))

    assert sum(link.nvlink is True for link in built(True).links) == sum(
        link.nvlink is True for link in built(False).links
    )
    assert built(True).fingerprint() != built(False).fingerprint()


def test_full_nvlink_is_about_the_ranks_asked_for() -> None:
    nvlink = host("nvlink-host")
    assert nvlink.full_nvlink()
    assert nvlink.full_nvlink([0, 7])
    assert not host("two-gpus").full_nvlink()
    assert host("two-gpus").full_nvlink([1])
    one_missing = replace(nvlink, links=(replace(nvlink.links[0], nvlink=False), *nvlink.links[1:]))
    assert not one_missing.full_nvlink()
    assert not one_missing.full_nvlink([0, 1, 2])
    assert one_missing.full_nvlink([1, 2, 3])
    with pytest.raises(IndexError, match="position 8: 8 are visible"):
        nvlink.full_nvlink([0, 8])


@pytest.mark.parametrize(
    ("environ", "off"),
    [
        ({}, False),
        ({"NCCL_P2P_DISABLE": "0"}, False),
        ({"NCCL_P2P_DISABLE": "1"}, True),
        ({"NCCL_P2P_LEVEL": "loc"}, True),
        ({"NCCL_P2P_LEVEL": "SYS"}, False),
    ],
)
def test_nvlink_that_nccl_may_not_use_does_not_count(environ: dict[str, str], off: bool, sysfs: Path) -> None:
    seen = topology.read(environ, Nvml(host("nvlink-host")), sysfs)
    assert seen.peer_access_off == off
    assert seen.full_nvlink() != off


def test_json_round_trip_and_a_text_that_is_no_topology() -> None:
    recorded = host("eight-on-two-sockets")
    assert Topology.from_json(recorded.to_json()) == recorded
    with pytest.raises(ValueError, match="not a topology"):
        Topology.from_json('{"gpus": []}')
