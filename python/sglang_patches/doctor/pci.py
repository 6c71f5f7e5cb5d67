"""What the kernel tells of IOMMU, ACS and PCIe links, from /sys."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

_DEVICES = "sys/bus/pci/devices"
_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
# PCI Express Base Specification, 7.7.11: extended capability 0x000D, control register 6 bytes into it; request redirect
# is bit 2 and completion redirect bit 3: peer traffic goes up to the root complex in place of straight across.
_EXTENDED, _ACS, _CONTROL, _REDIRECT = 0x100, 0x000D, 6, 0b1100


def iommu(root: Path = Path("/"), buses: Sequence[str] = ()) -> str:
    """``off``, ``identity`` (addresses pass unchanged) or ``translated``, by the default domains of these devices'
    groups; of all groups where these devices are in none. With iommu=pt other devices may still be translated."""
    own = [file for bus in buses if (file := root / _DEVICES / bus / "iommu_group/type").exists()]
    groups = own or sorted((root / "sys/kernel/iommu_groups").glob("[0-9]*/type"))
    kinds = {file.read_text().strip() for file in groups}
    if not kinds:
        return "off"
    return "identity" if kinds == {"identity"} else "translated"


def own_width(bus: str, root: Path = Path("/")) -> int | None:
    """Lanes that the device itself has, whatever its slot gives it; None where the kernel does not tell."""
    try:
        return int((root / _DEVICES / bus / "max_link_width").read_text()) or None
    except (OSError, ValueError):
        return None


def bridges(bus: str, root: Path = Path("/")) -> list[Path]:
    """The folders of the bridges between a device and the root complex, the root port first."""
    place = (root / _DEVICES / bus).resolve()
    return [folder for folder in reversed(place.parents) if _ADDRESS.match(folder.name)]


def acs(buses: list[str], root: Path = Path("/")) -> tuple[str, ...] | None:
    """Addresses of the switch ports that redirect peer traffic between these devices; None where no bridge is visible.

    Only ports below a root port that several of the devices share: traffic between root ports passes the root anyway.

    Raises:
        PermissionError: the configuration space is cut short, as it is for anyone but root.
    """
    ways = [way for way in (bridges(bus, root) for bus in buses) if way]
    if not ways:
        return None
    shared = Counter(way[0].name for way in ways)
    ports = {port.name: port for way in ways if shared[way[0].name] > 1 for port in way[1:]}
    return tuple(name for name, folder in sorted(ports.items()) if _redirects((folder / "config").read_bytes(), name))


def _redirects(config: bytes, name: str) -> bool:
    if len(config) <= _EXTENDED:
        raise PermissionError(
            f"the PCI configuration of {name} shows {len(config)} bytes; as root: sudo lspci -vvv | grep ACSCtl"
        )
    at, seen = _EXTENDED, set()
    while at and at not in seen and at + 8 <= len(config):
        seen.add(at)
        (head,) = struct.unpack_from("<I", config, at)
        if head & 0xFFFF == _ACS:
            return bool(struct.unpack_from("<H", config, at + _CONTROL)[0] & _REDIRECT)
        at = head >> 20 & 0xFFC
    return False
