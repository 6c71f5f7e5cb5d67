"""Recorded hosts.

`hosts/` holds them in the form that ``sglang-patches doctor --record`` writes, composed by hand after what such hosts
show (``no-gpu`` after a recording).
"""

from __future__ import annotations

from pathlib import Path

from sglang_patches.doctor.host import Host

HOSTS = Path(__file__).with_name("hosts")
NAMES = sorted(file.stem for file in HOSTS.glob("*.json"))
#: Hosts on which every check is content, and one on which only the missing GPU is noted.
HEALTHY = ("eight-pcie", "nvlink", "no-gpu")


def recorded(name: str) -> Host:
    """The host of this name."""
    return Host.read(HOSTS / f"{name}.json")


def write(root: Path, files: dict[str, str | bytes]) -> None:
    """Files below a root, by their paths."""
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data if isinstance(data, bytes) else data.encode())
