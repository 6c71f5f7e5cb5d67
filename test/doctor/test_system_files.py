"""What /proc and /sys tell: PCI ports, IOMMU, NUMA nodes, memory within a container's limit."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_patches.doctor import pci, read

from .conftest import recorded, write


def config(control: int) -> bytes:
    """A configuration space with an AER capability, then ACS."""
    space = bytearray(4096)
    struct.pack_into("<I", space, 0x100, 0x0001 | 2 << 16 | 0x140 << 20)
    struct.pack_into("<IHH", space, 0x140, 0x000D | 1 << 16, 0x5F, control)
    return bytes(space)


def tree(root: Path, ports: dict[str, bytes], devices: dict[str, str]) -> None:
    """PCI devices as the kernel lays them out: `devices` maps an address to the folders above it."""
    for address, above in devices.items():
        place = root / "sys/devices/pci0000:15" / above / address
        place.mkdir(parents=True)
        (place / "max_link_width").write_text("16\n")
        link = root / "sys/bus/pci/devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(place)
    for above, data in ports.items():
        (root / "sys/devices/pci0000:15" / above / "config").write_bytes(data)


def test_acs_counts_only_ports_of_a_switch_that_gpus_share(tmp_path: Path) -> None:
    root_port, other = "0000:15:01.0", "0000:15:02.0"
    devices = {
        "0000:19:00.0": f"{root_port}/0000:16:00.0/0000:17:00.0",
        "0000:1a:00.0": f"{root_port}/0000:16:00.0/0000:17:01.0",
        "0000:35:00.0": f"{other}/0000:32:00.0",
    }
    ports = {
        root_port: config(0x1D),  # redirects, but traffic within the switch does not come here
        f"{root_port}/0000:16:00.0": config(0),
        f"{root_port}/0000:16:00.0/0000:17:00.0": config(0x1D),
        f"{root_port}/0000:16:00.0/0000:17:01.0": config(0x11),  # source validation and forwarding: no redirect
        other: config(0x1D),
        f"{other}/0000:32:00.0": config(0x1D),  # one GPU alone
    }
    tree(tmp_path, ports, devices)
    assert pci.acs(list(devices), tmp_path) == ("0000:17:00.0",)
    assert pci.acs(["0000:99:00.0"], tmp_path) is None
    assert pci.own_width("0000:19:00.0", tmp_path) == 16
    host = recorded("eight-pcie")  # whose first GPU is 0000:19:00.0, and the last is not in this tree
    gpus = read._own_links(tuple(replace(gpu, own_width=None) for gpu in host.gpus), host.topology, tmp_path)
    assert (gpus[0].own_width, gpus[-1].own_width) == (16, None)
    short = tmp_path / "sys/devices/pci0000:15" / root_port / "0000:16:00.0" / "config"
    short.write_bytes(config(0)[:256])
    with pytest.raises(PermissionError, match="lspci"):
        pci.acs(list(devices), tmp_path)


@pytest.mark.parametrize(("control", "redirects"), [(0, False), (0b00100, True), (0b01000, True), (0b10011, False)])
def test_acs_redirects_requests_or_completions(control: int, redirects: bool) -> None:
    assert pci._redirects(config(control), "0000:17:00.0") is redirects


@pytest.mark.parametrize(
    ("types", "said"),
    [
        ([], "off"),
        (["identity", "identity"], "identity"),
        (["identity", "DMA-FQ"], "translated"),
        (["DMA"], "translated"),
    ],
)
def test_iommu(tmp_path: Path, types: list[str], said: str) -> None:
    write(tmp_path, {f"sys/kernel/iommu_groups/{i}/type": kind + "\n" for i, kind in enumerate(types)})
    assert pci.iommu(tmp_path) == said


def test_iommu_is_that_of_the_gpus(tmp_path: Path) -> None:
    """Booted with iommu=pt, and some other device is translated all the same."""
    write(tmp_path, {f"sys/kernel/iommu_groups/{i}/type": kind for i, kind in enumerate(("identity", "DMA-FQ"))})
    write(tmp_path, {"sys/bus/pci/devices/0000:19:00.0/iommu_group/type": "identity\n"})
    assert pci.iommu(tmp_path, ["0000:19:00.0"]) == "identity"
    assert pci.iommu(tmp_path, ["0000:99:00.0"]) == "translated"


def test_files_of_proc_and_sys(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "sys/devices/system/node/node0/cpulist": "0-2,8\n",
            "sys/devices/system/node/node0/meminfo": "Node 0 MemFree:  1024 kB\n",
            "sys/devices/system/node/node10/cpulist": "\n",
            "sys/devices/system/node/node10/meminfo": "",
            "proc/sys/kernel/numa_balancing": "1\n",
            "proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 1000 kB\n",
            "proc/driver/nvidia/params": 'RegistryDwords: "ForceP2P=0x11"\nPeerMappingOverride: ""\nX: 1\n',
        },
    )
    nodes = read._nodes(tmp_path)
    assert [(node.number, node.cpus, node.memory_free) for node in nodes] == [
        (0, (0, 1, 2, 8), 1 << 20),
        (10, (), None),
    ]
    assert read._balancing(tmp_path) is True
    assert read._memory(tmp_path) == 1000 << 10
    write(tmp_path, {"sys/fs/cgroup/memory.max": "600000", "sys/fs/cgroup/memory.current": "100000"})
    assert read._memory(tmp_path) == 500_000
    # Cached files give way.
    write(tmp_path, {"sys/fs/cgroup/memory.stat": "anon 20000\ninactive_file 70000\nactive_file 10000\n"})
    assert read._memory(tmp_path) == 570_000
    write(tmp_path, {"sys/fs/cgroup/memory.max": "max\n"})
    assert read._memory(tmp_path) == 1000 << 10
    write(
        tmp_path / "one",
        {
            "proc/meminfo": "MemAvailable: 1000 kB\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "600000",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "100000",
            "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 70000\n",
        },
    )
    assert read._memory(tmp_path / "one") == 570_000
    assert read._driver_options(tmp_path) == {"RegistryDwords": '"ForceP2P=0x11"'}
