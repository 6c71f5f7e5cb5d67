"""What each patch decided in this process: applied, not needed or failed, with its figures.

A setting is not an effect, so a patch records what it read back, not what it asked for. Each record is logged once, in
one line; patch ``provenance`` carries them to ``/server_info`` under the patch's name. Standard library only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

logger = logging.getLogger("sglang_patches")

Result = Literal["applied", "not needed", "failed"]
Figures = Mapping[str, Any]

# Figures of these names count events, whichever patch has them: `merge` adds them up over processes.
SUMMED = ("passes", "failures_inside", "launches")

_recorded: dict[str, dict[str, Any]] = {}
_suppliers: dict[str, Callable[[], Figures]] = {}


def record(patch: str, result: Result, detail: str, **figures: Any) -> None:
    """Keep and log what `patch` (its name in the series) decided in this process; a later record replaces it.

    Args:
        detail: one clause for people: what was done, or why not.
        figures: JSON-able values, by names that stay the same from release to release.
    """
    entry = {"result": result, "detail": detail, **figures}
    if _recorded.get(patch) == entry:
        return
    _recorded[patch] = entry
    told = "".join(f" {name}={value}" for name, value in figures.items())
    level = logging.WARNING if result == "failed" else logging.INFO
    logger.log(level, "sglang-patches: %s: %s: %s%s", patch, result, detail, told)


def live_figures(patch: str, supply: Callable[[], Figures]) -> None:
    """Ask `supply` for more figures of `patch` (counters, say) each time the outcomes are read."""
    _suppliers[patch] = supply


def outcomes() -> dict[str, dict[str, Any]]:
    """By patch name: ``result``, ``detail`` and figures; patches that decide nothing at run time have no entry."""
    told = {patch: dict(entry) for patch, entry in _recorded.items()}
    for patch, supply in _suppliers.items():
        told.setdefault(patch, {}).update(supply())
    return told


def merge(processes: list[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Outcomes of several processes as one, so that a figure is found at the same place for one process and for many.

    An entry has the worst ``result`` and the ``detail`` that belongs to it, the figures that are equal in all processes
    that have them, and the sum of those named in `SUMMED`. Where processes differ, ``by_process`` has the entries as
    they were, failed ones first; figures that differ are only there.

    Args:
        processes: `outcomes` of each, the launching process first, then the schedulers in the order they answered.
    """
    merged: dict[str, Any] = {}
    for patch in sorted({name for told in processes for name in told}):
        seen = [dict(told[patch]) for told in processes if patch in told]
        worst = sorted(seen, key=lambda entry: entry.get("result") != "failed")
        whole: dict[str, Any] = {name: worst[0][name] for name in ("result", "detail") if name in worst[0]}
        for name in dict.fromkeys(name for entry in worst for name in entry if name not in ("result", "detail")):
            values = [entry[name] for entry in worst if name in entry]
            if name in SUMMED:
                whole[name] = _added(values)
            elif all(value == values[0] for value in values):
                whole[name] = values[0]
        if any(entry != seen[0] for entry in seen):
            whole["by_process"] = worst
        merged[patch] = whole
    return merged


def _added(values: list[Any]) -> Any:
    """The sum of whole numbers, or of mappings of them, name by name; of anything else the first."""
    if all(isinstance(value, Mapping) for value in values):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _added([value[name] for value in values if name in value]) for name in names}
    if all(isinstance(value, int) for value in values):
        return sum(values)
    return values[0]
