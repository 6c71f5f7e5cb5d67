"""Captured hidden states are whole sums: compared over the ranks once, at start, where all-reduces are fused.

With the fusion a layer leaves its sum over the ranks to the next one. Upstream hands it on as a handle that is no
tensor, and captures what the next layer's kernel puts out. A state that is read too early would be another one on every
rank, while whole sums are alike: so this compares what it reads, not how it was read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from sglang_patches.runtime import _outcome

PATCH = "allreduce-fusion-gate"
# Sums of bfloat16 numbers in another order differ by one part in 256 per addition at most.
_ALIKE = 0.03
# A part of a sum differs in nearly all elements; sums that differ by their order only in those that nearly cancel.
_TOLERATED = 0.25
_TOKENS = 8


class PartialSumCaptured(RuntimeError):
    """A hidden state was captured before its sum over the tensor-parallel ranks was done."""


class _Expected:
    """Whether a comparison is due in this process, and what the last one found."""

    due = False
    share: float | None = None


def expect() -> None:
    """Compare the next captured states. Every rank of a group must call it, or none."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    # Ranks with tokens of their own have states of their own.
    _Expected.due = parallel.attn_tp_size == parallel.tp_size > 1
    _Expected.share = None
    if _Expected.due:
        _outcome.live_figures(PATCH, lambda: {"captured_states_differ": _Expected.share})


def compares_ranks(pack: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    """Decorate upstream's ``pack_aux_hidden_states``, through which all captured states go to a draft."""

    @functools.wraps(pack)
    def packed(aux_hidden_states: Any) -> torch.Tensor:
        states = pack(aux_hidden_states)
        # Ranks run the same forwards in the same order, so all of them compare the same one.
        # Whether Dynamo traces is asked first: what is read behind it would become a guard, and compile all anew.
        if torch.compiler.is_compiling():
            return states
        if _Expected.due and states.shape[0] and not _in_graph(states):
            _Expected.share = compare(states)
            _Expected.due = _Expected.share is None
        return states

    return packed


def compare(states: torch.Tensor) -> float | None:
    """Compare the first tokens' states with those of rank 0 of the group; collective.

    Args:
        states: (tokens, K * hidden size).

    Returns:
        The largest share of elements that differ on any rank, 0 to 1; None, on every rank alike, where all elements of
        all ranks are zero or no finite numbers, as a warm-up's may be: these would be alike whatever was summed.

    Raises:
        PartialSumCaptured: on every rank of the group alike.
    """
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group
    mine = states[:_TOKENS].detach().float().cpu().contiguous()
    all_ranks = [torch.empty_like(mine) for _ in range(group.world_size)]
    torch.distributed.all_gather(all_ranks, mine, group=group.cpu_group)
    if not any((states.isfinite() & (states != 0)).any() for states in all_ranks):
        return None
    share = max(differing(all_ranks[0], other) for other in all_ranks[1:])
    if share > _TOLERATED:
        raise PartialSumCaptured(
            f"captured hidden states are not whole sums: {share:.0%} of the elements of the first {len(mine)} tokens "
            f"differ between ranks by more than {_ALIKE:.0%}, at most {_TOLERATED:.0%} were expected; a draft would "
            "read parts of sums. Start with --enforce-disable-flashinfer-allreduce-fusion, and report the model"
        )
    return share


def differing(one: torch.Tensor, other: torch.Tensor) -> float:
    """Share of elements of two tensors of one shape that differ by more than rounding."""
    alike = torch.isclose(one, other, rtol=_ALIKE, atol=0.0, equal_nan=True)
    return float((~alike).float().mean())


def _in_graph(states: torch.Tensor) -> bool:
    return states.is_cuda and torch.cuda.is_current_stream_capturing()
