"""Runs `tune moe` on the CPU, upstream's kernel interpreted: see `test_moe_kernel.py`, which starts it. A process of
its own: Triton decides once whether it interprets.

    python moe_kernel.py FOLDER      (one JSON object: what was found)
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "SGLANG_PATCHES": "none"}
# As `parent` starts a worker: a CPU server without patches lacks its sgl_kernel.
os.environ.pop("SGLANG_USE_CPU_ENGINE", None)

import torch

from sglang_patches.errors import PatchError
from sglang_patches.tune.moe import journal, layer, parent, space, tables, worker
from sglang_patches.tune.moe.geometry import Geometry
from sglang_patches.tune.moe.kernel import Experts
from sglang_patches.tune.moe.space import Config

SMALL = Geometry(4, 64, 64, 2, "float16")
OTHERS = {
    "int4_w4a16": Geometry(4, 64, 64, 2, "int4_w4a16", (0, 32)),
    "fp8_w8a8": Geometry(4, 128, 128, 2, "fp8_w8a8", (128, 128)),
}
CONFIG = Config(16, 32, 64)


def errors(geometry: Geometry) -> dict[str, float]:
    experts = Experts(geometry, torch.device("cpu"), layers=2)
    found = {gemm: experts.error(gemm, CONFIG, 3) for gemm in ("gate_up", "down")}
    # The same call on another layer's weights is wrong: the check sees weights, not only shapes.
    experts.weights["gate_up"].reverse()
    found["gate_up of another layer"] = experts.error("gate_up", CONFIG, 3)
    return found


def flow(folder: Path) -> dict[str, Any]:
    """All stages, once and again, with a configuration in between that ended its process."""
    request = parent.Request(SMALL, (1, 2), folder, (), seconds=600, layers=2, candidates=1)
    plan = worker.Plan(SMALL, (1, 2), 2, 1, 600, 1)
    file = folder / "samples.jsonl"
    folder.mkdir()
    worker.Worker(plan, file, "").run()
    first = journal.read(file)
    worker.Worker(plan, file, "").run()
    again = journal.read(file)[len(first) :]
    died = next(
        r["config"] for r in first if r["record"] == "screen" and r["gemm"] == "down" and "w-" not in r["config"]
    )
    short = folder / "died.jsonl"
    for record in first:
        if record["record"] in ("plan", "begin") or (record["record"] == "screen" and record["config"] != died):
            journal.append(short, record)
    after = worker.Worker(plan, short, "")
    made = parent.result(request)
    elsewhere = folder / "elsewhere" / "samples.jsonl"
    elsewhere.parent.mkdir()
    for record in first:
        journal.append(elsewhere, {**record, "triton": "3.1.0"} if record["record"] == "facts" else record)
    before, refused = elsewhere.read_text(), ""
    try:
        worker.Worker(plan, elsewhere, "").run()
    except PatchError as error:
        refused = str(error)
    return {
        "elsewhere": refused,
        "elsewhere is as it was": elsewhere.read_text() == before,
        "place": sorted(
            {name for record in first if record["record"] == "facts" for name in journal.PLACE if record[name]}
        ),
        "records": sorted({record["record"] for record in first}),
        "timed": sorted({record["record"] for record in first if "at" in record}),
        "again": sorted({record["record"] for record in again}),
        "names": after.known.facts["names"],
        "died": died,
        "out": after.known.bad("down", space.parse(died), 1.0),
        "finalists": [str(config) for config in after.finalists(1)["down"]],
        "lines": [line.tokens for line in made.lines],
        "candidates": [line.candidate is not None for line in made.lines],
    }


def lookup(folder: Path) -> dict[str, Any]:
    """What upstream takes from the tables that are written for it."""
    experts = Experts(SMALL, torch.device("cpu"))
    pair: tables.Row = {"gate_up": replace(CONFIG, stages=5), "down": replace(CONFIG, warps=8, tma=True)}
    with layer.tables_from(None):
        default = {at: layer.looked_up(experts, at) for at in (1, 2, 3, 4, 5, 6, 4096)}
        kept = {at: layer.looked_up(experts, at) for at in tables.beyond(2, SMALL.experts)}
    import triton

    tables.write(folder, triton.__version__, layer.file_names(experts), tables.assemble({1: pair, 2: pair}, kept))
    with layer.tables_from(folder):
        ours = {at: layer.looked_up(experts, at) for at in default}
    # Interpreted, the kernel asserts that what TMA loads as activations is fp8; compiled, it does not look.
    plain = {gemm: replace(config, tma=False) for gemm, config in pair.items()}
    tables.write(folder, triton.__version__, layer.file_names(experts), tables.assemble({1: plain}, kept))
    _, got = layer.Layer(experts, 1).capture(1, folder)
    _, wanted = layer.Layer(experts, 1).capture(1, None)
    missing = ""
    try:
        layer.Layer(experts, 1).capture(1, folder / "empty")
    except Exception as error:
        missing = type(error).__name__
    return {
        "ours at": [at for at in ours if ours[at] == pair],
        "as without at": [at for at in ours if ours[at] == default[at]],
        "missing": missing,
        "differs": ((got - wanted).abs().max() / wanted.abs().max()).item(),
    }


if __name__ == "__main__":
    place = Path(sys.argv[1])
    torch.set_grad_enabled(False)
    layer.publish()
    found: dict[str, Any] = {"errors": {name: errors(of) for name, of in {"float16": SMALL, **OTHERS}.items()}}
    (place / "empty" / "configs").mkdir(parents=True)
    found["flow"] = flow(place / "out")
    found["lookup"] = lookup(place)
    print(json.dumps(found))
