"""Writes the files of a verify-step folder from its records.

result.json has the rows as plain numbers (`rows.flat`); cells.json has of each row every part with its spread and
floor, and the bytes behind it (`rows.rows`), and of each profiled cell its kernels.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_patches.bench import folder as folders
from sglang_patches.bench.model import Arm, Result
from sglang_patches.bench.verify_step import grid, journal, plot, rows
from sglang_patches.document.schema import Document

_TOLD_KERNELS = 12
_NAME_WIDTH = 90


def write(folder: Path, merged: Iterable[Path] = ()) -> Result:
    """Make the folder's files anew from samples.jsonl.

    Args:
        merged: folders whose records were added to it.

    Raises PatchError if samples.jsonl cannot be read.
    """
    engines = journal.current(journal.read(folder))
    made, profiles = rows.rows(engines), rows.kernels(engines)
    heads = {tokens: _head(records) for tokens, records in engines.items()}
    commands = [
        list(words) for words in dict.fromkeys(tuple(head.get("command", ())) for head in heads.values()) if words
    ]
    documents = [Document.model_validate(head["document"]) for head in heads.values() if head.get("document")]
    result = Result(
        kind="verify-step",
        name=folder.resolve().name,
        headline=rows.headline(made),
        command=commands[0] if commands else [],
        when=journal.when(engines, [folders.when(place) for place in (folder, *merged)]),
        arms=[
            Arm(name=grid.key(tokens), spec=f"{tokens} draft tokens" if tokens else "no speculation", arguments=args)
            for tokens, args in ((tokens, head.get("arguments", [])) for tokens, head in heads.items())
        ],
        analysis={
            "unit": "milliseconds",
            "rows": [rows.flat(row) for row in made],
            "engines": {grid.key(tokens): _engine(records, heads[tokens]) for tokens, records in engines.items()},
            "kernels": [line for profile in profiles for line in _kernel_lines(profile)],
        },
        document=documents[0] if documents else None,
    )
    folders.replace(folder / "cells.json", json.dumps({"rows": made, "profiles": profiles}, indent=1) + "\n")
    folders.replace(folder / "table.md", table(made) + "\n")
    plotted = plot.draw(made, folder / folders.PLOT)
    folders.replace(folder / folders.README, readme(result, made, profiles, commands, plotted))
    folders.replace(folder / folders.RESULT, folders.dumps(result))
    return result


def _engine(records: Sequence[dict[str, Any]], head: Mapping[str, Any]) -> dict[str, Any]:
    facts = head.get("facts") or {}
    models = facts.get("models", {})
    target = models.get("target", {})
    swept = (head.get("outcomes_after_sweep") or {}).get("eagle-verify-cuda-graph", {}).get("graph_share", {})
    return {
        "complete": any(record["record"] == "done" for record in records),
        "device": facts.get("device"),
        "copy_gb_per_s": facts.get("copy", {}).get("gb_per_s"),
        "start_s": head.get("start_seconds"),
        "share": head.get("share"),
        "target_layers": target.get("layers"),
        "target_dense_mib": _mib(target.get("dense")),
        "target_expert_mib": _mib(max(target.get("experts", {}).values(), default=None)),
        "target_kv_bytes_per_token": target.get("kv_token"),
        "draft_dense_mib": _mib(models.get("draft", {}).get("dense")),
        # Only --sweep serves every batch size, and before any pass is made eager on purpose.
        **{f"graph_share_{phase}": share for phase, share in swept.items() if head.get("swept")},
        "no_document": head.get("no_document", ""),
    }


def _mib(size: int | None) -> float | None:
    return None if size is None else round(size / 2**20, 3)


def _kernel_lines(profile: Mapping[str, Any]) -> list[dict[str, Any]]:
    cell = {name: profile[name] for name in ("draft_tokens", "context", "batch_size", "mode")}
    return [{**cell, **kernel} for kernel in profile.get("kernels", [])[:_TOLD_KERNELS]]


def _head(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    leave = {"record", "engine", "arm", "run", "at"}
    head = next((record for record in records if record["record"] == "engine"), {})
    return {name: value for name, value in head.items() if name not in leave}


def table(made: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown: milliseconds, in brackets how many times the part's floor.

    ``host`` is told as times the quickest row's, and only where it was measured.
    """
    present = [name for name in rows.PARTS if any(name in row["parts"] for row in made)]
    head = ["tokens", "context", "batch", "path", *(name.replace("_", " ") for name in present)]
    head += ["p10-p90", "floor", "decode steps", "experts", "GPU busy", "cycles"]
    hosts = [row["host_ms"] for row in made if row["host_ms"]]
    head += ["host"] if hosts else []
    lines = [_line(head), _line(["---"] * len(head))]
    for row in made:
        parts, cycle = row["parts"], row["parts"]["cycle"]
        cells = [str(row["draft_tokens"] or "-"), str(row["context"]), str(row["batch_size"]), _path(row)]
        cells += [_part(parts.get(name)) for name in present]
        cells += [f"{cycle['p10']:.2f}-{cycle['p90']:.2f}", _number(cycle.get("floor_ms"))]
        cells += [_number(row["decode_steps"]), _number(row["experts_per_layer"], 0), _number(row["busy_ms"])]
        cells += [str(row["cycles"])]
        if hosts:
            cells += [f"{row['host_ms'] / min(hosts):.2f}x" if row["host_ms"] else "-"]
        lines.append(_line(cells))
    return "\n".join(lines)


