"""The report on one screen, and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from sglang_patches.doctor.finding import LEVELS, Finding
from sglang_patches.doctor.host import Host

_COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "failure": "bold red"}


def document(host: Host, findings: list[Finding]) -> dict[str, Any]:
    """What ``--json`` prints: `level` (the worst), `failures`, `findings`, `topology` (matrix by rows) and `host`."""
    return {
        "level": worst(findings),
        "failures": sum(finding.level == "failure" for finding in findings),
        "findings": [asdict(finding) for finding in findings],
        "matrix": matrix(host),
        "host": json.loads(host.to_json()),
    }


def worst(findings: list[Finding]) -> str:
    """The most harmful level among them; ``ok`` for none."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")


def matrix(host: Host) -> list[list[str]]:
    """How each pair of GPUs is connected: NV (NVLink), PIX, PXB, PHB, NODE, SYS as nvidia-smi writes them, with ``!``
    where the driver allows no peer access; ``X`` on the diagonal, ``?`` where NVML does not tell."""
    shown = host.topology
    places = range(len(shown.gpus))

    def cell(a: int, b: int) -> str:
        if a == b:
            return "X"
        link = shown.link(a, b)
        way = "NV" if link.nvlink else link.level or "?"
        return way + ("" if link.read and link.write else "!")

    return [[cell(a, b) for b in places] for a in places]


def show(host: Host, findings: list[Finding], console: Console) -> None:
    """Print GPUs and connections, then one line for each finding that is well and three for each that is not."""
    if host.topology.gpus:
        console.print(_gpus(host))
    table = Table(show_header=False, box=None, padding=(0, 1), expand=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        colour = _COLOURS[finding.level]
        lines: list[RenderableType] = [escape(finding.seen)]
        if finding.why:
            lines.append(f"[dim]why[/] {escape(finding.why)}")
        if finding.do:
            lines.append(f"[dim]do [/] {escape(finding.do)}")
        table.add_row(f"[{colour}]{finding.level}[/]", f"[bold]{finding.check}[/]", Group(*lines))
    console.print(table)
    count = Counter(finding.level for finding in findings)
    console.print(
        ", ".join(f"[{_COLOURS[level]}]{count[level]} {level}[/]" for level in reversed(LEVELS) if count[level])
    )


def _gpus(host: Host) -> Table:
    cells = matrix(host)
    numbers = [str(index) for index in range(len(cells))]
    table = Table("GPU", *numbers, "NUMA", "PCIe now/best", "SM", "free GiB")
    for index, (slot, row) in enumerate(zip(host.topology.gpus, cells, strict=True)):
        gpu = host.gpus[index] if index < len(host.gpus) else None
        now = f"{_told(gpu and gpu.generation)}x{_told(gpu and gpu.width)}"
        free = "?" if gpu is None or gpu.memory_free is None else f"{gpu.memory_free / 2**30:.0f}"
        table.add_row(
            f"{index}", *row, _told(slot.numa_node), f"{now}/{_told(slot.pcie_generation)}x{_told(slot.pcie_width)}",
            _told(gpu and gpu.sm), free,
        )  # fmt: skip
    if any("!" in cell for row in cells for cell in row):
        table.caption = "! no peer access"
    return table


def _told(value: Any) -> str:
    return "?" if value is None else str(value)
