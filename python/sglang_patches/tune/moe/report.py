"""The folder of `tune moe` beside its samples: the tables, tiles.json and README.md."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from sglang_patches.tune.moe import journal, tables
from sglang_patches.tune.moe.geometry import GEMMS
from sglang_patches.tune.moe.parent import Line, Result


def lines_of(result: Result) -> str:
    """The table for people, in Markdown."""
    rows = [
        "| tokens | upstream µs | ours µs | ours / upstream | bytes alone | gate_up | down | in the table |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in result.lines:
        ours, theirs, ratio = "-", "-", "not measured"
        if line.candidate is not None:
            ratio = "upstream's choice wins" if line.verdict is None and _same(line) else "not reached"
        if line.verdict is not None:
            v = line.verdict
            high = "?" if v.ratio.high == math.inf else f"{v.ratio.high:.3f}"
            theirs, ours = f"{v.upstream:.1f}", f"{v.tuned:.1f}"
            ratio = f"{v.ratio.value:.3f} ({v.ratio.low:.3f} to {high})"
        pair = line.candidate
        told = [str(pair.gate_up), str(pair.down)] if pair else ["-", "-"]
        taken = "ours" if line.chosen != line.upstream else "upstream's"
        floor = f"{line.floor_us:.1f}" if line.floor_holds else f"no floor: {line.floor_us:.1f}"
        rows.append(f"| {line.tokens} | {theirs} | {ours} | {ratio} | {floor} | {told[0]} | {told[1]} | {taken} |")
    return "\n".join(rows)


def _same(line: Line) -> bool:
    pair = line.candidate
    return pair is not None and {"gate_up": pair.gate_up, "down": pair.down} == line.upstream


#: Why a token count has upstream's choice, in the order of `_WHY`.
Why = Literal["not measured", "not reached", "differs", "not beaten", "upstream wins"]
_WHY: dict[Why, str] = {
    "not measured": "no pair of configurations was measured in all rounds",
    "not reached": "ours is faster by its single products, and the whole layer was not measured often enough",
    "differs": "ours gives another output than upstream's than rounding explains, so it was left out",
    "not beaten": "the whole layer is not faster with ours beyond chance",
    "upstream wins": "upstream's own choice is the fastest that was found, or within a percent of it",
}
_UNFINISHED: tuple[Why, ...] = ("not measured", "not reached")


def why_upstreams(line: Line) -> Why | None:
    """Why ours is not in the table at this token count; None where it is."""
    if line.chosen != line.upstream:
        return None
    if line.candidate is None:
        return "not measured"
    if _same(line):
        return "upstream wins"
    if line.verdict is None or line.verdict.ratio.high == math.inf:  # one round tells nothing
        return "not reached"
    return "differs" if line.verdict.ours else "not beaten"


def _by_reason(result: Result) -> dict[Why, list[int]]:
    found = {why: [line.tokens for line in result.lines if why_upstreams(line) == why] for why in _WHY}
    return {why: tokens for why, tokens in found.items() if tokens}


def _no_table(result: Result, command: str) -> str:
    """Of a run that wrote no table: why, and what to do; Markdown."""
    reasons = _by_reason(result)
    lines = [f"- at {_listed(tokens)} tokens: {_WHY[why]}" for why, tokens in reasons.items()]
    if any(why in reasons for why in _UNFINISHED):
        lines += [
            "",
            "The measurement is not whole, which says nothing of these tiles. The same command goes on where it was;",
            f"with a larger `--seconds` than {result.request.seconds:g} it comes further:",
            "",
            f"    {command}",
        ]
    elif "differs" in reasons:
        lines += ["", "`outputs_differ` in tiles.json says by how much. Serve without a table."]
    else:
        lines += [
            "",
            "So there is nothing to install: serve without a table, as before. A folder named by",
            "`SGLANG_PATCHES_MOE_TABLES` or `SGLANG_MOE_CONFIG_DIR` must hold one, so do not name this one. Other",
            "batch sizes (`--tokens`) or another shape may gain; try them with another `--out`.",
        ]
    return "\n".join(["## Why there is no table", "", *lines])


def _listed(tokens: Sequence[int]) -> str:
    return ", ".join(map(str, tokens))


def document(result: Result, provenance: dict[str, Any]) -> dict[str, Any]:
    """tiles.json: rows have the floor as `Line` has it; ``when`` is when measuring ended, however often it is made."""
    out = result.request.out

    def row(line: Line) -> dict[str, Any]:
        verdict = line.verdict
        told = verdict and {
            "upstream_us": verdict.upstream,
            "tuned_us": verdict.tuned,
            "ratio": verdict.ratio.value,
            "low": verdict.ratio.low,
            "high": None if verdict.ratio.high == math.inf else verdict.ratio.high,
        }
        return {
            "tokens": line.tokens,
            "upstream": {gemm: line.upstream[gemm].entry() for gemm in GEMMS},
            "chosen": {gemm: line.chosen[gemm].entry() for gemm in GEMMS},
            "ours": line.chosen != line.upstream,
            "products_us": line.candidate and line.candidate.us,
            "layer": told,
            "floor_us": line.floor_us,
            "floor_holds": line.floor_holds,
            "outputs_differ": line.differs,
        }

    facts = {name: value for name, value in result.facts.items() if name not in ("record", "upstream", "beyond")}
    return {
        "format": 1,
        "headline": headline(result),
        "when": journal.when(out, str(_told(out).get("when") or provenance.get("time") or "")),
        "geometry": result.request.geometry.document(),
        "facts": facts,
        "fastest_reading": asdict(result.rate),
        "rows": [row(line) for line in result.lines],
        "failed": result.failed,
        "provenance": provenance,
    }


def write(result: Result, provenance: dict[str, Any]) -> list[Path]:
    """Write all but the samples; returns the tables' paths."""
    out, facts = result.request.out, result.facts
    written: list[Path] = []
    if result.tables:
        written = tables.write(out, facts["triton"], facts["names"], result.tables)
    else:
        tables.remove(out, facts["triton"], facts["names"])
    text = json.dumps(document(result, provenance), indent=1)
    (out / tables.RESULT).write_text(text + "\n", encoding="utf-8")
    (out / "README.md").write_text(_readme(result, written, _arguments(provenance)), encoding="utf-8")
    return written


