"""Results from before result folders, and of tools that keep a format of their own: one JSON file each.

Each reader takes JSON data and returns a section, or None where the data is not of its format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from sglang_patches.bench import words
from sglang_patches.bench.report import sections, speculation
from sglang_patches.bench.report.sections import Section
from sglang_patches.bench.tables import Cell, Interval, Table, number, rows_table, said
from sglang_patches.document import schema
from sglang_patches.document.diff import diff, summary
from sglang_patches.errors import PatchError

Data = Mapping[str, Any]

# A list in a row that is longer holds raw samples.
_SAMPLES = 3
# What made a row, not what was measured.
_NOT_MEASURED = {"provenance", "document", "code_state", "outcome", "samples"}


def read(file: Path) -> Section | None:
    """The section of a JSON file; None where it is none of the formats known here.

    Raises:
        PatchError: it is of a known format and cannot be read.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PatchError(f"{file}: not JSON: {error}\n  remedy     restore it (git checkout {file})") from None
    if not isinstance(data, dict):
        return None
    for reader in (_tune, _tiles, _verify_step, _speed, _agree, _stress, _slices, _spec_plan, _script):
        try:
            section = reader(data, file)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            what = type(error).__name__
            raise PatchError(
                f"{file}: looks like the result of {reader.__doc__} and cannot be read: {what}: {error}\n"
                f"  remedy     restore it (git checkout {file})"
            ) from None
        if section is not None:
            section.plot, trouble = sections.plot(file.with_suffix(".png"))
            section.warnings += [trouble] if trouble else []
            return section
    return None


def _tune(data: Data, file: Path) -> Section | None:
    """`sglang-patches nccl tune`"""
    if not {"plan", "runs", "format"} <= data.keys():
        return None
    from sglang_patches.nccl.tune import load
    from sglang_patches.nccl.verdict import decide

    measured, made_by = load(file)
    verdict = decide(measured)
    section = _section(data, file, "nccl tune", verdict.why, made_by)
    job = measured.plan.job
    columns = ["", "ratio", "interval", *(f"{rows} rows, µs" for rows in job.rows), "rounds"]
    rows, out = [], []
    for entry in verdict.entries:
        name, found = entry.candidate.name, entry.comparison
        if found is None:
            out.append([Cell(name), Cell(entry.out)])
            continue
        overall = found.overall
        tone = "good" if overall.high < 1 else "bad" if overall.low > 1 else "unclear"
        bounds = Interval(overall.value, overall.low, overall.high)
        cells = [
            Cell(name),
            Cell(number(overall.value), number=True),
            Cell(f"{number(overall.low)} to {number(overall.high)}", bounds, tone, number=True),
        ]
        for size in job.rows:
            middle = found.median.get(size)
            cells.append(Cell(f"{middle.value:.1f}" if middle else "-", number=True))
        cells.append(Cell(str(found.rounds), number=True))
        rows.append(cells)
    note = "ratio: to NCCL as it comes, geometric mean over the sizes; below 1 is faster"
    section.tables = [Table(f"all-reduce of rows x {job.hidden} {job.dtype}, {job.world} ranks", columns, rows, note)]
    if out:
        section.tables.append(Table("not measured", ["", "why"], out))
    section.warnings += verdict.notes
    if measured.interrupted:
        section.warnings.append(f"cut short: {measured.interrupted}")
    replays = sum(len(rank) for run in measured.runs for ranks in run.samples.values() for rank in ranks)
    section.facts.append(("raw samples", f"{replays:,} replays of {job.calls} all-reduces, over all ranks"))
    return section