def _path(row: Mapping[str, Any]) -> str:
    """The path that was asked for, and how far it was taken if not throughout."""
    share = row["graph_share"]
    if row["mode"] != "graph" or share == 1:
        return row["mode"]
    return f"graph ({'not counted' if share is None else share})"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _part(part: Mapping[str, float] | None) -> str:
    if part is None:
        return "-"
    times = part.get("times_floor")
    return f"{part['ms']:.2f}" + (f" ({times:.1f}x)" if times is not None else "")


def readme(
    result: Result,
    made: Sequence[Mapping[str, Any]],
    profiles: Sequence[Mapping[str, Any]],
    commands: Sequence[Sequence[str]],
    plotted: bool,
) -> str:
    """What was found, how to read it and how to make it again: several commands where folders were put together."""
    engines = result.analysis["engines"]
    lines = [f"# {result.name}", "", result.headline, ""]
    unfinished = [name for name, engine in engines.items() if not engine["complete"]]
    if unfinished:
        lines += [f"**Not complete:** {', '.join(unfinished)}. The same command continues.", ""]
    if plotted:
        lines += [f"![cycles by part]({folders.PLOT})", ""]
    unsteady = rows.unsteady(made)
    lines += [table(made), "", *([unsteady, ""] if unsteady else []), _HOW_TO_READ]
    if any(row["host_ms"] for row in made):
        lines += [_HOST]
    lines += ["Raw samples are in samples.jsonl; spreads and bytes by part in cells.json. Again:", ""]
    lines += [f"    {shlex.join(words)}" for words in commands]
    lines += ["", "## Made with", ""]
    document = result.document
    if document is not None:
        on = ", ".join(patch.name for patch in document.code.patches if patch.on)
        lines.append(f"- SGLang {document.code.release}, patch set `{document.code.id}`: {on or 'no patches'}")
        lines.append("- " + ", ".join(f"{name} {v}" for name, v in document.versions.items() if v))
        gpus = ", ".join(gpu.name for gpu in document.machine.gpus) or "no GPU"
        lines.append(
            f"- {gpus}; {document.machine.cpu}, {document.machine.cpus} CPUs; driver {document.machine.driver}"
        )
    for name, engine in engines.items():
        if engine["device"]:
            copy, start = engine["copy_gb_per_s"], engine["start_s"]
            share = f"{engine['share']}, " if engine["share"] else ""
            lines.append(
                f"- {name}: {share}{engine['device']}, copies {copy:.0f} GB/s (read and written), up in {start:.0f} s"
            )
        if engine["no_document"]:
            lines.append(f"- {name}: no provenance document: {engine['no_document']}")
    for profile in profiles:
        lines += ["", *_kernels(profile)]
    return "\n".join(lines) + "\n"


_HOW_TO_READ = """\
Medians in milliseconds; in brackets how many times the *floor*: bytes that the part must read (weights, of experts only
those routed to, the KV cache once per request) over the bandwidth of a copy on the same device. `verify` is the
target's forward, `sampling` what follows it until accepted tokens are committed, `host gap` the rest of a cycle. A part
includes the device's waits for the host within it. `decode steps` is the cycle over one step without speculation in the
same cell, `experts` the mean number of different experts a layer reads in the target's forward, `GPU busy` the
profiler's time in which the device did anything."""

_HOST = """\
`host` is a fixed loop of Python in the scheduler right before and after the cycles, as times the quickest row's."""


def _kernels(profile: Mapping[str, Any]) -> list[str]:
    where = f"{grid.key(profile['draft_tokens'])}, batch {profile['batch_size']}, context {profile['context']}"
    lines = [f"## Kernels: {where}, {profile['mode']}", ""]
    if "error" in profile:
        return [*lines, f"The profiler failed: {profile['error']}"]
    lines += [
        f"{profile['operations']:.0f} operations and {profile['busy']:.2f} ms of work a cycle, over "
        f"{profile['cycles']} cycles; those of most time:",
        "",
        "| part | µs | launches | kernel |",
        "|---|---|---|---|",
    ]
    for kernel in profile["kernels"][:_TOLD_KERNELS]:
        name = kernel["name"].replace("|", "\\|").replace("`", "'")
        short = name if len(name) <= _NAME_WIDTH else name[:_NAME_WIDTH] + "..."
        lines.append(f"| {kernel['part'] or '-'} | {kernel['us']:.1f} | {kernel['launches']:.1f} | `{short}` |")
    return lines
