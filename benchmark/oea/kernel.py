"""The kernel of oea-topk on one GPU: is it the reference, eager and in a CUDA graph, and what does it take?

    python -m benchmark.oea.kernel --out kernel.json        # well under a minute

Compared with the reference on the same device: ids and counted experts must be equal, weights within 1e-5. One captured
graph is replayed for every count of real rows. Timed inside graphs of 100 launches, beside upstream's own router for
Kimi-K2.5's shape.
Exit code: 0 equal, 1 not, 2 no GPU.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_patches.bench.folder import replace
from sglang_patches.runtime.oea_topk import kernel, reference
from sglang_patches.runtime.oea_topk.experts import Experts
from sglang_patches.runtime.oea_topk.reference import Router
from sglang_patches.runtime.oea_topk.settings import Rule

EXPERTS, TOP_K, LAUNCHES, REPLAYS = 384, 8, 100, 50
ROWS = (1, 2, 4, 8, 16, 32, 64)
RULES = [Rule(k0=3), Rule(k0=5, k_max=6, rank_cap=24), Rule(k0=4, p=0.871), Rule(k0=2, least=4, most=16)]
ROUTER = Router(TOP_K, scale=2.827)


def inputs(rows: int, dtype: torch.dtype, ties: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits ``[rows, EXPERTS]`` and the bias."""
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, EXPERTS, generator=generator) * 2
    bias = torch.randn(EXPERTS, generator=generator) * 0.2
    logits, bias = (logits.round(), bias * 0) if ties else (logits, bias)
    return logits.to("cuda", dtype), bias.cuda()


def differs(got: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> str:
    """How, in words; empty where nothing does."""
    if (count := int((got[1] != wanted[1]).any(1).sum())) > 0:
        return f"ids of {count} of {len(got[1])} rows"
    return "" if torch.allclose(got[0], wanted[0], rtol=1e-5, atol=1e-6) else "weights"


def check() -> list[str]:
    """What is not as the reference has it."""
    wrong = []
    real = torch.zeros(4, dtype=torch.int32, device="cuda")
    for rows, rule, dtype, ties in itertools.product(ROWS, RULES, (torch.float32, torch.bfloat16), (False, True)):
        logits, bias = inputs(rows, dtype, ties)
        real.fill_(rows)
        counts, expected = (torch.zeros(3, dtype=torch.int64, device="cuda") for _ in range(2))
        kernel.choose(logits, bias, real, rule, ROUTER, counts)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = kernel.choose(logits, bias, real, rule, ROUTER, counts)
        for count in sorted({0, 1, rows // 2, rows}):
            real.fill_(count)
            counts.zero_()
            expected.zero_()
            wanted = reference.choose(logits, bias, real[:1], rule, ROUTER, expected)
            graph.replay()
            eager = kernel.choose(logits, bias, real, rule, ROUTER, counts)
            if not torch.equal(counts, 2 * expected):
                wrong.append(
                    f"counts {counts.tolist()} of twice {expected.tolist()}: {rows} rows, {count} real, {rule}"
                )
            for way, got in (("graph", captured), ("eager", eager)):
                if why := differs(got, wanted):
                    wrong.append(f"{why}: {way}, {rows} rows, {count} real, {dtype}, ties {ties}, {rule}")
    return wrong + read_back()


def read_back() -> list[str]:
    """What is wrong with the way of the counts to the host, which waits for nothing."""
    experts = Experts()
    place = experts.place(torch.device("cuda", torch.cuda.current_device()), "verify", capturing=False)
    assert place is not None
    place += torch.tensor([3, 5, 1], device="cuda")
    experts._read()
    torch.cuda.synchronize()
    experts._read()
    found = [*experts._known.values(), [list(told.values()) for told in experts.figures().values()]]
    return [] if found == [[[0, 0, 0], [3, 5, 1]], [[3, 5, 1]]] else [f"counts read back as {found}"]


def microseconds(call: Callable[[], Any]) -> float:
    """One launch among many in a graph, median over replays."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            call()
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / LAUNCHES)
    return round(float(np.median(times)), 3)


def times() -> list[dict[str, Any]]:
    """By rows and k0: microseconds of a launch, and of upstream's router."""
    from sglang.kernels.ops.moe.moe_fused_gate import moe_fused_gate

    told = []
    for rows in ROWS:
        logits, bias = inputs(rows, torch.bfloat16, False)
        real = torch.full((4,), rows, dtype=torch.int32, device="cuda")
        counts = torch.zeros(3, dtype=torch.int64, device="cuda")

        upstream = functools.partial(moe_fused_gate, logits, bias, topk=TOP_K, routed_scaling_factor=2.827)
        entry: dict[str, Any] = {"rows": rows, "upstream": microseconds(upstream)}
        for k0 in (2, 3, 4, 6):
            rule = Rule(k0=k0, least=1)
            choose = functools.partial(kernel.choose, logits, bias, real, rule, ROUTER)
            entry[f"k0={k0}"] = microseconds(choose)
            entry[f"k0={k0}, counting"] = microseconds(functools.partial(choose, counts))
        told.append(entry)
    return told


def main() -> int:
    """Check, time, write; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("oea.kernel: no GPU here; test/runtime/oea_kernel.py checks the kernel on a CPU", file=sys.stderr)
        return 2
    from sglang_patches.nccl.provenance import whole

    wrong = check()
    print("\n".join(wrong[:20]) or "the kernel is the reference, eager and in graphs")
    timed = times()
    result = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["python", "-m", "benchmark.oea.kernel", *sys.argv[1:]],
        "differs": wrong,
        "microseconds": timed,
        "provenance": whole(),
    }
    replace(given.out, json.dumps(result) + "\n")
    for entry in timed:
        print(entry)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