def _tiles(data: Data, file: Path) -> Section | None:
    """`sglang-patches tune moe`"""
    if not {"geometry", "rows", "fastest_reading"} <= data.keys():
        return None
    from sglang_patches.tune.moe.space import read as tiles

    section = _section(data, file, "tune moe", data["headline"], data["provenance"])
    rows = []
    for row in data["rows"]:
        layer, cells = row["layer"], [Cell(str(row["tokens"]), number=True)]
        if layer is None:
            cells += [Cell("-"), Cell("-"), Cell("upstream's choice, or not reached")]
        else:
            high = math.inf if layer["high"] is None else layer["high"]
            tone = "good" if high < 1 else "bad" if layer["low"] > 1 else "unclear"
            cells += [Cell(f"{layer[name]:.1f}", number=True) for name in ("upstream_us", "tuned_us")]
            told = f"{layer['ratio']:.3f} ({layer['low']:.3f} to {high:.3f})"
            cells.append(Cell(told, Interval(layer["ratio"], layer["low"], high), tone, number=True))
        cells.append(Cell(f"{row['floor_us']:.1f}" if row["floor_holds"] else "no floor", number=True))
        cells += [Cell(str(tiles(row["chosen"][gemm]))) for gemm in ("gate_up", "down")]
        rows.append(cells)
    columns = ["tokens", "upstream, µs", "ours, µs", "ours / upstream", "bytes alone, µs", "gate_up", "down"]
    fastest = data["fastest_reading"]
    note = f"bytes alone: active experts at {fastest['bytes_a_second'] / 1e9:.0f} GB/s, {fastest['of']}"
    section.tables = [Table(f"a whole layer on {data['facts']['device']}", columns, rows, note)]
    if not all(row["floor_holds"] for row in data["rows"]):
        section.warnings.append("less than `bytes alone` was measured: something is reckoned wrong")
    return section


def _verify_step(data: Data, file: Path) -> Section | None:
    """`benchmark.verify_step`"""
    if not {"summary", "samples", "options"} <= data.keys():
        return None
    rows = {(row["batch_size"], row["mode"]): row for row in data["summary"]}
    largest = max(batch for batch, _ in rows)
    told = [f"{mode} {rows[largest, mode]['cycle']:.2f} ms" for mode in ("graph", "eager") if (largest, mode) in rows]
    headline = f"a cycle of {largest} requests: {', '.join(told)}"
    section = _section(data, file, "verify-step", headline, data)
    section.tables = [rows_table("ms, medians over cycles", data["summary"])]
    if data.get("busy"):
        section.tables.append(rows_table("GPU busy (profiler), ms per cycle", data["busy"]))
    section.charts = sections.grid(data["summary"])
    cycles = sum(len(entry["cycles"]) for entry in data["samples"])
    section.facts.append(("raw samples", f"{cycles:,} cycles"))
    options = ", ".join(f"{name} {said('', value).text}" for name, value in data["options"].items())
    section.facts.append(("engine", options))
    return section


def _speed(data: Data, file: Path) -> Section | None:
    """`benchmark.tiny_kimi.speed`"""
    if not {"ratio", "interval_95", "a", "b"} <= data.keys():
        return None
    low, high = data["interval_95"]
    headline = f"A serves {data['ratio']:.3f} times the tokens/s of B ({low:.3f} to {high:.3f})"
    section = _section(data, file, "speed", headline, {})
    columns = ["", "A", "B", "ratio A/B", "interval"]
    rows = []
    for name in ("tokens_per_s", "tokens_per_step", "ms_per_step"):
        cells = [Cell(name.replace("_", " ")), *(said(name, data[arm][name]) for arm in ("a", "b"))]
        bounds = Cell(f"{number(low)} to {number(high)}", Interval(data["ratio"], low, high), number=True)
        rest = [said("ratio", data["ratio"]), bounds] if name == "tokens_per_s" else [Cell("-"), Cell("-")]
        rows.append(cells + rest)
    section.tables = [Table("", columns, rows, "bootstrap over prompts, of one server each: it knows no server's luck")]
    _sides(section, data, file)
    if not section.machine:
        section.machine = said("", data["machine"]).text
    section.facts.append(("raw samples", f"{sum(map(len, data['samples'].values())):,} requests"))
    return section


def _agree(data: Data, file: Path) -> Section | None:
    """`benchmark.tiny_kimi.agree`"""
    if not {"prompts", "differences", "a", "b"} <= data.keys():
        return None
    found = data["differences"]
    unexplained = sum(not one["explained"] for one in found)
    equal = len(data["prompts"]) - len(found)
    headline = f"{equal} of {len(data['prompts'])} answers equal, {unexplained} not explained by rounding"
    section = _section(data, file, "agree", headline, {})
    if found:
        section.tables = [rows_table("first differences, logits", found)]
    _sides(section, data, file)
    tokens = sum(len(answer) for side in ("a", "b") for answer in data[side]["output_ids"])
    section.facts.append(("raw samples", f"{tokens:,} tokens"))
    return section


