"""Which process of a server speaks for it where all of them find the same."""

from __future__ import annotations


def is_first() -> bool:
    """Whether this is the scheduler of tensor-parallel rank 0 and pipeline rank 0, or a process that has no rank."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return not (_rank(parallel, "tp_rank") or _rank(parallel, "pp_rank"))


def answers() -> bool:
    """Whether this scheduler is the one of its attention group that reports: others see the same requests."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return not (_rank(parallel, "attn_tp_rank") or _rank(parallel, "attn_cp_rank"))


def _rank(parallel: object, name: str) -> int:
    try:
        return int(getattr(parallel, name) or 0)
    except Exception:  # not published in this process (upstream raises errors of several classes): it has no rank
        return 0
