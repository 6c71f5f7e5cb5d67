"""Times draft extend's attention on one GPU: upstream's extend and split kernels, and that of draft-extend-split-kv.

    python -m benchmark.extend_attention.run --out benchmark/results/NAME/attention.json      # under a minute
    python -m benchmark.extend_attention.run --out FILE --sweep                               # tiles and splits as well
    TRITON_INTERPRET=1 python -m benchmark.extend_attention.run --out FILE --cpu              # the flow alone, tiny

The one layer of an EAGLE-3 draft of Kimi-K2.5 on a TP-8 rank, 4 new tokens a request. Kernels take turns, each replayed
from a CUDA graph of its own, with the L2 cache overwritten before. Each output is compared with attention in float32.
Ends with 0 if all was measured and near the reference, 1 if not, 2 if it could not run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmark.verify_attention.run import WORST, Kernel, timed
from sglang_patches import provenance
from sglang_patches.bench.folder import replace
from sglang_patches.runtime._split_kv import check
from sglang_patches.runtime._split_kv.plan import Tiles
from sglang_patches.runtime.draft_extend_split_kv.launch import KNOWN, ROWS_16, ROWS_32, ROWS_64, SplitExtend

HEADS, WIDTH, TOKENS = 8, 128, 4
# Of 64 query heads of a published draft for this model (TorchSpec's), 64 have a KV head of their own; `bench shard`
# writes a draft in which the rank's 8 share one.
KV_HEADS = (8, 1)
BATCHES, CONTEXTS = (1, 4, 16), (1024, 8192, 32768)
SWEPT = {
    "16 rows": ROWS_16,
    "16 rows, 2 resident": Tiles(16, 64, 4, 3, 2),
    "16 rows, 2 stages": Tiles(16, 64, 4, 2, 3),
    "16 rows, 5 stages": Tiles(16, 64, 4, 5, 2),
    "16 rows, 32 tokens": Tiles(16, 32, 4, 3, 4),
    "16 rows, 32 tokens, 5 stages": Tiles(16, 32, 4, 5, 4),
    "16 rows, 128 tokens": Tiles(16, 128, 4, 3, 2),
    "16 rows, 128 tokens, 8 warps": Tiles(16, 128, 8, 3, 2),
    "32 rows": ROWS_32,
    "32 rows, 3 stages": Tiles(32, 64, 4, 3, 2),
    "32 rows, 8 warps": Tiles(32, 64, 8, 3, 2),
    "32 rows, 128 tokens, 8 warps": Tiles(32, 128, 8, 3, 1),
    "64 rows": ROWS_64,
}
SWEPT_SPLITS = (16, 32, 64, 128)
SWEPT_CELLS = ((1, 1024), (1, 32768), (16, 8192))


class Cell(NamedTuple):
    kv_heads: int
    batch: int
    context: int


class Problem:
    """Random tensors of one cell, and what each kernel is to write.

    Args:
        pool: keys and values, (2, slots, KV_HEADS, width); the first ``cell.kv_heads`` heads' numbers are used.
    """

    def __init__(self, cell: Cell, tokens: int, pool: torch.Tensor) -> None:
        device, slots, width = pool.device, pool.shape[1], pool.shape[3]
        self.cell, self.tokens = cell, tokens
        heads = cell.kv_heads
        self.k_cache, self.v_cache = (half.view(-1)[: slots * heads * width].view(slots, heads, width) for half in pool)
        generator = torch.Generator(device=device).manual_seed(cell.batch * cell.context + heads)
        rows = cell.batch * tokens
        # As a draft's layer has them: parts of one row.
        made = torch.randn(rows, (HEADS + 2 * heads) * width, generator=generator, device=device).to(pool.dtype)
        q, k, v = made.split([HEADS * width, heads * width, heads * width], 1)
        self.q, self.k, self.v = q.view(rows, HEADS, width), k.view(rows, heads, width), v.view(rows, heads, width)
        self.indices = torch.randperm(slots - 1, generator=generator, device=device)[: cell.batch * cell.context] + 1
        self.indptr = torch.arange(cell.batch + 1, device=device, dtype=torch.int32) * cell.context
        self.qo_indptr = torch.arange(cell.batch + 1, device=device) * tokens
        self.out = torch.empty(rows, HEADS, width, dtype=pool.dtype, device=device)
        self.scale = width**-0.5

    def reference(self) -> torch.Tensor:
        """(batch * tokens, HEADS, width), float32."""
        begins = [request * self.cell.context for request in range(self.cell.batch + 1)]
        tensors = (self.q, self.k, self.v, self.k_cache, self.v_cache, self.indices)
        return check.attention(*tensors, begins, scale=self.scale)

    def upstreams(self, function: Callable[..., Any]) -> Kernel:
        """Upstream's ``extend_attention_fwd`` or ``verify_splitkv_fwd``, called as its triton backend does."""
        # The backend copies both in every call; here that is done before, in upstream's favour.
        k, v = self.k.contiguous(), self.v.contiguous()
        return lambda: function(
            self.q,
            k,
            v,
            self.out,
            self.k_cache,
            self.v_cache,
            self.qo_indptr,
            self.indptr,
            self.indices,
            None,
            True,
            None,
            self.tokens,
            1.0,
            1.0,
            self.scale,
        )

    def split(self, cores: int, tile: Tiles | None = None, splits: int | None = None) -> Kernel:
        """The patch's kernels."""
        width, (kv_heads, batch, _) = self.q.shape[2], self.cell
        made = SplitExtend(
            batch,
            self.tokens,
            HEADS,
            kv_heads,
            width,
            width,
            cores=cores,
            device=self.q.device,
            tile=tile,
            override=splits,
        )
        tensors = (self.q, self.k, self.v, self.out, self.k_cache, self.v_cache, self.indptr, self.indices)
        return lambda: made(*tensors, scale=self.scale)


