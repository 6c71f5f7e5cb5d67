"""Step time of FlashInfer MLA's attention with an FP8 KV cache against the size of the pool, patched and not.

    SGLANG_PATCHES=+flashinfer-mla-gather-cast python -m benchmark.gather_cast.run --out FILE.json      # one GPU

A step is what upstream's backend does for one forward of all layers: it plans on the host, then a CUDA graph of the
attention of every layer is replayed. Requests of one context length lie scattered over pools of growing size; both ways
run over the same pool, in turn. The file is written after every cell. Ends with 0 if all was measured and all outputs
were equal bit for bit, 1 if not, 2 if it could not run.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from benchmark.gather_cast.backends import PATCH, Server, Sizes, modules, publish_arguments, verify_input
from benchmark.gather_cast.stand_in import OnCpu, stand_in
from sglang_patches import provenance
from sglang_patches.bench.folder import replace
from sglang_patches.runtime import _outcome
from sglang_patches.runtime import flashinfer_mla_gather_cast as patch

WAYS = ("upstream", "patch")
POOLS = [65536, 131072, 262144, 524288, 1048576, 2097152]

# What --cpu walks through.
TINY = {
    "pools": [512, 1024], "context": 100, "batches": [1, 2], "layers": 2, "heads": 2, "latent": 32, "rounds": 1,
    "repeats": 1,
}  # fmt: skip


class Step:
    """One captured forward of one server. ``q``: [layers, tokens, heads, dim]."""

    def __init__(self, server: Server, batch: Any, q: torch.Tensor) -> None:
        self.server, self.batch, self.q = server, batch, q
        self.gpu = server.sizes.device == "cuda"
        server.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        self.metadata = server.backend.forward_metadata
        self.out = server.forward(server.backend, batch, q, True)
        if self.gpu:
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = server.forward(server.backend, batch, q, True)

    def plan(self) -> None:
        self.server.backend.init_forward_metadata_out_graph(self.batch)

    def replay(self) -> None:
        if self.gpu:
            self.graph.replay()
        else:
            self.server.backend.forward_metadata = self.metadata
            self.out = self.server.forward(self.server.backend, self.batch, self.q, True)

    def whole(self) -> None:
        self.plan()
        self.replay()


def milliseconds(work: Callable[[], None], gpu: bool) -> float:
    """From the host's first call to the device's last kernel."""
    if gpu:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    if gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) * 1000


def requests(server: Server, page: int, batch: int, context: int, shared: int, slots: int) -> None:
    """``batch`` requests of ``context`` tokens and a verify's more, scattered; the first ``shared`` are the same."""
    rng = torch.Generator().manual_seed(0)
    room = context + server.sizes.width
    common, own = shared // page, -(-room // page) - shared // page
    if common + batch * own > slots // page:
        raise ValueError(
            f"{batch} requests of {context} tokens ({shared} shared) need {(common + batch * own) * page} token slots, "
            f"the pool has {slots}\n  remedy     fewer requests, a shorter context or a larger pool"
        )
    chosen = torch.randperm(slots // page, generator=rng)[: common + batch * own] + 1
    for row in range(batch):
        mine = torch.cat((chosen[:common], chosen[common + row * own : common + (row + 1) * own]))
        ids = (mine[:, None] * page + torch.arange(page)).flatten()[:room]
        server.requests.req_to_token[row + 1, :room] = ids.int().to(server.sizes.device)


def cells(given: argparse.Namespace, both: Any, slots: int, keep: Callable[[dict[str, Any]], None]) -> None:
    """All cells of one pool size."""
    device = "cpu" if given.cpu else "cuda"
    most = max(given.batches)
    sizes = Sizes(device, given.latent, 64, given.heads, given.layers, given.context + 64, most, given.width, 2)
    patch._shared.clear()
    servers: list[Server] = []
    for module in both:
        pool = servers[0].pool if servers else None
        servers.append(Server(module, sizes, given.page, slots, most, pool))
    for layer in servers[0].pool.kv_buffer:  # any byte below 0x78: no NaN
        layer.random_(0, 0x78)
    outcome = _outcome.outcomes().get(PATCH, {})
    if servers[1].backend.gather_cast is None:  # both ways would be upstream's, and equal
        raise ValueError(
            f"the patch is not at work in a pool of {slots} slots: {outcome.get('result')}, {outcome.get('detail')}\n"
            "  remedy     a pool that fits; SGLANG_PATCHES_GATHER_CAST_LIMIT=1 for one that is called small"
        )
    for batch in given.batches:
        for server in servers:
            requests(server, given.page, batch, given.context, given.shared, slots)
        for kind, mode, width in (
            ("decode", ForwardMode.DECODE, 1),
            ("verify", ForwardMode.TARGET_VERIFY, given.width),
        ):
            q = torch.randn(given.layers, batch * width, given.heads, sizes.dim, device=device).bfloat16()
            steps = {}
            for way, server in zip(WAYS, servers, strict=True):
                spec = {"spec_info": verify_input(width, device)} if kind == "verify" else {}
                rows, lens = list(range(1, batch + 1)), [given.context] * batch
                positions = torch.zeros(batch * width, dtype=torch.int64, device=device)
                steps[way] = Step(server, server.batch(mode, rows, lens, positions=positions, **spec), q)
            ms: dict[str, list[float]] = {f"{way} {part}": [] for way in WAYS for part in ("step", "graph")}
            for turn in range(given.rounds + 1):
                for way in WAYS if turn % 2 else WAYS[::-1]:
                    for part, work in (("step", steps[way].whole), ("graph", steps[way].replay)):
                        took = [milliseconds(work, not given.cpu) for _ in range(given.repeats)]
                        ms[f"{way} {part}"] += took if turn else []  # the first warms up
            equal = all(
                torch.equal(one.view(torch.int16), other.view(torch.int16))
                for one, other in zip(steps["upstream"].out, steps["patch"].out, strict=True)
            )
            medians = {name: round(statistics.median(values), 4) for name, values in ms.items()}
            keep(
                {"pool_slots": slots, "batch": batch, "kind": kind, "equal": equal, "ms": medians, "samples": ms,
                 "outcome": outcome}
            )  # fmt: skip
            del steps


def parser() -> argparse.ArgumentParser:
    """The options; sizes default to one TP-8 rank of Kimi-K2.5."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True, help="JSON file for the result")
    made.add_argument("--pools", type=int, nargs="+", default=POOLS, help="token slots (default 64k to 2M)")
    made.add_argument("--context", type=int, default=8192, help="tokens a request (default 8192)")
    made.add_argument("--shared", type=int, default=0, help="of these, a prefix that all share (default 0)")
    made.add_argument("--batches", type=int, nargs="+", default=[1, 4], help="requests (default 1 4)")
    made.add_argument("--page", type=int, default=64, help="page size (default 64)")
    made.add_argument("--layers", type=int, default=61, help="default 61; a slot takes 576 bytes in each")
    made.add_argument("--heads", type=int, default=8, help="query heads of this rank (default 8)")
    made.add_argument("--width", type=int, default=4, help="tokens a request of a verify (default 4)")
    made.add_argument("--rounds", type=int, default=4, help="in turn, after one not counted (default 4)")
    made.add_argument("--repeats", type=int, default=10, help="steps of each way a round (default 10)")
    made.add_argument("--cpu", action="store_true", help="the flow alone, tiny; needs TRITON_INTERPRET=1")
    made.set_defaults(latent=512)
    return made


def main() -> int:
    """Run it; returns the exit status, see the module."""
    given = parser().parse_args()
    if given.cpu:
        vars(given).update(TINY)
    elif not torch.cuda.is_available():
        print("gather_cast: no GPU here\n  remedy     --cpu walks through the flow without one", file=sys.stderr)
        return 2
    publish_arguments("cpu" if given.cpu else "cuda")
    try:
        both = modules()
    except RuntimeError as error:
        print(f"gather_cast: {error}", file=sys.stderr)
        return 2
    if given.cpu:
        stand_in(both)
    else:
        torch.cuda.set_device(0)
    made_by = {"command": sys.argv, "code_state": {"sglang_patches": provenance.code_state()}}
    options = {name: value for name, value in vars(given).items() if name != "out"}
    result: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"), "options": options, "provenance": made_by, "cells": [],
    }  # fmt: skip
    given.out.parent.mkdir(parents=True, exist_ok=True)

    def keep(cell: dict[str, Any]) -> None:
        result["cells"].append(cell)
        replace(given.out, json.dumps(result) + "\n")
        told = " ".join(f"{name} {took:.3f}" for name, took in cell["ms"].items())
        print(
            f"{cell['pool_slots']:8d} slots {cell['kind']} x{cell['batch']}: {told} ms, equal: {cell['equal']}",
            flush=True,
        )

    with OnCpu() if given.cpu else nullcontext():
        for slots in given.pools:
            try:
                cells(given, both, slots, keep)
            except (ValueError, torch.OutOfMemoryError) as error:
                result.setdefault("left_out", {})[str(slots)] = str(error)
                print(f"{slots} slots left out: {error}", file=sys.stderr)
            gc.collect()  # the pool and the graphs of a size lie in cycles, and the next size wants their memory
            if not given.cpu:
                torch.cuda.empty_cache()
    from sglang_patches.nccl.provenance import whole

    result["provenance"] |= whole()
    replace(given.out, json.dumps(result) + "\n")
    good = result["cells"] and all(cell["equal"] for cell in result["cells"]) and "left_out" not in result
    print(f"{given.out}: {'all was measured' if good else 'a cell is missing or its outputs differ'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
