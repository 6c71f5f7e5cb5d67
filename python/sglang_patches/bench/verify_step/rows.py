"""From records to the table: medians by part, floors, and cycles counted in decode steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sglang_patches.bench.verify_step import floor

#: Parts in the order of a table; `probe` says what each covers.
PARTS = ("draft_decode", "verify", "decode", "sampling", "draft_extend", "host_gap", "cycle")
#: So many times as long as in the quickest cell: the host was not steady.
UNSTEADY = 1.2


def rows(engines: Mapping[int, Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row per draft tokens, context, batch size and mode.

    Args:
        engines: as `journal.current` gives them.

    Returns: objects with ``draft_tokens`` (0: no speculation), ``context``, ``batch_size``, ``mode``, ``cycles``,
        ``graph_share`` (how often the graph runners that were asked had a graph; None where there are none),
        ``parts`` (by name: ``ms``, ``p10``, ``p90``; ``floor_ms`` and ``times_floor`` where a floor is known),
        ``bytes`` (by part and what is read; None where not known), ``experts_per_layer`` (mean number of different
        experts in the target's forward), ``contexts`` (cached tokens really seen), ``prefilled`` (most prompt tokens
        computed anew), ``busy_ms`` and ``operations`` (device, per cycle, where profiled), ``host_ms`` and
        ``host_most_ms`` (`host.loop`: the middle of all rounds, and the slowest one; None where no record tells), and
        ``decode_steps`` (the cycle over that of plain decode in the same cell, where measured).
    """
    made = [row for tokens, records in engines.items() for row in _engine_rows(tokens, records)]
    plain = {_cell(row): row["parts"]["cycle"]["ms"] for row in made if not row["draft_tokens"]}
    for row in made:
        step = plain.get(_cell(row))
        row["decode_steps"] = round(row["parts"]["cycle"]["ms"] / step, 3) if step and row["draft_tokens"] else None
    return made


def _cell(record: Mapping[str, Any]) -> tuple[int, int, str]:
    return record["context"], record["batch_size"], record["mode"]


