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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sglang_patches.runtime._split_kv.start import start
from sglang_patches.runtime._split_kv.telling import Backends, Served
from sglang_patches.runtime.mla_verify_split_kv import check, gate

if TYPE_CHECKING:
    from sglang_patches.runtime.mla_verify_split_kv.launch import SplitVerify

__all__ = ["fills_verify_hook"]

PATCH = "mla-verify-split-kv"
VARIABLE, SPLITS_VARIABLE = "SGLANG_PATCHES_MLA_VERIFY", "SGLANG_PATCHES_MLA_VERIFY_SPLITS"

backends = Backends(PATCH)


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

    def make(**given: Any) -> SplitVerify:
        from sglang_patches.runtime.mla_verify_split_kv.launch import SplitVerify

        return SplitVerify(
            model_runner.req_to_token_pool.size,
            seen.tokens,
            backend.num_head,
            seen.width,
            cores=max(1, backend.device_core_count),
            device=model_runner.device,
            **given,
        )

    started = start(
        backends,
        seen.tokens,
        gate.server_reason(seen),
        variable=VARIABLE,
        splits_variable=SPLITS_VARIABLE,
        what="verify",
        heads=backend.num_head,
        width=seen.width,
        model_runner=model_runner,
        make=make,
        difference=lambda run: _difference(run, backend.num_head, seen),
        waits=("prefill_node", "a prefill node verifies nothing until its role is switched")
        if seen.prefill_node
        else None,
    )
    if started is None:
        return
    run, first = started
    backend.use_verify_shared_kv = True
    backend.verify_shared_kv_fwd = torch.compiler.disable(Hook(run, seen.tokens, first).__call__)


def _difference(run: Any, heads: int, seen: gate.Facts) -> float:
    return check.difference(
        run,
        tokens=seen.tokens,
        heads=heads,
        width=seen.width,
        rope=seen.rope,
        dtype=seen.compute,
        cache_dtype=seen.cache,
    )


class Hook:
    """What upstream calls in place of its own ``verify_shared_kv_fwd``; True says that ``o_extend`` is written.

    Args:
        run: as `launch.SplitVerify`.
        tokens: draft tokens that its backend was made for.
        first: as `Served`.
    """

    def __init__(self, run: Any, tokens: int, first: Callable[[], None] | None = None) -> None:
        self.run, self.served = run, Served(backends, tokens, "verify", first)

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
        width = v_extend.shape[-1]

        def reason() -> str | None:
            why = gate.call_reason(
                q_extend,
                k_extend,
                v_extend,
                o_extend,
                k_buffer,
                v_buffer,
                kv_indptr,
                max_len_extend,
                logit_cap=logit_cap,
                sliding_window_size=sliding_window_size,
                sinks=sinks,
                temperature_len=xai_temperature_len,
                is_causal=is_causal,
            )
            if why is not None:
                return why
            batch, rows = q_extend.shape[0] // max_len_extend, max_len_extend * q_extend.shape[1]
            return None if self.run.fits(batch, rows, width) else "workspace"

        def run() -> None:
            self.run(
                q_extend,
                k_extend,
                o_extend,
                k_buffer,
                kv_indptr,
                kv_indices,
                width=width,
                scale=sm_scale,
                k_scale=k_scale,
                v_scale=v_scale,
            )

        return self.served(reason, run)
