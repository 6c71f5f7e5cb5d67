"""What became of each patch, for people and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from sglang_patches import hunks
from sglang_patches.port.carry import CARRIED, RANK, Carrier, Hunk, Ported
from sglang_patches.port.lane import left_out

CONTEXT = 3


def text(carrier: Carrier, ported: Sequence[Ported]) -> str:
    """Every patch with its outcome, and every hunk that needs a look with both sides."""
    without = left_out(ported)
    lines: list[str] = []
    for entry in ported:
        counts = Counter(hunk.outcome for hunk in entry.hunks)
        told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in RANK if counts[outcome])
        lines.append(f"{entry.patch.name}: {entry.outcome} ({told})")
        if entry.data is not None and not entry.missing and entry.patch.name in without:
            lines.append(f"  left out   {without[entry.patch.name]}")
        for hunk in entry.hunks:
            lines += _hunk(carrier, hunk)
        for shown in entry.upstreamed:
            lines.append(f"  upstream   has {shown.what} now: {shown.path}:{shown.first}")
            lines += _lines(carrier.new.read(shown.path) or b"", shown.first, shown.last)
        lines += [f"  look       {note}" for note in entry.notes]
        lines += [f"  its code   imports {name}, which sglang {carrier.new.release} lacks" for name in entry.missing]
    return "\n".join(lines)


def document(carrier: Carrier, ported: Sequence[Ported]) -> dict[str, Any]:
    """The same as a JSON document; the places and contexts are lines of the old and the new release's files."""
    without = left_out(ported)
    return {
        "from": carrier.old.release,
        "to": carrier.new.release,
        "patches": [
            {
                "name": entry.patch.name,
                "outcome": entry.outcome,
                "left_out": without.get(entry.patch.name, ""),
                "hunks": [_row(carrier, hunk) for hunk in entry.hunks],
                "upstreamed": [shown._asdict() for shown in entry.upstreamed],
                "look": list(entry.notes),
                "missing": list(entry.missing),
            }
            for entry in ported
        ],
    }


def as_json(documents: Sequence[dict[str, Any]]) -> str:
    """One document, or a list of several."""
    return json.dumps(documents[0] if len(documents) == 1 else list(documents), indent=2)


def _row(carrier: Carrier, hunk: Hunk) -> dict[str, Any]:
    row: dict[str, Any] = {
        "outcome": hunk.outcome,
        "old": {"path": hunk.path, "after": hunk.hunk.after, "in": str(hunk.old_spot or "")},
        "new": None
        if hunk.after is None
        else {"path": hunk.new_path, "after": hunk.after, "in": str(hunk.new_spot or "")},
        "lines": [line.decode("utf-8", "replace") for line in hunk.hunk.lines],
        "detail": hunk.detail,
    }
    if hunk.after is None:
        row["old_context"] = [*_around(carrier.old.read(hunk.path) or b"", hunk.hunk.after, hunk.hunk.lines)]
        row["new_context"] = [*_around(carrier.new.read(hunk.new_path) or b"", hunk.near)] if hunk.near else []
    return row


def _hunk(carrier: Carrier, hunk: Hunk) -> Iterator[str]:
    where = f"{hunk.path}:{hunk.hunk.after}"
    spot = f" ({hunk.old_spot})" if hunk.old_spot else ""
    if hunk.after is not None:
        if hunk.outcome == "clean" and hunk.after == hunk.hunk.after:
            return
        to = f"{'' if hunk.path == hunk.new_path else hunk.new_path}:{hunk.after}"
        yield f"  {hunk.outcome:<10} {where}{spot} -> {to}{f': {hunk.detail}' if hunk.detail else ''}"
        if hunk.outcome in CARRIED and hunk.outcome != "clean":
            yield from _both(carrier, hunk)
        return
    yield f"  {hunk.outcome:<10} {where}{spot}: {hunk.detail}"
    yield from _both(carrier, hunk)


def _both(carrier: Carrier, hunk: Hunk) -> Iterator[str]:
    yield f"      sglang {carrier.old.release}, {hunk.path}"
    yield from (
        f"      {line}" for line in _around(carrier.old.read(hunk.path) or b"", hunk.hunk.after, hunk.hunk.lines)
    )
    data = carrier.new.read(hunk.new_path)
    place = hunk.after if hunk.after is not None else hunk.near
    if data is not None and (place or hunk.after is not None):
        added = hunk.hunk.lines if hunk.after is not None else ()
        yield f"      sglang {carrier.new.release}, {hunk.new_path}"
        yield from (f"      {line}" for line in _around(data, place, added))


def _around(data: bytes, after: int, added: Sequence[bytes] = ()) -> Iterator[str]:
    """Lines around the place behind line `after`, numbered, with the hunk's where it has them."""
    lines = hunks.split_lines(data)
    for number in range(max(0, after - CONTEXT), after):
        yield _numbered(number + 1, lines[number])
    yield from (f"{'':>6} +{line.decode('utf-8', 'replace')}" for line in added)
    for number in range(after, min(len(lines), after + CONTEXT)):
        yield _numbered(number + 1, lines[number])


def _lines(data: bytes, first: int, last: int) -> list[str]:
    return [f"      {_numbered(first + at, line)}" for at, line in enumerate(hunks.split_lines(data)[first - 1 : last])]


def _numbered(number: int, line: bytes) -> str:
    return f"{number:>6}  {line.decode('utf-8', 'replace')}"
