"""Patch ``mla-verify-split-kv``: verify of a chain of drafts splits the cached context, on NVIDIA GPUs with MLA.

Upstream's triton backend verifies with the kernel made for prefill, in which one program walks the whole context. It
has a hook for kernels that split it (``use_verify_shared_kv``, ``verify_shared_kv_fwd``), for AMD's gfx95 only. This
fills the hook: `gate` says where, `launch` and `kernels` do it, and `check` tries them at start. Whatever they cannot
do goes on to upstream's extend kernel, counted by reason.

``SGLANG_PATCHES_MLA_VERIFY``: ``auto`` (default, as ``on``) or ``off``. ``SGLANG_PATCHES_MLA_VERIFY_SPLITS``: into how
many parts a request is cut at most, in place of the number that follows from batch and GPU.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from sglang_patches.runtime.mla_verify_split_kv import check, gate
from sglang_patches.runtime.mla_verify_split_kv.telling import PATCH, Backends

__all__ = ["fills_verify_hook"]

VARIABLE, MODES = "SGLANG_PATCHES_MLA_VERIFY", ("auto", "on", "off")
SPLITS_VARIABLE, SPLITS_MOST = "SGLANG_PATCHES_MLA_VERIFY_SPLITS", 512

# Of a model runner: the workspace of its backends.
_WORKSPACE = "_sglang_patches_verify_workspace"

backends = Backends()

logger = logging.getLogger("sglang_patches")


def mode() -> str:
    """``SGLANG_PATCHES_MLA_VERIFY``.

    Raises:
        ValueError: it has a value that is not known.
    """
    value = os.environ.get(VARIABLE, "auto")
    if value not in MODES:
        raise ValueError(f"{VARIABLE}={value!r} is not known; it can be {', '.join(MODES)}. Unset it for {MODES[0]}.")
    return value


def split_override() -> int | None:
    """``SGLANG_PATCHES_MLA_VERIFY_SPLITS``, None if it is unset.

    Raises:
        ValueError: it is no whole number from 1 to `SPLITS_MOST`.
    """
    value = os.environ.get(SPLITS_VARIABLE, "")
    if not value:
        return None
    if not value.isdecimal() or not 1 <= int(value) <= SPLITS_MOST:
        raise ValueError(
            f"{SPLITS_VARIABLE}={value!r} is no whole number from 1 to {SPLITS_MOST}. "
            "Unset it to have the number follow from batch and GPU."
        )
    return int(value)


def fills_verify_hook(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``TritonAttnBackend.__init__``: the target's backend gets the split verify, where it can have it."""

    @functools.wraps(init)
    def wrapped(self: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        init(self, model_runner, *args, **kwargs)
        # Neither the draft's backends nor those of single draft steps verify.
        if not model_runner.is_draft_worker and not self.skip_prefill:
            _fill(self, model_runner)

    return wrapped


def _fill(backend: Any, model_runner: Any) -> None:
    seen = gate.facts(backend, model_runner)
    refused = gate.server_reason(seen)
    if refused is not None:
        backends.record(seen.tokens, "not needed", refused[1], reason=refused[0])
        return
    wanted, override = mode(), split_override()
    if wanted == "off":
        backends.record(seen.tokens, "not needed", f"{VARIABLE}=off", reason="off")
        return
    from sglang_patches.runtime.mla_verify_split_kv.launch import SplitVerify

    try:
        run = SplitVerify(
            model_runner.req_to_token_pool.size,
            seen.tokens,
            backend.num_head,
            seen.width,
            cores=max(1, backend.device_core_count),
            device=model_runner.device,
            override=override,
            shared=vars(model_runner).get(_WORKSPACE),
            more_tokens=_most_tokens(),
        )
    except torch.OutOfMemoryError as error:
        backends.record(seen.tokens, "failed", f"no memory for its workspace: {error}", reason="memory")
        return
    # One for all backends of a model runner. Those of `--speculative-adaptive`, one a number of draft steps, are used
    # in turn. The halves of two-batch overlap are queued in turn by one thread on one stream, which replays all graphs
    # too. So no call begins between the two kernels of another. PD multiplexing runs two forwards; one verifies.
    setattr(model_runner, _WORKSPACE, run.workspace)
    if wrong := _wrong(run, backend.num_head, seen):
        logger.error("sglang-patches: %s: verify stays with upstream's extend kernel: %s", PATCH, wrong)
        backends.record(seen.tokens, "failed", wrong, reason="failed")
        return
    backend.use_verify_shared_kv = True
    tile, launched = run.plan(1, seen.tokens * backend.num_head, seen.width)
    applied = functools.partial(
        backends.record,
        seen.tokens,
        "applied",
        "verify splits the context",
        rows=seen.tokens * backend.num_head,
        block_rows=tile.block_m,
        splits_launched_at_batch_1=launched,
        workspace_mib=round(run.workspace.numel() * 4 / 2**20, 1),
    )
    if seen.prefill_node:
        why = "a prefill node verifies nothing until its role is switched"
        backends.record(seen.tokens, "not needed", why, reason="prefill_node")
    else:
        applied()
    hook = Hook(run, seen.tokens, first=applied if seen.prefill_node else None)
    backend.verify_shared_kv_fwd = torch.compiler.disable(hook.__call__)


def _most_tokens() -> int:
    """Draft tokens that some backend of this server may be made for, as far as kernels here take them."""
    from sglang.srt.runtime_context import max_speculative_num_draft_tokens

    return min(max_speculative_num_draft_tokens() or 0, gate.TOKENS[1])


def _wrong(run: Any, heads: int, seen: gate.Facts) -> str:
    """What is wrong with the kernels on this GPU, in words; empty where nothing is."""
    try:
        worst = check.difference(
            run,
            tokens=seen.tokens,
            heads=heads,
            width=seen.width,
            rope=seen.rope,
            dtype=seen.compute,
            cache_dtype=seen.cache,
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if worst <= check.WORST:
        return ""
    return f"on this GPU they are up to {worst:g} from attention in float32; at most {check.WORST} is rounding"


class Hook:
    """What upstream calls in place of its own ``verify_shared_kv_fwd``; True says that ``o_extend`` is written.

    Args:
        run: as `launch.SplitVerify`.
        tokens: draft tokens that its backend was made for.
        first: called once, after the first verify that it serves.
    """

    def __init__(self, run: Any, tokens: int, first: Callable[[], None] | None = None) -> None:
        self.run, self.tokens, self.first = run, tokens, first
        self.failed = False

    def __call__(
        self,
        q_extend: torch.Tensor,
        k_extend: torch.Tensor,
        v_extend: torch.Tensor,
        o_extend: torch.Tensor,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        custom_mask: torch.Tensor | None,
        is_causal: bool,
        mask_indptr: torch.Tensor | None,
        max_len_extend: int,
        k_scale: float,
        v_scale: float,
        sm_scale: float,
        logit_cap: float = 0.0,
        sliding_window_size: int = -1,
        sinks: torch.Tensor | None = None,
        window_kv_offsets: torch.Tensor | None = None,
        xai_temperature_len: int = -1,
        max_bs: int | None = None,
    ) -> bool:
        reason = self._reason(
            q_extend,
            k_extend,
            v_extend,
            o_extend,
            k_buffer,
            v_buffer,
            kv_indptr,
            is_causal,
            max_len_extend,
            logit_cap=logit_cap,
            sliding_window_size=sliding_window_size,
            sinks=sinks,
            temperature_len=xai_temperature_len,
        )
        if reason is None:
            try:
                self.run(
                    q_extend,
                    k_extend,
                    o_extend,
                    k_buffer,
                    kv_indptr,
                    kv_indices,
                    width=v_extend.shape[-1],
                    scale=sm_scale,
                    k_scale=k_scale,
                    v_scale=v_scale,
                )
            except Exception as error:
                # The first call is eager, in warm-up: a kernel that does not compile or fit fails there, and upstream's
                # writes the same output.
                logger.exception("sglang-patches: %s: verify goes on with upstream's extend kernel", PATCH)
                backends.record(self.tokens, "failed", f"{type(error).__name__}: {error}", reason="failed")
                self.failed, reason = True, "failed"
        backends.count(self.tokens, "split_kv" if reason is None else f"extend:{reason}")
        if reason is None and self.first is not None:
            self.first()
            self.first = None
        return reason is None

    def _reason(self, q: torch.Tensor, *tensors: Any, **options: Any) -> str | None:
        if self.failed:
            return "failed"
        reason = gate.call_reason(q, *tensors, **options)
        if reason is None:
            tokens = tensors[-1]
            batch = q.shape[0] // tokens
            if not self.run.fits(batch, tokens * q.shape[1], tensors[1].shape[-1]):
                reason = "workspace"
        return reason
