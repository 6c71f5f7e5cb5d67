"""Cycle times from a result of `bench verify-step`, by draft steps, batch size and context."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_patches.errors import PatchError, first_missing

#: Plain decode, without speculation, where draft steps are asked for.
PLAIN = -1
#: A cycle whose slow tenth takes so many times its fast tenth is told to be noisy.
NOISY = 1.25
# Where a bare name of a result lies, as `bench` writes it.
_RESULTS = Path("benchmark/results")


@dataclass(frozen=True)
class Cell:
    """Milliseconds of one cycle (or decode step): median, 10th and 90th percentile; `target` is the part that grows
    with the target's layers, `extend` that of draft extend."""

    ms: float
    p10: float
    p90: float
    target: float
    extend: float


class Costs:
    """Measured times.

    Args:
        cells: by draft steps (`PLAIN`: no speculation), batch size, context in tokens.
        layers: how many of the real target's layers one measured layer stands for, so that a shard of 12 layers
            speaks for a model of 61: the target's part of a cycle is multiplied by it. Its head and embedding are in
            that part and are multiplied too, of a decode step as of verify.
        told: what was measured, in words.
    """

    def __init__(self, cells: Mapping[tuple[int, int, int], Cell], layers: float = 1.0, told: str = "") -> None:
        self._cells = dict(cells)
        self.layers = layers
        self.told = told
        self.batch_sizes = sorted({batch for _steps, batch, _context in cells})
        self.contexts = sorted({context for _steps, _batch, context in cells})
        self.steps = sorted({steps for steps, _batch, _context in cells} - {PLAIN})

    def measured(self, batch_size: int) -> int:
        """The batch size whose times a batch has: the next measured one, to which CUDA graphs would pad it.

        Raises PatchError beyond the largest.
        """
        found = next((size for size in self.batch_sizes if size >= batch_size), None)
        if found is None:
            raise PatchError(
                f"batch size {batch_size} is beyond what was measured (up to {self.batch_sizes[-1]})\n"
                f"  remedy     sglang-patches bench verify-step --batch-sizes ...,{batch_size} --out DIR"
            )
        return found

    def milliseconds(self, steps: int, batch_size: int, context: float) -> float | None:
        """Time of a cycle of `steps` draft steps (`PLAIN`: of a decode step); None where it was not measured.

        Between two measured contexts it lies on the line through them, since attention reads every cached token once.
        Raises PatchError: the batch or the context is outside of what was measured.
        """
        size = self.measured(batch_size)
        if not self.contexts[0] <= context <= self.contexts[-1]:
            raise PatchError(
                f"context {context:g} is outside of what was measured ({self.contexts[0]} to {self.contexts[-1]})\n"
                f"  remedy     --context within it, or bench verify-step --contexts ...,{context:g} --out DIR"
            )
        below = max(at for at in self.contexts if at <= context)
        above = min(at for at in self.contexts if at >= context)
        left, right = self._time(steps, size, below), self._time(steps, size, above)
        if left is None or right is None:
            return None
        return left if above == below else left + (right - left) * (context - below) / (above - below)

    def _time(self, steps: int, size: int, context: int) -> float | None:
        cell = self._cells.get((steps, size, context))
        if cell is not None:
            return cell.ms + (self.layers - 1) * cell.target
        if steps != 0:
            return None
        # Upstream's mode without drafts is a decode step and the draft's extend, which keeps its KV cache warm.
        plain = self._cells.get((PLAIN, size, context))
        extends = [self._cells[key].extend for key in self._cells if key[0] > 0 and key[1:] == (size, context)]
        if plain is None or not extends:
            return None
        return plain.ms + (self.layers - 1) * plain.target + min(extends)

    @property
    def zero_is_estimated(self) -> bool:
        """Whether a cycle without drafts was not measured, so that its time is reckoned from its parts."""
        return 0 not in self.steps

    def noisy(self) -> list[str]:
        """Cells that scatter, in words."""
        return [
            f"{'decode' if steps == PLAIN else f'{steps} steps'}, batch {batch}, context {context}: "
            f"{cell.p10:.2f} to {cell.p90:.2f} ms"
            for (steps, batch, context), cell in sorted(self._cells.items())
            if cell.p90 > NOISY * cell.p10
        ]


def read(place: Path, layers: int | None = None, measured: int | None = None) -> Costs:
    """The times of a result folder, or of its ``result.json``.

    Args:
        place: a bare name may also be that of a folder in benchmark/results, as for ``bench verify-step --out``.
        layers: of the target that is planned for; None: as many as were measured.
        measured: layers of the measured target, for results that do not tell.

    Raises:
        PatchError: it is no result of verify-step or not there, lacks decode without speculation, or does not tell
            its layers.
        OSError: it cannot be read.
    """
    if not place.exists() and len(place.parts) == 1:
        place = _RESULTS / place
    file = place if place.is_file() else place / "result.json"
    if not file.exists():
        seen = "has no result.json" if place.is_dir() else f"is not there{first_missing(place)}"
        raise PatchError(
            f"--costs {place} {seen}\n  remedy     name a folder that verify-step wrote, or make one: "
            "sglang-patches bench verify-step --out DIR"
        )
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        kind = result["kind"]
    except (ValueError, KeyError, TypeError, UnicodeDecodeError):
        kind = "none"
    if kind != "verify-step":
        raise PatchError(
            f"{file} is no result of verify-step (it is: {kind})\n"
            "  remedy     make one: sglang-patches bench verify-step --out DIR"
        )
    rows = _shown(result["analysis"]["rows"])
    cells = {(_steps(row), row["batch_size"], row["context"]): _cell(row) for row in rows}
    if not any(steps == PLAIN for steps, _batch, _context in cells):
        raise PatchError(
            f"{file} lacks decode without speculation, against which a plan is made\n"
            "  remedy     measure it: bench verify-step without --no-plain"
        )
    if not any(steps > 0 for steps, _batch, _context in cells):
        raise PatchError(f"{file} has no cycle with drafts\n  remedy     bench verify-step --draft-tokens 2,3,4")
    told = f"{file.parent.name}: {rows[0]['mode']}, {_device(result)}"
    if layers is None:
        return Costs(cells, told=told)
    measured = measured or _layers(result)
    if measured is None:
        raise PatchError(
            f"{file} does not tell how many layers its target had\n"
            "  remedy     --layers-measured N (a rank's share of bench verify-step has 12), or leave --target out"
        )
    return Costs(cells, layers / measured, f"{told}; {measured} layers measured, reckoned for {layers}")


def _shown(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those from CUDA graphs, or of a CPU."""
    graphs = [row for row in rows if row["mode"] == "graph"]
    return graphs or list(rows)


def _steps(row: Mapping[str, Any]) -> int:
    return int(row["draft_tokens"]) - 1


def _cell(row: Mapping[str, Any]) -> Cell:
    target = row["verify"] if row["draft_tokens"] else row["decode"]
    return Cell(row["cycle"], row["p10"], row["p90"], target, row.get("draft_extend") or 0.0)


def _device(result: Mapping[str, Any]) -> str:
    engines = result["analysis"].get("engines", {})
    return next((engine["device"] for engine in engines.values() if engine.get("device")), "unknown device")


def _layers(result: Mapping[str, Any]) -> int | None:
    engines = result["analysis"].get("engines", {})
    return next((engine["target_layers"] for engine in engines.values() if engine.get("target_layers")), None)