def main() -> int:
    """Run it; returns the exit status, see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the result")
    parser.add_argument("--rounds", type=int, default=15, help="samples a kernel and cell (default 15)")
    parser.add_argument("--sweep", action="store_true", help="also other tiles and numbers of splits, in six cells")
    parser.add_argument("--cpu", action="store_true", help="the flow on a CPU, in triton's interpreter")
    given = parser.parse_args()
    if not given.cpu and not torch.cuda.is_available():
        print("extend_attention: no GPU here; --cpu walks through the flow without one", file=sys.stderr)
        return 2
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
    from sglang.kernels.ops.attention.verify_splitkv import verify_splitkv_fwd

    device, dtype, width, cores = ("cpu", torch.float32, 32, 4) if given.cpu else ("cuda", torch.bfloat16, WIDTH, 0)
    cells = [Cell(h, b, c) for h in KV_HEADS for c in CONTEXTS for b in BATCHES]
    swept = [Cell(h, *cell) for h in KV_HEADS for cell in SWEPT_CELLS]
    if given.cpu:
        cells = swept = [Cell(8, 2, 70), Cell(1, 2, 70)]
        given.rounds = 1
    else:
        cores = torch.cuda.get_device_properties(0).multi_processor_count
    most = max(cell.batch * cell.context for cell in cells)
    pool = torch.empty(2, most + 64, max(KV_HEADS), width, dtype=dtype, device=device).normal_()
    flush = torch.empty(1 << (10 if given.cpu else 28), dtype=torch.uint8, device=device)
    result: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["python", "-m", "benchmark.extend_attention.run", *sys.argv[1:]],
        "provenance": {"code_state": {"sglang_patches": provenance.code_state()}},
        "shape": {
            "heads": HEADS,
            "width": width,
            "new_tokens": TOKENS,
            "dtype": str(dtype),
            "multiprocessors": cores,
        },
        "tiles": {str(tile.block_m): asdict(tile) for tile in KNOWN},
        "cells": [],
        "sweep": [],
    }
    wrong = 0
    given.out.parent.mkdir(parents=True, exist_ok=True)

    def keep(part: str, cell: Cell, found: dict[str, Any], must_run: set[str]) -> int:
        result[part].append({**cell._asdict(), "kernels": found})
        replace(given.out, json.dumps(result) + "\n")
        told = {
            name: round(entry["median_us"], 1) if "us" in entry else entry["failed"] for name, entry in found.items()
        }
        worst = max((entry["error"] for entry in found.values() if "error" in entry), default=math.nan)
        print(f"{part} {tuple(cell)} {told}, largest error {worst:.1e}", flush=True)
        bad = {name for name, entry in found.items() if not entry.get("error", math.inf) < WORST}
        return len(bad & must_run)

    for cell in cells:
        problem = Problem(cell, TOKENS, pool)
        kernels = {
            "extend": problem.upstreams(extend_attention_fwd),
            "upstream split": problem.upstreams(verify_splitkv_fwd),
            "split": problem.split(cores),
        }
        wrong += keep("cells", cell, timed(kernels, problem, given.rounds, flush), {"extend", "split"})
    if given.sweep:
        result["tiles"] |= {name: asdict(tile) for name, tile in SWEPT.items()}
        for cell in swept:
            problem = Problem(cell, TOKENS, pool)
            tried = {name: problem.split(cores, tile) for name, tile in SWEPT.items()}
            tried |= {f"{count} splits": problem.split(cores, None, count) for count in SWEPT_SPLITS}
            wrong += keep("sweep", cell, timed(tried, problem, given.rounds, flush), set())
    from sglang_patches.nccl.provenance import whole

    result["provenance"] |= whole()
    replace(given.out, json.dumps(result) + "\n")
    print(f"{given.out}: {'a kernel failed or is far from the reference' if wrong else 'all was measured'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