def _engine_rows(tokens: int, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    facts = next((record["facts"] for record in records if record["record"] == "engine"), None)
    routing = {(r["context"], r["batch_size"]): r for r in records if r["record"] == "routing"}
    profiled = {_cell(r): r for r in records if r["record"] == "kernels" and "error" not in r}
    measured: dict[tuple[int, int, str], list[dict[str, Any]]] = {}
    for record in records:
        if record["record"] == "cycles" and record["ms"]["cycle"]:
            measured.setdefault(_cell(record), []).append(record)
    made = []
    for cell in sorted(measured, key=lambda cell: (cell[0], cell[1], cell[2] != "graph")):
        context, size, mode = cell
        of = measured[cell]
        columns = {name: np.concatenate([r["ms"][name] for r in of]) for name in of[0]["ms"]}
        counted = routing.get((context, size))
        sizes = _bytes(facts, counted, size, context, tokens)
        profile = profiled.get(cell, {})
        host, host_most = _host(of)
        made.append(
            {
                "draft_tokens": tokens,
                "context": context,
                "batch_size": size,
                "mode": mode,
                "cycles": len(columns["cycle"]),
                "graph_share": _graph_share(of),
                "parts": _parts(columns, sizes, facts),
                "bytes": sizes,
                "experts_per_layer": _experts(counted),
                "contexts": counted and counted["contexts"],
                "prefilled": max(r["prefilled"] for r in of),
                "busy_ms": profile.get("busy"),
                "operations": profile.get("operations"),
                "host_ms": host,
                "host_most_ms": host_most,
            }
        )
    return made


def _graph_share(of: Sequence[Mapping[str, Any]]) -> float | None:
    """Of the runner that had a graph least often."""
    # Records of the first release do not tell the shares.
    shares = [yes / asked for record in of for yes, asked in record.get("graphs", {}).values()]
    return round(min(shares), 3) if shares else None


def _host(of: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Milliseconds of the host's loop: the middle of all rounds, and of the slowest one."""
    # Records of earlier releases do not tell it.
    rounds = [float(np.mean(record["host_ms"])) for record in of if record.get("host_ms")]
    return (round(float(np.median(rounds)), 3), round(max(rounds), 3)) if rounds else (None, None)


def _bytes(
    facts: Mapping[str, Any] | None, counted: Mapping[str, Any] | None, size: int, context: int, tokens: int
) -> dict[str, dict[str, int]] | None:
    if facts is None or counted is None or counted["failed"]:
        return None
    models = facts["models"]
    # A model with experts of which none was seen has no floor, rather than one that is too low.
    part = "verify" if tokens else "decode"
    if models["target"]["experts"].keys() != counted["experts"].get(part, {}).keys():
        return None
    return floor.part_bytes(models, counted["experts"], size, context, tokens)


def _experts(counted: Mapping[str, Any] | None) -> float | None:
    seen = counted and (counted["experts"].get("verify") or counted["experts"].get("decode"))
    return round(float(np.mean(list(seen.values()))), 1) if seen else None


def _parts(
    columns: Mapping[str, np.ndarray], sizes: Mapping[str, Mapping[str, int]] | None, facts: Mapping[str, Any] | None
) -> dict[str, dict[str, float]]:
    told: dict[str, dict[str, float]] = {}
    for name in sorted(columns, key=PARTS.index):
        p10, middle, p90 = (round(float(value), 4) for value in np.quantile(columns[name], [0.1, 0.5, 0.9]))
        told[name] = {"ms": middle, "p10": p10, "p90": p90}
    if sizes is None or facts is None:
        return told
    needed = {name: sum(read.values()) for name, read in sizes.items()}
    needed["cycle"] = sum(needed.values())
    for name, size in needed.items():
        least = floor.milliseconds(size, facts["copy"]["gb_per_s"])
        told[name]["floor_ms"] = round(least, 4)
        if least > 0:
            told[name]["times_floor"] = round(told[name]["ms"] / least, 2)
    return told


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `rows` as numbers by name, for tables: a part's median under its name, its floor under NAME_floor."""
    parts, cycle = row["parts"], row["parts"]["cycle"]
    told = {name: row[name] for name in ("draft_tokens", "context", "batch_size", "mode")}
    told |= {name: part["ms"] for name, part in parts.items()}
    told |= {"p10": cycle["p10"], "p90": cycle["p90"]}
    told |= {f"{name}_floor": part["floor_ms"] for name, part in parts.items() if "floor_ms" in part}
    told["times_floor"] = cycle.get("times_floor")
    return told | {
        name: row[name]
        for name in ("decode_steps", "experts_per_layer", "busy_ms", "operations", "cycles", "graph_share", "host_ms")
    }


def kernels(engines: Mapping[int, Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The profiled cells: ``draft_tokens``, ``context``, ``batch_size``, ``mode``, and `kernels.Profile.take`'s
    figures or ``error``."""
    leave = {"record", "engine", "arm", "run", "at"}
    return [
        {"draft_tokens": tokens, **{name: value for name, value in record.items() if name not in leave}}
        for tokens, records in engines.items()
        for record in records
        if record["record"] == "kernels"
    ]


def unsteady(made: Sequence[Mapping[str, Any]]) -> str:
    """That the host was slower in one round than in another, in words; nothing where it was not, or is not known."""
    told = [row for row in made if row["host_ms"]]
    if not told:
        return ""
    least = min(row["host_ms"] for row in told)
    slow = max(told, key=lambda row: row["host_most_ms"])
    times = slow["host_most_ms"] / least
    if times < UNSTEADY:
        return ""
    what = f"{slow['draft_tokens']} draft tokens" if slow["draft_tokens"] else "no speculation"
    return (
        f"**The host was not steady:** a fixed loop of Python took {least:.2f} ms in the quickest cell and "
        f"{slow['host_most_ms']:.2f}, {times:.1f} times as long, in a round of batch {slow['batch_size']}, context "
        f"{slow['context']}, {what}. Where a cycle waits for the host it is longer by as much: compare cells whose "
        "`host` is alike, or measure again."
    )


def headline(made: Sequence[Mapping[str, Any]]) -> str:
    """The finding in one sentence: of 4 draft tokens if measured, the smallest batch and context, from graphs."""
    if not made:
        return "Nothing has been measured yet."
    row = min(
        made,
        key=lambda row: (
            row["draft_tokens"] != 4,
            -row["draft_tokens"],
            row["mode"] != "graph",
            row["batch_size"],
            row["context"],
        ),
    )
    cycle = row["parts"]["cycle"]
    path = {"graph": "from CUDA graphs", "eager": "eager"}[row["mode"]]
    what = f"an EAGLE-3 cycle of {row['draft_tokens']} tokens" if row["draft_tokens"] else "a decode step"
    said = (
        f"At batch {row['batch_size']} and {row['context']} tokens of context {what} takes {cycle['ms']:.2f} ms {path}"
    )
    if "times_floor" in cycle:
        said += f", {cycle['times_floor']:.1f} times what its bytes need ({cycle['floor_ms']:.2f} ms)"
    if row["decode_steps"]:
        said += f"; that is {row['decode_steps']:.2f} decode steps"
    return said + "."
