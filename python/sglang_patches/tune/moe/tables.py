"""The files upstream reads: their entries, also beyond what was measured, their names and folders.

Upstream takes the entry whose token count is nearest, however far it is. A table of 1 to 64 tokens alone would serve a
prefill of 4,096 with the tiles of a decode step; so behind the largest measured count stand entries with what upstream
takes there without a table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from sglang_patches.tune.moe.geometry import Gemm
from sglang_patches.tune.moe.space import Config

#: The result beside the tables. Not result.json, which is what `bench` writes.
RESULT = "tiles.json"

Row = dict[Gemm, Config]
Table = dict[int, dict[str, int | bool]]


def beyond(largest: int, experts: int, of_upstream: Iterable[int] = ()) -> list[int]:
    """Token counts that keep upstream's choice behind the largest measured one.

    Two past it, so that it is the nearer one from the next count on; without a table upstream's choice changes where
    there are more tokens than experts, with one at the token counts of its entries.
    """
    return sorted({largest + 2, *(key for key in (experts, experts + 1, *of_upstream) if key > largest + 2)})


def assemble(measured: Mapping[int, Row], kept: Mapping[int, Row]) -> dict[Gemm, Table]:
    """The tables of both products, by token count; `kept` are the entries of `beyond`."""
    rows = {**kept, **measured}
    tables: dict[Gemm, Table] = {"gate_up": {}, "down": {}}
    for tokens in sorted(rows):
        up, down = rows[tokens]["gate_up"], rows[tokens]["down"]
        # One sorting of tokens serves both products; upstream would override it, and warn.
        down = replace(down, block_m=up.block_m)
        tables["gate_up"][tokens], tables["down"][tokens] = up.entry(), down.entry()
    return tables


def folder(root: Path, triton: str) -> Path:
    """Where upstream looks below the folder that ``SGLANG_MOE_CONFIG_DIR`` names."""
    return root / "configs" / f"triton_{triton.replace('.', '_')}"


def write(root: Path, triton: str, names: Mapping[Gemm, str], tables: Mapping[Gemm, Table]) -> list[Path]:
    """Write both files below `root`; returns their paths.

    Args:
        names: the file names that upstream's ``get_config_file_name`` gives.
    """
    place = folder(root, triton)
    place.mkdir(parents=True, exist_ok=True)
    written = []
    for gemm, table in tables.items():
        entries = (f'    "{tokens}": {json.dumps(entry)}' for tokens, entry in sorted(table.items()))
        file = place / names[gemm]
        file.write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")
        written.append(file)
    return written


def remove(root: Path, triton: str, names: Mapping[Gemm, str]) -> None:
    """Remove what `write` wrote below `root` before further samples said otherwise, so that no server takes it."""
    for name in names.values():
        (folder(root, triton) / name).unlink(missing_ok=True)
