"""Patch ``draft-extend-split-kv``: draft extend splits the cached context, on NVIDIA GPUs with a draft that is not MLA.

After each verify the draft reads the tokens that were verified, a few a request, over the whole context. Upstream's
triton backend does that with the kernel made for prefill, in which one program walks a head's whole context. This asks
`gate`, and where it can be, `launch` and `kernels` attend instead; `check` tries them at start. Whatever they cannot do
goes on to upstream's kernel, counted by reason.

``SGLANG_PATCHES_DRAFT_EXTEND``: ``auto`` (default, as ``on``) or ``off``. ``SGLANG_PATCHES_DRAFT_EXTEND_SPLITS``: into
how many parts a request is cut at most, in place of the number that follows from batch and GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sglang_patches.runtime._split_kv.start import start
from sglang_patches.runtime._split_kv.telling import Backends, Served
from sglang_patches.runtime.draft_extend_split_kv import check, gate

if TYPE_CHECKING:
    from sglang_patches.runtime.draft_extend_split_kv.launch import SplitExtend

__all__ = ["attends", "prepare"]

PATCH = "draft-extend-split-kv"
VARIABLE, SPLITS_VARIABLE = "SGLANG_PATCHES_DRAFT_EXTEND", "SGLANG_PATCHES_DRAFT_EXTEND_SPLITS"
# What `prepare` leaves on upstream's backend.
ATTRIBUTE = "_sglang_patches_draft_extend"

backends = Backends(PATCH)


def prepare(backend: Any, model_runner: Any) -> None:
    """At the end of ``TritonAttnBackend.__init__``: a draft's backend gets the split extend, where it can have it."""
    # Those of single draft steps extend nothing.
    if not model_runner.is_draft_worker or backend.skip_prefill:
        return
    seen = gate.facts(backend, model_runner)

    def make(**given: Any) -> SplitExtend:
        from sglang_patches.runtime.draft_extend_split_kv.launch import SplitExtend

        return SplitExtend(
            model_runner.req_to_token_pool.size,
            seen.tokens,
            seen.heads,
            seen.kv_heads,
            seen.key_width,
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
        what="draft extend",
        heads=seen.heads,
        width=seen.width,
        model_runner=model_runner,
        make=make,
        difference=lambda run: check.difference(run, tokens=seen.tokens, dtype=seen.compute, cache_dtype=seen.cache),
        # Another backend may serve the draft's extends, in a composed one or with another algorithm.
        waits=("not_yet", "no draft extend was served here so far"),
    )
    if started is not None:
        setattr(backend, ATTRIBUTE, torch.compiler.disable(Hook(started[0], seen.tokens, started[1]).__call__))


def attends(
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    **options: Any,
) -> bool:
    """In ``TritonAttnBackend.forward_extend``, before upstream's kernel; True says that ``out`` is written.

    Args:
        q: (tokens, heads * DK).
        k, v: (tokens, KV heads, DK or DV).
        out: (tokens, heads * DV).
        layer: upstream's ``RadixAttention``.
        options: as `Hook`.
    """
    hook = getattr(backend, ATTRIBUTE, None)
    if hook is None or not forward_batch.forward_mode.is_draft_extend_v2():
        return False
    pool, metadata = backend.token_to_kv_pool, backend.forward_metadata
    return bool(
        hook(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k,
            v,
            out.view(-1, layer.tp_q_head_num, layer.v_head_dim),
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            kv_indptr,
            kv_indices,
            tokens=metadata.max_extend_len,
            mask=metadata.custom_mask,
            scale=layer.scaling,
            temperature_len=layer.xai_temperature_len,
            **options,
        )
    )


class Hook:
    """Draft extend of one backend.

    Args:
        run: its kernels.
        tokens: draft tokens that its backend was made for.
        first: as `Served`.
    """

    def __init__(self, run: SplitExtend, tokens: int, first: Callable[[], None] | None = None) -> None:
        self.run, self.served = run, Served(backends, tokens, "draft extend", first)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        *,
        tokens: int,
        scale: float,
        k_scale: float,
        v_scale: float,
        **conditions: Any,
    ) -> bool:
        """True says that ``out`` is written.

        Args:
            tokens: new tokens of the request that has most.
            conditions: ``mask``, ``score_mod`` and what `_split_kv.gate.option_reason` has.
        """
        made = self.run

        def reason() -> str | None:
            sizes = (made.heads, made.kv_heads, made.key_width, made.width)
            why = gate.call_reason(q, k, v, out, k_cache, v_cache, kv_indptr, tokens, sizes=sizes, **conditions)
            if why is not None:
                return why
            return None if made.fits(q.shape[0] // tokens, tokens * made.heads, made.width) else "workspace"

        def run() -> None:
            made(q, k, v, out, k_cache, v_cache, kv_indptr, kv_indices, scale=scale, k_scale=k_scale, v_scale=v_scale)

        return self.served(reason, run)