def measured_by(out: Path) -> dict[str, Any] | None:
    """The provenance in a folder that was reported on before: that of the machine that measured; None without one."""
    found = _told(out).get("provenance")
    return found if isinstance(found, dict) else None


def _told(out: Path) -> dict[str, Any]:
    """tiles.json as it is; empty where there is none."""
    try:
        told = json.loads((out / tables.RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _arguments(provenance: dict[str, Any]) -> list[str]:
    """Of the command that measured, behind the program's name."""
    command = [str(part) for part in provenance.get("command") or ()]
    return command[command.index("tune") :] if "tune" in command else ["tune", "moe"]


def headline(result: Result) -> str:
    """One sentence."""
    if not result.better:
        reasons = _by_reason(result)
        if unfinished := sorted(tokens for why in _UNFINISHED for tokens in reasons.get(why, [])):
            return f"Not measured far enough to tell at {_listed(unfinished)} tokens: there is no table yet."
        if "differs" in reasons:
            return f"What is faster at {_listed(reasons['differs'])} tokens gives other outputs: there is no table."
        return "Upstream's own choice is not beaten beyond chance at any token count: there is no table."
    ratios = [line.verdict.ratio.value for line in result.better if line.verdict]
    told = ", ".join(str(line.tokens) for line in result.better)
    return (
        f"The layer takes {min(ratios):.2f} to {max(ratios):.2f} of the time it takes with upstream's choice, "
        f"at {told} tokens."
    )


def _floor(result: Result) -> str:
    told = (
        "Bytes alone: weights of the experts that so many random tokens are expected to use, at the fastest rate that\n"
        f"this run saw, {result.rate.bytes_a_second / 1e9:.0f} GB/s ({result.rate.of})."
    )
    if result.broken_floors:
        at = ", ".join(str(tokens) for tokens in result.broken_floors)
        told += f"\n**At {at} tokens less than that was measured, so there it is no floor.** Look for what is wrong."
    return told


def _readme(result: Result, written: list[Path], arguments: list[str]) -> str:
    request, facts, g = result.request, result.facts, result.request.geometry
    command = f"sglang-patches {' '.join(arguments)}"
    behind = (
        f"Upstream takes the entry nearest to a batch. Behind {result.lines[-1].tokens} tokens the tables hold what "
        "upstream\ntakes without them."
        if written
        else _no_table(result, command)
    )
    shape = f", blocks of {g.block_shape}" if g.block_shape else ""
    found = "\n".join(f"- `{file.relative_to(request.out)}`" for file in written) or "- none"
    told = (
        f"{g.experts} experts, {g.top_k} a token, hidden {g.hidden}, intermediate {g.intermediate} on this rank, "
        f"{g.dtype}{shape}; Triton {facts['triton']}, torch {facts['torch']}.",
        "Microseconds of one whole layer (sort, two products, activation, sum) in a captured graph,",
        f"{facts['layers']} layers' weights in turn, random distinct experts; 95 % intervals that hold for all",
        "rows together.",
        _floor(result),
        "A configuration is block_m x block_n x block_k, g group, w warps, s stages.",
    )
    paragraph = "\n".join(told)
    return f"""# Fused-MoE tiles on {facts["device"]}

{headline(result)}

{paragraph}

{lines_of(result)}

{behind}

## Files

{found}
- `samples*.jsonl`: every sample; `tiles.json`: this table, and what made it (`provenance`)
- {len(result.failed)} configurations did not run or were wrong; `failed` in tiles.json says why

## Again

    {command}
"""