def _sides(section: Section, data: Data, file: Path) -> None:
    """Code states of two servers, A and B, and what differs between them."""
    documents = {}
    section.code = []
    for side in ("a", "b"):
        found = schema.find(data[side].get("document") or data[side].get("sglang_patches"))
        if found is None:
            section.code.append((side, "", code(data[side].get("sglang_patches") or {})))
        else:
            documents[side] = schema.parse(found, str(file))
            section.code.append((side, "", words.code(documents[side])))
    if len(documents) == 2:
        differences = diff(documents["a"], documents["b"])
        said_so = summary(documents["a"], documents["b"], differences)
        section.apart = [(said_so, [str(one) for one in differences if one.matters])]


def _stress(data: Data, file: Path) -> Section | None:
    """`benchmark.allreduce.stress`"""
    predecessor = {"nccl", "mode", "guard"} <= data.keys()
    if not predecessor and not {"wrong", "ranks", "options"} <= data.keys():
        return None
    if predecessor:
        steps, wrong = data.get("steps", 0), data.get("wrong")
        facts = {name: data[name] for name in data if name not in ("samples_ms", "us_per_call", "wrong", "name")}
        times = [data.get("us_per_call") or {}]
        samples = sum(map(len, data.get("samples_ms", {}).values()))
    else:
        facts, ranks = dict(data["options"]), data["ranks"] or []
        steps, wrong = facts["steps"], data["wrong"]
        taken = [rank["us"] or {} for rank in ranks]
        times = [{rows: median(us) for rows, us in one.items()} for one in taken]
        samples = sum(len(us) for one in taken for us in one.values())
    headline = f"{wrong} wrong sums in {steps:,} steps" if steps else "time only: no sums were checked"
    if not data.get("finished", True):
        headline = "the ranks did not finish"
    if facts.get("broken") is not None:
        headline += " (one was planted on purpose)"
    section = _section(data, file, "all-reduce stress", headline, data.get("provenance", {}))
    if any(times):
        shown = [{"rank": at, **{f"{rows} rows": us for rows, us in one.items()}} for at, one in enumerate(times)]
        section.tables.append(rows_table("µs per all-reduce in a captured graph, medians", shown))
        section.facts.append(("raw samples", f"{samples:,} replays"))
    if not predecessor and ranks:
        checked = [{"rank": at, **{name: rank[name] for name in ("checked", "wrong", "guard", "seconds")}}
                   for at, rank in enumerate(ranks)]  # fmt: skip
        section.tables.append(rows_table("ranks", checked))
    section.tables.append(
        Table("", ["", ""], [[Cell(name.replace("_", " ")), Cell(said(name, facts[name]).text)] for name in facts])
    )
    return section


def _slices(data: Data, file: Path) -> Section | None:
    """`benchmark.sliced_verify`"""
    engines = [engine for engine in ("tiny", "shard") if f"{engine}.start" in data]
    if not engines:
        return None
    section = _section(data, file, "sliced verify", "", data["provenance"])
    titles = {"forward": "one verify, largest differences", "served": "greedy answers that are equal",
              "cycles": "ms, medians over cycles"}  # fmt: skip
    told = []
    for engine in engines:
        for part in ("start", "forward", "served", "cycles", "end"):
            found = data.get(f"{engine}.{part}")
            if found is None:
                continue
            if "error" in found:
                section.warnings.append(f"{engine}.{part} failed: {found['error'].strip().splitlines()[-1]}")
            elif part in titles:
                shown = [{name: row[name] for name in row if name != "samples"} for row in found]
                section.tables.append(rows_table(f"{engine}: {titles[part]}", shown))
            elif part == "start":
                slices = found["outcome"].get("slices") or {"up_to": 0, "why": "none", "measured": []}
                told.append(f"{engine}: slices up to {slices['up_to']} requests, {slices['why']}")
                if slices["measured"]:
                    section.tables.append(rows_table(f"{engine}: what start-up measured", slices["measured"]))
    section.headline = "; ".join(told) or "an engine told no start"
    return section


