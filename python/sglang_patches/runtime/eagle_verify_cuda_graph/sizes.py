"""Which sizes to add to upstream's, and what their graphs cost in GPU memory."""

from __future__ import annotations

import math
from collections.abc import Callable

# MiB of the graphs of one added size (all phases together) per layer of the target. Measured: 230 MiB for 6 sizes and
# 12 layers, 3.2 each (benchmark/results/verify_step/h200-2026-11-29.json); rounded up.
MIB_PER_SIZE_AND_LAYER = 3.5
# Upstream's own estimate of a decode graph's memory per request (`reserve_for_graph_mb` in arg_groups/memory_hook.py).
MIB_PER_REQUEST = 2.0
# How far an added size is above the last: a quarter of it; a half or all of it where memory does not pay for that many
# graphs, because a padded pass costs far less than an eager one.
GROWTHS = (4, 2, 1)


def sizes_up_to(largest: int, target: int, alignment: int, every: bool, growth: int = GROWTHS[0]) -> list[int]:
    """Sizes to capture above `largest` so that batches up to `target` have a graph.

    Each is at most a `growth`-th (and 2) above the last, so that padding stays below that share, or one where `every`
    size needs its own graph (no padding). All are multiples of `alignment` (rows per tensor-parallel rank).
    """
    sizes: list[int] = []
    last = largest
    while last < target:
        step = 1 if every else max(2, last // growth)
        last = math.ceil(min(last + step, target) / alignment) * alignment
        sizes.append(last)
    return sizes


def cost(sizes: list[int], largest: int, layers: int, tokens: int, vocabulary: int) -> float:
    """MiB that capturing `sizes` above `largest` takes on this rank, all phases together; meant to be too much.

    Counts each size's graphs by their layers, upstream's estimate per request and, per token, its logits in float32
    twice: in the graph and in the buffer that graphs share.

    Args:
        layers: of the target on this rank.
        tokens: draft tokens verified per request.
        vocabulary: columns of the logits.
    """
    if not sizes:
        return 0.0
    per_request = MIB_PER_REQUEST + tokens * vocabulary * 4 * 2 / 2**20
    return len(sizes) * layers * MIB_PER_SIZE_AND_LAYER + (max(sizes) - largest) * per_request


def affordable(choices: list[list[int]], budget: float, price: Callable[[list[int]], float]) -> list[int]:
    """Of `choices`, each cut from the top until it costs at most `budget`, the one that reaches furthest; the first of
    those that reach as far."""
    paid = []
    for choice in choices:
        sizes = list(choice)
        while sizes and price(sizes) > budget:
            sizes.pop()
        paid.append(sizes)
    return max(paid, key=lambda sizes: max(sizes, default=0))
