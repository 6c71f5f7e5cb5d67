"""From samples to a table: which configurations go on to the next stage, and which one wins."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from sglang_patches.student import Interval, interval
from sglang_patches.tune.moe.geometry import GEMMS, Dtype, Gemm
from sglang_patches.tune.moe.space import Config, parse

#: Largest deviation from float32, as a share of the largest number: rounding of the output, and for fp8 of the input.
TOLERANCE: dict[Dtype, float] = {"bfloat16": 0.02, "float16": 0.02, "fp8_w8a8": 0.12, "int4_w4a16": 0.02}
#: A configuration this much slower than the best is as good where it is upstream's own.
TIE = 0.01


def anchors(tokens: Sequence[int]) -> list[int]:
    """Token counts at which everything is measured: the first, one in the middle, the last."""
    return sorted({tokens[0], tokens[len(tokens) // 2], tokens[-1]})


def near(tokens: int, of: Sequence[int]) -> list[int]:
    """The anchors next to a token count, itself if it is one."""
    if tokens in of:
        return [tokens]
    below, above = [a for a in of if a < tokens], [a for a in of if a > tokens]
    return [*below[-1:], *above[:1]]


def best(samples: Mapping[Config, Sequence[float]], count: int) -> list[Config]:
    """The fastest of each block_m by the median, `count` of each: both products must share theirs."""
    ranked = sorted(samples, key=lambda config: (median(samples[config]), config))
    kept: dict[int, list[Config]] = {}
    for config in ranked:
        mine = kept.setdefault(config.block_m, [])
        if len(mine) < count:
            mine.append(config)
    return [config for config in ranked if config in kept[config.block_m]]


def by_round(records: Iterable[Mapping[str, Any]], gemm: Gemm) -> dict[Config, list[float]]:
    """From ``final`` records: of each configuration that has all rounds, the median microseconds of each round."""
    rounds = [{parse(told): median(us) for told, us in record["us"][gemm].items()} for record in records]
    whole = set.intersection(*(set(of) for of in rounds)) if rounds else set()
    return {config: [of[config] for of in rounds] for config in sorted(whole)}


@dataclass(frozen=True)
class Pair:
    """A configuration for each product of one token count; `us` is the sum of their medians."""

    gate_up: Config
    down: Config
    us: float


def pair(times: Mapping[Gemm, Mapping[Config, Sequence[float]]], upstream: Mapping[Gemm, Config]) -> Pair | None:
    """The fastest two that share block_m, since one sorting of tokens serves both; None without a whole round.

    Upstream's own stays where nothing is more than `TIE` faster: a table should not change what it need not.
    """
    found: list[Pair] = []
    middle = {gemm: {config: median(us) for config, us in times.get(gemm, {}).items()} for gemm in GEMMS}
    for rows in {config.block_m for config in middle["gate_up"]} & {config.block_m for config in middle["down"]}:
        chosen: dict[Gemm, Config] = {}
        for gemm in GEMMS:
            mine = {config: us for config, us in middle[gemm].items() if config.block_m == rows}
            fastest = min(mine, key=lambda config: (mine[config], config))
            own = upstream[gemm]
            chosen[gemm] = own if own in mine and mine[own] <= mine[fastest] * (1 + TIE) else fastest
        us = sum(middle[gemm][chosen[gemm]] for gemm in GEMMS)
        found.append(Pair(chosen["gate_up"], chosen["down"], us))
    return min(found, key=lambda of: of.us, default=None)


@dataclass(frozen=True)
class Verdict:
    """The whole layer with our pair beside upstream's choice, microseconds; `ratio` ours / upstream's.

    Attributes:
        ours: whether our pair goes into the table: the whole interval is below 1.
    """

    upstream: float
    tuned: float
    ratio: Interval
    ours: bool


def verdict(records: Sequence[Mapping[str, Any]], comparisons: int = 1) -> Verdict | None:
    """From ``layer`` records of one token count; None without one.

    Args:
        comparisons: token counts of the table; the interval is widened so that all hold together.
    """
    if not records:
        return None
    theirs, ours = ([median(record["us"][arm]) for record in records] for arm in ("upstream", "tuned"))
    ratio = interval(np.log(ours) - np.log(theirs), comparisons)
    return Verdict(
        math.exp(float(np.mean(np.log(theirs)))), math.exp(float(np.mean(np.log(ours)))), ratio, ratio.high < 1
    )
