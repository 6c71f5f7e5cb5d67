"""Times verify attention on one GPU: upstream's extend and split kernels, and that of patch mla-verify-split-kv.

    python -m benchmark.verify_attention.run --out benchmark/results/NAME/attention.json      # under 3 minutes
    python -m benchmark.verify_attention.run --out FILE --sweep                               # tiles and splits as well
    TRITON_INTERPRET=1 python -m benchmark.verify_attention.run --out FILE --cpu              # the flow alone, tiny

One layer of Kimi-K2.5 on a TP-8 rank: 8 heads, 512 + 64 numbers a cached token, bfloat16. Kernels take turns, each
replayed from a CUDA graph of its own, with the L2 cache overwritten before. Each output is compared with attention in
float32. Ends with 0 if all was measured and near the reference, 1 if not, 2 if it could not run.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch

from sglang_patches import provenance
from sglang_patches.bench.folder import replace
from sglang_patches.runtime._split_kv.plan import Tiles
from sglang_patches.runtime.mla_verify_split_kv import check
from sglang_patches.runtime.mla_verify_split_kv.launch import ROWS_16, ROWS_32, ROWS_64, SplitVerify

HEADS, WIDTH, ROPE = 8, 512, 64
BATCHES, CONTEXTS, TOKENS = (1, 4, 16), (1024, 8192, 32768), (2, 4, 8)
# bfloat16 keeps 8 bits, and the outputs are averages of many numbers near 1: upstream's kernels differ by less as well.
WORST = 2e-2
SWEPT = {
    "16 rows": Tiles(16, 32, 4, 2, 2),
    "16 rows, 3 stages": ROWS_16,
    "16 rows, 64 tokens": Tiles(16, 64, 4, 2, 2),
    "32 rows": Tiles(32, 32, 8, 2, 1),
    "32 rows, 3 stages": Tiles(32, 32, 8, 3, 1),
    "32 rows, 3 stages, 2 resident": Tiles(32, 32, 8, 3, 2),
    "32 rows, 4 stages": Tiles(32, 32, 8, 4, 1),
    "32 rows, 64 tokens": Tiles(32, 64, 8, 2, 1),
    "32 rows, 64 tokens, 3 stages": ROWS_32,
    "64 rows": Tiles(64, 32, 8, 2, 1),
    "64 rows, 3 stages": ROWS_64,
}
SWEPT_SPLITS = (16, 32, 64, 128)
SWEPT_CELLS = ((1, 1024), (1, 32768), (16, 8192))
Kernel = Callable[[], Any]


class Problem:
    """Random tensors of one cell, and what each kernel is to write."""

    def __init__(self, batch: int, context: int, tokens: int, pool: torch.Tensor, dtype: torch.dtype) -> None:
        device, self.width = pool.device, pool.shape[2] - ROPE
        self.batch, self.context, self.tokens, self.cache = batch, context, tokens, pool
        generator = torch.Generator(device=device).manual_seed(batch * context + tokens)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

        rows = batch * tokens
        self.q, self.extend = random(rows, HEADS, pool.shape[2]), random(rows, 1, pool.shape[2])
        self.v_extend = self.extend[..., : self.width].contiguous()
        slots = torch.randperm(pool.shape[0] - 1, generator=generator, device=device)[: batch * context] + 1
        self.indices, self.scale = slots, pool.shape[2] ** -0.5
        self.indptr = torch.arange(batch + 1, device=device, dtype=torch.int32) * context
        self.qo_indptr = torch.arange(batch + 1, device=device) * tokens
        # As EAGLE makes it: for each token its row over context and drafts.
        chain = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
        seen = torch.cat([torch.ones(tokens, context, dtype=torch.bool, device=device), chain], 1)
        self.mask = seen.flatten().repeat(batch)
        self.mask_indptr = torch.arange(batch + 1, device=device) * seen.numel()
        self.out = torch.empty(rows, HEADS, self.width, dtype=dtype, device=device)

    def reference(self) -> torch.Tensor:
        """(batch * tokens, HEADS, width), float32."""
        begins = [request * self.context for request in range(self.batch + 1)]
        return check.attention(
            self.q, self.extend, self.cache, self.indices, begins, width=self.width, scale=self.scale
        )

    def upstreams(self, function: Callable[..., Any]) -> Kernel:
        """Upstream's ``extend_attention_fwd`` or ``verify_shared_kv_fwd``, called as its triton backend does."""
        values = self.cache[..., : self.width]
        return lambda: function(
            self.q,
            self.extend,
            self.v_extend,
            self.out,
            self.cache,
            values,
            self.qo_indptr,
            self.indptr,
            self.indices,
            self.mask,
            True,
            self.mask_indptr,
            self.tokens,
            1.0,
            1.0,
            self.scale,
        )

    def split(self, cores: int, tile: Tiles | None = None, splits: int | None = None) -> Kernel:
        """The patch's kernels."""
        run = SplitVerify(
            self.batch, self.tokens, HEADS, self.width, cores=cores, device=self.q.device, tile=tile, override=splits
        )
        return lambda: run(
            self.q, self.extend, self.out, self.cache, self.indptr, self.indices, width=self.width, scale=self.scale
        )


