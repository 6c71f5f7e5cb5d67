"""Which process of a server speaks for it where all of them find the same, and which GPUs a group of ranks has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_patches import lane


def is_first() -> bool:
    """Whether this is the scheduler of tensor-parallel rank 0 and pipeline rank 0, or a process that has no rank."""
    parallel = lane.here().runtime_context().get_parallel()
    return not (_rank(parallel, "tp_rank") or _rank(parallel, "pp_rank"))


def answers() -> bool:
    """Whether this scheduler is the one of its attention group that reports: others see the same requests."""
    parallel = lane.here().runtime_context().get_parallel()
    return not (_rank(parallel, "attn_tp_rank") or _rank(parallel, "attn_cp_rank"))


def gpu_positions(cfg: Any) -> Iterator[list[int]]:
    """GPU positions of each tensor-parallel group of a server on one host.

    As in upstream's engine.py and data_parallel_controller.py.

    Args:
        cfg: upstream's resolved server arguments.
    """
    size, step = cfg.tp_size, cfg.gpu_id_step
    for replica in range(cfg.dp_size):
        for stage in range(cfg.pp_size):
            first = cfg.base_gpu_id + replica * size * cfg.pp_size * step + stage * size
            yield [first + rank * step for rank in range(size)]


def _rank(parallel: object, name: str) -> int:
    try:
        return int(getattr(parallel, name) or 0)
    except Exception:  # not published in this process (upstream raises errors of several classes): it has no rank
        return 0
