"""The whole layer (sort, gate_up, activation, down, sum) through upstream's ``fused_experts`` and its own lookup.

Products timed one by one say nothing of how the kernels of a layer overlap, so this decides what goes into a table. The
table under test is a folder that ``SGLANG_MOE_CONFIG_DIR`` names: what upstream finds there it would find in a server.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from sglang_patches.errors import PatchError
from sglang_patches.tune.moe import timing
from sglang_patches.tune.moe.geometry import Gemm
from sglang_patches.tune.moe.kernel import Experts
from sglang_patches.tune.moe.space import read
from sglang_patches.tune.moe.tables import Row

FOLDER = "SGLANG_MOE_CONFIG_DIR"


@cache
def publish() -> None:
    """Give this process arguments of a server, which upstream's lookup reads; once."""
    from sglang.srt.runtime_context import get_context

    get_context().override_server_args().install()
    if not torch.cuda.is_available():
        _without_gpu()


def _without_gpu() -> None:
    """What upstream lacks on a CPU, to try the flow there: a device's name, sorting, and a registered op."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe, fused_moe_triton_config

    from sglang_patches.tune.moe.routing import align

    fused_moe_triton_config.get_device_name = lambda: "CPU"
    fused_moe.moe_align_block_size = align
    fused_moe.inplace_fused_experts = fused_moe.inplace_fused_experts.__wrapped__


def file_names(experts: Experts) -> dict[Gemm, str]:
    """As upstream looks for them on this GPU."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import get_config_file_name

    g = experts.geometry
    shape: Any = list(g.block_shape or (0, 0))
    named = [
        get_config_file_name(g.experts, g.table_n, g.upstream_dtype, shape, False, down_moe=down)
        for down in (False, True)
    ]
    return {"gate_up": named[0], "down": named[1]}


@contextmanager
def tables_from(root: Path | None) -> Iterator[None]:
    """Upstream's lookup finds the tables below `root`, or with None its own, and no others."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config

    before = os.environ.pop(FOLDER, None)
    if root is not None:
        os.environ[FOLDER] = str(root)
    fused_moe_triton_config.get_moe_configs.cache_clear()
    try:
        yield
    finally:
        os.environ.pop(FOLDER, None)
        if before is not None:
            os.environ[FOLDER] = before
        fused_moe_triton_config.get_moe_configs.cache_clear()


def _table(experts: Experts, down: bool = False) -> dict[int, Any]:
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config import get_moe_configs

    g = experts.geometry
    return get_moe_configs(g.experts, g.table_n, g.upstream_dtype, *(g.block_shape or (0, 0)), False, down) or {}


def looked_up(experts: Experts, tokens: int) -> Row:
    """What upstream takes for a batch by the lookup as it is now."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import try_get_optimal_moe_config

    g = experts.geometry
    shapes = [tuple(experts.weights[gemm][0][0].shape) for gemm in ("gate_up", "down")]
    shapes = [(g.experts, *shape[1:]) for shape in shapes]
    config, (down, _) = try_get_optimal_moe_config(
        shapes[0], shapes[1], g.top_k, g.upstream_dtype, tokens,
        block_shape=list(g.block_shape) if g.block_shape else None, return_down_config=True,
    )  # fmt: skip
    up = read(config)
    if down is not None:
        return {"gate_up": up, "down": read(down)}
    return {"gate_up": up, "down": replace(up, tma=False)}


def own_keys(experts: Experts) -> list[int]:
    """Token counts of the table that upstream itself has; empty where it has none."""
    return sorted(_table(experts))


class Layer:
    """Batches through ``fused_experts``, each call of a graph on another layer's weights and another draw."""

    def __init__(self, experts: Experts, l2: int) -> None:
        self._experts, self._l2 = experts, l2

    def capture(self, tokens: int, root: Path | None) -> tuple[timing.Replay, torch.Tensor]:
        """The graph of a batch size with the tables below `root` (None: upstream's), and one call's output.

        Raises:
            PatchError: upstream does not find the table there.
        """
        from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
        from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        ex, g = self._experts, self._experts.geometry
        read_a_call = g.active(tokens) * (g.expert_bytes("gate_up") + g.expert_bytes("down"))
        works = ex.works(tokens, 16, timing.calls_for(read_a_call, self._l2))
        source = ex.activations("gate_up", tokens)
        states = [source.clone() for _ in works]
        config = MoeRunnerConfig(num_experts=g.experts, num_local_experts=g.experts, inplace=True)

        def call(place: int) -> torch.Tensor:
            work, (up, up_scale), (down, down_scale) = (
                works[place], ex.weights["gate_up"][place % ex.layers], ex.weights["down"][place % ex.layers],
            )  # fmt: skip
            made: torch.Tensor = fused_experts(
                states[place], up, down, StandardTopKOutput(work.weights, work.ids, work.weights), config,
                use_fp8_w8a8=g.dtype == "fp8_w8a8", use_int4_w4a16=g.dtype == "int4_w4a16",
                w1_scale=up_scale, w2_scale=down_scale, block_shape=list(g.block_shape) if g.block_shape else None,
            )  # fmt: skip
            return made

        def restore() -> None:  # upstream writes the output over the input
            torch._foreach_copy_(states, [source] * len(states))

        with tables_from(root):
            if root is not None and not all(tokens in _table(ex, down) for down in (False, True)):
                raise PatchError(f"upstream does not find the table that lies below {root}: {file_names(ex)}")
            output = call(0).float().clone()
            restore()
            return timing.capture([partial(call, place) for place in range(len(works))], restore), output