class Cell(Protocol):
    """What `timed` wants of a problem: its queries, where kernels write, and what they are to."""

    q: torch.Tensor
    out: torch.Tensor

    def reference(self) -> torch.Tensor: ...


def timed(kernels: dict[str, Kernel], problem: Cell, rounds: int, flush: torch.Tensor) -> dict[str, Any]:
    """Microseconds of each kernel, in turn, and its largest absolute error; or why it does not run."""
    reference = problem.reference()
    found: dict[str, Any] = {}
    ready: dict[str, Kernel] = {}
    on_gpu = problem.q.is_cuda
    for name, kernel in kernels.items():
        problem.out.fill_(math.nan)
        try:
            ran = kernel()
            if ran is False:
                raise RuntimeError("it refuses this shape")
            found[name] = {"error": float((problem.out.float() - reference).abs().max()), "us": []}
            ready[name] = captured(kernel) if on_gpu else kernel
        except Exception as error:
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
    for _ in range(rounds):
        for name, kernel in ready.items():
            flush.zero_()
            found[name]["us"].append(once(kernel, on_gpu))
    for entry in found.values():
        if "us" in entry:
            entry["median_us"] = statistics.median(entry["us"])
    return found


def captured(kernel: Kernel) -> Kernel:
    """A CUDA graph of one call; the kernel has run before, so it is compiled."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        kernel()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def once(kernel: Kernel, on_gpu: bool) -> float:
    """Microseconds of one call."""
    if not on_gpu:
        begun = time.perf_counter()
        kernel()
        return (time.perf_counter() - begun) * 1e6
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    kernel()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def main() -> int:
    """Run it; returns the exit status, see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the result")
    parser.add_argument("--rounds", type=int, default=15, help="samples a kernel and cell (default 15)")
    parser.add_argument("--sweep", action="store_true", help="also other tiles and numbers of splits, in three cells")
    parser.add_argument("--cpu", action="store_true", help="the flow on a CPU, in triton's interpreter")
    given = parser.parse_args()
    if not given.cpu and not torch.cuda.is_available():
        print("verify_attention: no GPU here; --cpu walks through the flow without one", file=sys.stderr)
        return 2
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
    from sglang.kernels.ops.attention.verify_mla import verify_shared_kv_fwd

    device, dtype, width, cores = ("cpu", torch.float32, 32, 4) if given.cpu else ("cuda", torch.bfloat16, WIDTH, 0)
    cells = [(b, c, t) for t in TOKENS for c in CONTEXTS for b in BATCHES]
    if given.cpu:
        cells, given.rounds = [(2, 70, 2)], 1
    else:
        cores = torch.cuda.get_device_properties(0).multi_processor_count
    most = max(b * c for b, c, _ in cells)
    pool = torch.randn(most + 64, 1, width + ROPE, device=device).to(dtype)
    flush = torch.empty(1 << (10 if given.cpu else 28), dtype=torch.uint8, device=device)
    result: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["python", "-m", "benchmark.verify_attention.run", *sys.argv[1:]],
        "provenance": {"code_state": {"sglang_patches": provenance.code_state()}},
        "shape": {"heads": HEADS, "width": width, "rope": ROPE, "dtype": str(dtype), "multiprocessors": cores},
        "cells": [],
        "sweep": [],
    }
    wrong = 0
    given.out.parent.mkdir(parents=True, exist_ok=True)

    def keep(part: str, cell: tuple[int, int, int], found: dict[str, Any], must_run: set[str]) -> int:
        names = ("batch", "context", "draft_tokens")
        result[part].append({**dict(zip(names, cell, strict=True)), "kernels": found})
        replace(given.out, json.dumps(result) + "\n")
        told = {name: entry.get("median_us", entry.get("failed")) for name, entry in found.items()}
        worst = max((entry["error"] for entry in found.values() if "error" in entry), default=math.nan)
        print(
            f"{part} batch {cell[0]} context {cell[1]} tokens {cell[2]}: {told}, largest error {worst:.1e}", flush=True
        )
        bad = {name for name, entry in found.items() if not entry.get("error", math.inf) < WORST}
        return len(bad & must_run)

    for cell in cells:
        problem = Problem(*cell, pool, dtype)
        kernels = {
            "extend": problem.upstreams(extend_attention_fwd),
            "upstream split": problem.upstreams(verify_shared_kv_fwd),
            "split": problem.split(cores),
        }
        wrong += keep("cells", cell, timed(kernels, problem, given.rounds, flush), {"extend", "split"})
    if given.sweep:
        result["tiles"] = {name: asdict(tile) for name, tile in SWEPT.items()}
        for batch, context in [(2, 70)] if given.cpu else SWEPT_CELLS:
            for tokens in (2,) if given.cpu else TOKENS:
                problem = Problem(batch, context, tokens, pool, dtype)
                tried = {name: problem.split(cores, tile) for name, tile in SWEPT.items()}
                tried |= {f"{count} splits": problem.split(cores, None, count) for count in SWEPT_SPLITS}
                wrong += keep("sweep", (batch, context, tokens), timed(tried, problem, given.rounds, flush), set())
    from sglang_patches.nccl.provenance import whole

    result["provenance"] |= whole()
    replace(given.out, json.dumps(result) + "\n")
    print(f"{given.out}: {'a kernel failed or is far from the reference' if wrong else 'all was measured'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