def _spec_plan(data: Data, file: Path) -> Section | None:
    """`benchmark.spec_plan`"""
    if not speculation.fits(data):
        return None
    section = _section(data, file, "spec_plan", str(data.get("headline", "")), data)
    section.tables = speculation.tables(data)
    asked = {name: value for name, value in data["work"].items() if value is not None and name != "plan"}
    section.facts.append(("work", ", ".join(f"{name} {said('', value).text}" for name, value in asked.items())))
    answers = sum(len(row["seconds"]) for one in data["engines"] for row in one["batches"])
    section.facts.append(("raw samples", f"{answers:,} batches of answers"))
    return section


def _script(data: Data, file: Path) -> Section | None:
    """a script of `benchmark`, which writes lists of like rows beside its code state"""
    lists = {name: value for name, value in data.items() if isinstance(value, list) and value}
    lists = {name: value for name, value in lists.items() if all(isinstance(row, Mapping) for row in value)}
    document = schema.find(data)
    if not lists or (document is None and "code_state" not in data):
        return None
    command = data.get("command") or (schema.parse(document, str(file)).command if document else [])
    module = next((str(word) for word in command if str(word).startswith("benchmark.")), "")
    counts = ", ".join(f"{len(rows)} {name.replace('_', ' ')}" for name, rows in lists.items())
    told = str(data.get("headline") or counts)
    section = _section(data, file, module.removeprefix("benchmark.") or "measurements", told, data)
    section.tables = [rows_table(name.replace("_", " "), [_flat(row) for row in rows]) for name, rows in lists.items()]
    plain = {name: value for name, value in data.items() if isinstance(value, str | int | float)}
    section.facts += [(name.replace("_", " "), said(name, value).text) for name, value in plain.items()
                      if name not in ("when", "made", "headline")]  # fmt: skip
    return section


def _flat(row: Data, above: str = "") -> dict[str, Any]:
    """A row's numbers and words by their names, those inside others too; its raw samples stay in the file."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if name in _NOT_MEASURED:
            continue
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{above}{name} ")
        elif not isinstance(value, list) or _short(value):
            flat[f"{above}{name}"] = value
    return flat


def _short(value: list[Any]) -> bool:
    return len(value) <= _SAMPLES and not any(isinstance(one, list | Mapping) for one in value)


def _section(data: Data, file: Path, kind: str, headline: str, made_by: Data) -> Section:
    """What all formats share. `made_by`: where the format keeps its code state."""
    section = Section(name=file.stem, kind=kind, where=str(file), headline=headline)
    if file.parent.name not in ("results", "verify_step"):
        section.name = f"{file.parent.name}/{file.stem}"
    section.when = str(data.get("when") or data.get("made") or "")
    command = made_by.get("command")
    section.command = words.command(map(str, command)) if isinstance(command, list) else ""
    found = schema.find(data)
    if found is not None:
        document = schema.parse(found, str(file))
        section.machine = words.machine(document)
        section.code = [("", "", words.code(document))]
        return section
    state = made_by.get("code_state")
    if isinstance(state, dict):
        section.code = [("", "", code(state))]
    section.machine = ", ".join(
        filter(None, (str(made_by.get("topology", "")), str(state.get("gpu", "")) if isinstance(state, dict) else ""))
    )
    return section


def code(state: Data) -> list[str]:
    """A code state as these formats kept it, in sentences."""
    inner = state.get("sglang_patches")
    patches: Data = inner if isinstance(inner, dict) else state
    names = ", ".join(str(patch.get("name")) for patch in patches.get("patches") or [])
    found = patches.get("id") or patches.get("patch_set_id")
    told = [f"sglang {patches.get('release', 'of unknown release')}, patch set {found or 'unknown'}"]
    told.append(f"on: {names or 'no patch'}" if found else str(state.get("unknown") or inner or "nothing told"))
    versions = [f"{name} {state[name]}" for name in ("torch", "cuda", "python") if state.get(name)]
    return told + ([", ".join(versions)] if versions else [])
