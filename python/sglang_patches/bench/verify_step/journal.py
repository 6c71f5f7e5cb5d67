"""samples.jsonl of a verify-step folder: every record as it is measured, one JSON object a line, never rewritten.

Each line has ``record`` (below), ``engine`` (draft tokens, 0 without speculation), ``run`` (of that engine's start) and
``at`` (when it was measured, UTC; not in lines of earlier releases).
Lines of several processes may mix. An engine counts by its newest run that is done, or else by its newest.

- ``engine``: once it is up; facts, arguments, provenance, seconds to start.
- ``routing``: of a cell; experts and contexts, from an untimed eager pass.
- ``cycles``: of a cell, mode and round; milliseconds by part, one entry a cycle.
- ``kernels``: of a cell, from a profiled pass.
- ``done``: all of it was measured; what patches tell at the end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sglang_patches.errors import PatchError

FILE = "samples.jsonl"
_BEGINNING = '{"record":'


def append(folder: Path, record: dict[str, Any]) -> None:
    """Add a record, on disk when this returns."""
    line = (json.dumps(record, separators=(",", ":")) + "\n").encode()
    # O_APPEND and one write: runs on several GPUs may share the folder.
    handle = os.open(folder / FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            line = b"\n" + line  # a crash cut the last line short
        os.write(handle, line)
        os.fsync(handle)
    finally:
        os.close(handle)


def read(folder: Path) -> list[dict[str, Any]]:
    """All records of a folder, none if it has none; a line that a crash cut short is left out.

    Raises PatchError where another line is no record.
    """
    file = folder / FILE
    if not file.exists():
        return []
    records = []
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
        try:
            record = json.loads(line)
        except ValueError:
            if _BEGINNING.startswith(line) or line.startswith(_BEGINNING):
                continue
            record = None
        if not isinstance(record, dict) or "record" not in record:
            raise PatchError(
                f"{file}, line {number}: not a record of verify-step: {line[:60]!r}\n"
                "  remedy     name another folder with --out, or remove that line"
            )
        records.append(record)
    return records


def current(records: Iterable[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Records by engine, those of the run that counts."""
    runs: dict[int, dict[str, list[dict[str, Any]]]] = {}
    for record in records:
        runs.setdefault(record["engine"], {}).setdefault(record["run"], []).append(record)
    counts = {}
    for engine, of in sorted(runs.items()):
        done = [run for run, all_ in of.items() if any(record["record"] == "done" for record in all_)]
        counts[engine] = of[(done or list(of))[-1]]
    return counts


def done(records: Iterable[dict[str, Any]]) -> set[int]:
    """The engines that need no measuring any more."""
    return {record["engine"] for record in records if record["record"] == "done"}


def when(engines: Mapping[int, Sequence[Mapping[str, Any]]], told: Iterable[str]) -> str:
    """When measuring ended, UTC, ISO 8601: the latest time of the records that count; now where none is known.

    Args:
        engines: as `current` gives them.
        told: what results of these records told before, for records that do not tell their time.
    """
    records = [record for of in engines.values() for record in of]
    known = [record["at"] for record in records if "at" in record]
    if len(known) < len(records):
        known += [time for time in told if time]
    return max(known, default=datetime.now(UTC).isoformat(timespec="seconds"))


def share(head: Mapping[str, Any]) -> str:
    """What an engine record says was served; those from before it was told had one share of Kimi-K2.5."""
    before = "12 layers, bf16, dummy routers" if "<shard>" in " ".join(head["arguments"]) else "a folder"
    return str(head.get("share", before))


def merge(sources: Iterable[Path], folder: Path) -> int:
    """Add the records of other folders that `folder` lacks; returns how many there were.

    Raises PatchError where a source has none, or another model than the others or `folder`.
    """
    sources = list(sources)
    served = {
        share(record): place for place in (folder, *sources) for record in read(place) if record["record"] == "engine"
    }
    if len(served) > 1:
        told = "\n".join(f"  {place}: {what}" for what, place in served.items())
        raise PatchError(f"these folders are of different models, whose times are not to be compared\n{told}")
    known = {json.dumps(record, sort_keys=True) for record in read(folder)}
    added = 0
    for source in sources:
        records = read(source)
        if not records:
            raise PatchError(f"{source}: no {FILE} with records\n  remedy     name folders that verify-step wrote")
        for record in records:
            text = json.dumps(record, sort_keys=True)
            if text not in known:
                known.add(text)
                append(folder, record)
                added += 1
    return added
