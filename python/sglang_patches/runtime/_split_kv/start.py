"""What is decided where upstream makes an attention backend: whether it splits the context, with which workspace."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from sglang_patches.runtime._split_kv import check, settings
from sglang_patches.runtime._split_kv.gate import TOKENS
from sglang_patches.runtime._split_kv.telling import Backends

if TYPE_CHECKING:
    from sglang_patches.runtime._split_kv.plan import SplitAttention

logger = logging.getLogger("sglang_patches")
Kind = TypeVar("Kind", bound="SplitAttention")
# Of a model runner: the workspace of its backends.
WORKSPACE = "_sglang_patches_split_kv_workspace"


def start(
    backends: Backends,
    tokens: int,
    refused: tuple[str, str] | None,
    *,
    variable: str,
    splits_variable: str,
    what: str,
    heads: int,
    width: int,
    model_runner: Any,
    make: Callable[..., Kind],
    difference: Callable[[Kind], float],
    waits: tuple[str, str] | None = None,
) -> tuple[Kind, Callable[[], None] | None] | None:
    """The kernels and workspace of one backend, tried on this GPU; None where upstream's kernel stays. Tells which.

    With them what is to be called at the first use, None if nothing: `telling.Served` does so.

    Args:
        refused: (reason, sentence) of the gate, if it refuses.
        variable, splits_variable: the settings, of `settings.mode` and `settings.split_override`.
        what: the attention that is split, as the subject of a sentence.
        heads, width: query heads of the rank, numbers of a value.
        model_runner: the target's or the draft's; keeps the workspace that all its backends share.
        make: allocates; gets ``override``, ``shared`` and ``more_tokens`` of `plan.SplitAttention`.
        difference: as `check.wrong`.
        waits: (reason, sentence) where it is not known yet whether this attention will be served here: that is told,
            and "applied" at the first call that split kernels serve.

    Raises:
        ValueError: a setting has a value that is not known.
    """
    if refused is not None:
        backends.record(tokens, "not needed", refused[1], reason=refused[0])
        return None
    wanted, override = settings.mode(variable), settings.split_override(splits_variable)
    if wanted == "off":
        backends.record(tokens, "not needed", f"{variable}=off", reason="off")
        return None
    try:
        run = make(override=override, shared=vars(model_runner).get(WORKSPACE), more_tokens=_most_tokens())
    except torch.OutOfMemoryError as error:
        backends.record(tokens, "failed", f"no memory for its workspace: {error}", reason="memory")
        return None
    if not run.fits(1, tokens * heads, width):
        why = f"the workspace holds no request ({splits_variable} or the number of heads asks for too much)"
        backends.record(tokens, "not needed", why, reason="workspace")
        return None
    if wrong := check.wrong(lambda: difference(run)):
        logger.error("sglang-patches: %s: %s stays with upstream's extend kernel: %s", backends.patch, what, wrong)
        backends.record(tokens, "failed", wrong, reason="failed")
        return None
    # One for all backends of a model runner. Those of `--speculative-adaptive`, one a number of draft steps, are used
    # in turn, and so are a draft's own and the one for its extends. The halves of two-batch overlap are queued in turn
    # by one thread on one stream, which replays all graphs too. So no call begins between the two kernels of another.
    # PD multiplexing runs two forwards; one verifies, and has its draft extended.
    setattr(model_runner, WORKSPACE, run.workspace)
    tile, launched = run.plan(1, tokens * heads, width)
    applied = functools.partial(
        backends.record,
        tokens,
        "applied",
        f"{what} splits the context",
        rows=tokens * heads,
        block_rows=tile.block_m,
        splits_launched_at_batch_1=launched,
        workspace_mib=round(run.workspace.numel() * 4 / 2**20, 1),
    )
    if waits is not None:
        backends.record(tokens, "not needed", waits[1], reason=waits[0])
        return run, applied
    applied()
    return run, None


def _most_tokens() -> int:
    """Draft tokens that some backend of this server may be made for, as far as kernels here take them."""
    from sglang.srt.runtime_context import max_speculative_num_draft_tokens

    return min(max_speculative_num_draft_tokens() or 0, TOKENS[1])
