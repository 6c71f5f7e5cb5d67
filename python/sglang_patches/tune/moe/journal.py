"""samples*.jsonl of a `tune moe` folder: every record as it is measured, never rewritten; one file a GPU.

- ``plan``: what is tuned and where; the same command continues only what has the same.
- ``facts``: device, versions, file names, what upstream takes by itself at which token count.
- ``begin``: a configuration is about to run for the first time; with nothing after it, it ended its process.
- ``failed``: it cannot run here, and why.
- ``screen``: microseconds a call of one configuration of one product at one token count.
- ``check``: deviation from float32.
- ``final``: one round of one token count, all that is left in turn.
- ``layer``: one round of one token count: the whole layer with upstream's choice and with ours.
- ``interrupted``: by Ctrl-C; what was begun is not to blame.
- ``done``: all was measured.

What was measured has the time at which it was, ``at``: UTC, ISO 8601. Records of earlier releases have none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sglang_patches.errors import PatchError
from sglang_patches.tune.moe.geometry import Gemm
from sglang_patches.tune.moe.space import Config, parse

FORMAT = 1
Record = dict[str, Any]
Cell = tuple[Gemm, int, str]  # product, tokens, configuration
#: Of facts: what times belong to. Those of one place tell nothing of another.
PLACE = ("device", "triton", "sglang")
# A process that goes on where all is measured adds other records.
_MEASURED = ("screen", "failed", "check", "final", "layer")


def append(file: Path, record: Record) -> None:
    """Add a record, written when this returns."""
    line = (json.dumps(record, separators=(",", ":")) + "\n").encode()
    handle = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            line = b"\n" + line  # a crash cut the last line short
        os.write(handle, line)
    finally:
        os.close(handle)


def read(file: Path) -> list[Record]:
    """All records; a line that a crash cut short is left out."""
    if not file.exists():
        return []
    records = []
    for line in file.read_text(encoding="utf-8").split("\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "record" in record:
            records.append(record)
    return records


def files(folder: Path) -> list[Path]:
    """Of all GPUs."""
    return sorted(folder.glob("samples*.jsonl"))


def timed(record: Record) -> Record:
    """A record with the time of now, if it is one of a measurement."""
    if record["record"] not in _MEASURED:
        return record
    return {**record, "at": datetime.now(UTC).isoformat(timespec="seconds")}


def measurements(folder: Path) -> list[Record]:
    """What was measured, of all GPUs."""
    return [record for file in files(folder) for record in read(file) if record["record"] in _MEASURED]


def when(folder: Path, told: str) -> str:
    """When measuring ended: the latest time of what was measured.

    Args:
        told: what the folder's result told before, for measurements that do not tell their time.
    """
    known = [record.get("at", "") for record in measurements(folder)]
    return max([time for time in (*known, *([] if all(known) else [told])) if time], default="")


def check_plan(file: Path, records: Iterable[Record], plan: Record) -> bool:
    """Whether `file` has this plan already; raises PatchError where it has another."""
    for record in records:
        if record["record"] == "plan":
            differ = sorted(name for name in {*record, *plan} if record.get(name) != plan.get(name))
            if differ:
                told = ", ".join(f"{name} {record.get(name)!r}, now {plan.get(name)!r}" for name in differ)
                raise PatchError(
                    f"{file}: measured with another plan: {told}\n  remedy     another --out, or remove that file"
                )
            return True
    return False


def check_place(folder: Path, here: Record | None = None) -> None:
    """Raise PatchError where samples in `folder` are of another device, Triton or upstream release.

    Args:
        here: by the names in `PLACE`, what is about to be measured; None: all samples must be of one place.
    """
    then = "elsewhere" if here is None else "now"
    for file in files(folder):
        for record in read(file):
            if record["record"] != "facts":
                continue
            here = here or record
            differ = [name for name in PLACE if record.get(name) != here.get(name)]
            if differ:
                told = ", ".join(f"{name} {_told(record, name)}, {then} {_told(here, name)}" for name in differ)
                raise PatchError(
                    f"{file}: measured on another device or release: {told}\n  remedy     another --out, for all of it"
                )


def _told(facts: Record, name: str) -> str:
    return repr(facts[name]) if name in facts else "not noted"


class Known:
    """What the records of one GPU hold, cell by cell."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.screened: dict[Cell, list[float]] = {}
        self.failed: dict[Cell, str] = {}
        self.errors: dict[Cell, float] = {}
        self.final: dict[int, list[Record]] = {}
        self.layer: dict[int, list[Record]] = {}
        self.facts: Record = {}
        self.done = False
        begun: dict[Cell, None] = {}
        for record in records:
            self.add(record)
            if record["record"] == "begin":
                begun[_cell(record)] = None
            elif record["record"] == "interrupted" and begun:
                begun.popitem()
        for cell in begun:
            if cell not in self.screened and cell not in self.failed:
                self.failed[cell] = "its process ended while it ran"

    def add(self, record: Record) -> None:
        """Take in one record."""
        match record["record"]:
            case "facts":
                self.facts = record
            case "screen":
                self.screened[_cell(record)] = record["us"]
            case "failed":
                self.failed[_cell(record)] = record["why"]
            case "check":
                self.errors[_cell(record)] = record["error"]
            case "final":
                self.final.setdefault(record["tokens"], []).append(record)
            case "layer":
                self.layer.setdefault(record["tokens"], []).append(record)
            case "done":
                self.done = True

    def of(self, gemm: Gemm, tokens: int) -> dict[Config, list[float]]:
        """Screened configurations of one product at one token count."""
        return {parse(told): us for (of, at, told), us in self.screened.items() if (of, at) == (gemm, tokens)}

    def products(self) -> Iterator[tuple[Cell, list[float]]]:
        """Every sample of one product: its replays, microseconds a call."""
        yield from self.screened.items()
        for tokens, rounds in self.final.items():
            for record in rounds:
                for gemm, configs in record["us"].items():
                    for config, us in configs.items():
                        yield (gemm, tokens, config), us

    def bad(self, gemm: Gemm, config: Config, tolerance: float) -> str:
        """Why a configuration is out for this product; empty where it is not."""
        for (of, at, told), why in self.failed.items():
            if of == gemm and told == str(config):
                return f"at {at} tokens: {why}"
        for (of, at, told), error in self.errors.items():
            if of == gemm and told == str(config) and not error <= tolerance:
                return f"at {at} tokens it is {error:.3g} from float32"
        return ""


def _cell(record: Record) -> Cell:
    return record["gemm"], record["tokens"], record["config"]
