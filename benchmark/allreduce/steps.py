"""The steps of `benchmark.allreduce.stress`: their plan, what each rank contributes, and whether each sum is right."""

from __future__ import annotations

import argparse
import contextlib
import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmark.allreduce.machines import Gloo

#: Kind of step -> its share. Both orders below matter: with the seed they are the plan.
WEIGHTS = {"decode": 30, "verify": 30, "draft": 20, "extend": 15, "prefill": 6, "cancel": 3, "eager": 2, "side": 2}
#: Kind of step -> the row counts it draws from. "cancel" lets the GPU fall idle.
ROWS = {
    "decode": list(range(1, 17)), "verify": [4, 8, 16, 32, 64], "draft": [1, 2, 4, 8, 16], "extend": [4, 8, 16, 32, 64],
    "prefill": [64, 512, 2048], "cancel": [], "eager": [1, 8, 64], "side": [8],
}  # fmt: skip
#: Kind of step that replays a graph -> all-reduces in the graph.
CALLS = {"decode": 24, "verify": 24, "draft": 6, "extend": 2, "side": 24}
KINDS = tuple(WEIGHTS)
MOST_RANKS = 8  # beyond, sums of distinct patterns are no longer exact in bfloat16


@dataclass(frozen=True)
class Step:
    """One step of the plan: its kind (see `WEIGHTS`) and its rows, 0 for "cancel"."""

    kind: str
    rows: int


def plan(steps: int, seed: int) -> list[Step]:
    """The steps, the same on every rank."""
    rng, made = random.Random(seed), []
    for _ in range(steps):
        kind = rng.choices(KINDS, list(WEIGHTS.values()))[0]
        made.append(Step(kind, rng.choice(ROWS[kind]) if ROWS[kind] else 0))
    return made


class Patterns:
    """What each rank contributes at each step, and the sums wanted: bfloat16 [rows, hidden], exact in any order.

    Contributions are multiples of `world`, so that their mean is a whole number, and mean and partial sums stay within
    256, up to which bfloat16 has every whole number.
    """

    def __init__(self, hidden: int, world: int, device: torch.device) -> None:
        self.world, self.span = world, min(32, 256 // world**2 + 1)
        self.columns = torch.arange(hidden, dtype=torch.int32, device=device) * 7
        most = max(max(rows, default=0) for rows in ROWS.values())
        self.rows = torch.arange(most, dtype=torch.int32, device=device)[:, None] * 11

    def part(self, rows: int, step: int, rank: int) -> torch.Tensor:
        """Of one rank."""
        whole = (self.columns + self.rows[:rows] + step * 13 + rank * 3).remainder(self.span)
        return (whole * self.world).to(torch.bfloat16)

    def total(self, rows: int, step: int) -> torch.Tensor:
        """The sum over all ranks."""
        summed = self.part(rows, step, 0)
        for rank in range(1, self.world):
            summed += self.part(rows, step, rank)
        return summed


def run_steps(machine: Gloo, rank: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run the plan on this rank.

    Returns:
        ``checked`` and ``wrong`` (sums by kind of step), ``seconds``, and ``guard`` (what it counted in the steps).
    """
    steps = plan(options.steps, options.seed)
    patterns = Patterns(machine.hidden, machine.world, machine.device)
    graphs = {(kind, rows): machine.capture(rows, calls) for kind, calls in CALLS.items() for rows in ROWS[kind]}
    # One element a kind: side steps add to theirs on another stream. Read at the end, as reading would wait.
    wrong = torch.zeros(len(KINDS), dtype=torch.int64, device=machine.device)
    machine.idle()
    before, started = machine.guard.figures() if machine.guard else {}, time.perf_counter()
    for index, step in enumerate(steps):
        if step.kind == "cancel":
            machine.idle()
            continue
        with machine.side() if step.kind == "side" else contextlib.nullcontext():
            mine = patterns.part(step.rows, index, rank)
            if index == options.broken and rank == machine.world - 1:
                mine += machine.world
            want = patterns.total(step.rows, index)
            if step.kind == "prefill":  # issued right behind graphs that are still running
                dist.all_reduce(mine)
            elif step.kind == "eager":  # breaks the rule on purpose
                machine.all_reduce(mine)
            else:
                chain = graphs[step.kind, step.rows]
                chain.source.copy_(mine)
                chain.replay()
                mine, want = chain.buffer, want.div_(machine.world)
            wrong[KINDS.index(step.kind)] += (mine != want).any()
        if rank == 0 and (index + 1) % 1000 == 0:
            print(f"  {index + 1} steps issued, {time.perf_counter() - started:.1f} s", flush=True)
    machine.idle()
    seconds, kept = time.perf_counter() - started, machine.guard.figures() if machine.guard else None
    return {
        "checked": {kind: n for kind, n in Counter(step.kind for step in steps).items() if kind != "cancel"},
        "wrong": {kind: int(n) for kind, n in zip(KINDS, wrong.tolist(), strict=True) if n},
        "seconds": round(seconds, 2),
        "guard": kept and {name: n - (before[name] if name != "graphs" else 0) for name, n in kept.items()},
    }
