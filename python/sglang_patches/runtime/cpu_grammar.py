"""Grammar masks on a CPU, and a 4xx where a grammar leaves a request nothing to say.

With the xgrammar backend upstream 0.5.23 masks logits on a CPU in one of its two ``apply_vocab_mask`` only
(``constrained/xgrammar_backend.py``); the other, which strict thinking uses, raises and takes the scheduler with it.
A mask that allows no token at all makes every logit -inf: sampling from that raises too. Here such a row is left
open instead, the grammar then refuses whatever was sampled, and the request ends with status 400.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

import torch
from xgrammar import apply_token_bitmask_inplace, bitmask_dtype, get_bitmask_shape

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT


def apply_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """Set the logits of tokens that the grammar forbids to -inf, in place; see the module for rows without any left.

    Args:
        logits: float ``[rows, vocab]`` on the CPU, one row a request or, at an EAGLE verify, a node of its tree.
        vocab_mask: int32 ``[rows, ceil(vocab / 32)]``, xgrammar's bits: 1 allows.
    """
    used = logits.shape[-1] % 32
    if used:
        # xgrammar's CPU kernel takes a cleared padding bit for a token where the mask allows every token, and writes
        # past the row: into the next row's logits, or past the tensor.
        vocab_mask = vocab_mask.clone()
        vocab_mask[:, logits.shape[-1] // 32] |= -(1 << used)
    apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")
    dead = logits.amax(-1) == float("-inf")
    if dead.any():
        logits[dead] = 0.0


def unpinned_mask(vocab_size: int, batch_size: int) -> torch.Tensor | None:
    """A mask that allows every token, int32 ``[batch_size, ceil(vocab_size / 32)]``; None where memory can be pinned.

    For upstream 0.5.17, which pins the memory of each mask and without a driver raises, in the scheduler.
    """
    if torch.cuda.is_available():
        return None
    return torch.full(get_bitmask_shape(batch_size, vocab_size), -1, dtype=bitmask_dtype)


def refusal(error: ValueError) -> FINISH_ABORT:
    """How a request ends whose grammar refused the token sampled under its mask: as the client's error."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    return FINISH_ABORT(
        "The grammar of this request leaves no token that may come next: it matches nothing, or ends before "
        f"min_new_tokens. Correct the grammar, or lower min_new_tokens. ({error})",
        HTTPStatus.BAD_REQUEST,
        "BadRequestError",
    )
