"""Whether a draft, and then a call, can extend with the split kernels: by what they need, not by a platform's name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_patches.runtime._split_kv import gate
from sglang_patches.runtime._split_kv.gate import capability

MAX_WIDTH = 256


@dataclass(frozen=True, kw_only=True)
class Facts(gate.Facts):
    """What decides for a whole server; heads are those of this rank."""

    heads: int
    kv_heads: int
    key_width: int
    width: int


def facts(backend: Any, model_runner: Any) -> Facts:
    """Of upstream's ``TritonAttnBackend`` of the draft, when it has its widths, and ``ModelRunner``."""
    return Facts(
        **gate.common(backend, model_runner, capability(model_runner)),
        heads=backend.num_head,
        kv_heads=backend.num_kv_head,
        key_width=int(model_runner.model_config.head_dim or 0),
        width=int(backend.v_head_dim or 0),
    )


def server_reason(seen: Facts) -> tuple[str, str] | None:
    """Why no draft extend of this server is split: (reason, sentence); None if it can be."""
    return gate.first(
        (
            gate.prefill_node_check(seen, "drafts"),
            (seen.mla, "mla", "the draft's attention is MLA"),
            gate.tokens_check(seen),
            (
                seen.kv_heads < 1 or seen.heads % seen.kv_heads != 0,
                "kv_heads",
                f"{seen.heads} query heads cannot share {seen.kv_heads} KV heads evenly",
            ),
            (
                not (0 < seen.key_width <= MAX_WIDTH and 0 < seen.width <= MAX_WIDTH),
                "head_dim",
                f"heads of {seen.key_width} and {seen.width} numbers; 1 to {MAX_WIDTH} are supported",
            ),
            *gate.machine_checks(seen),
        )
    )


def call_reason(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    tokens: int,
    *,
    sizes: tuple[int, int, int, int],
    mask: torch.Tensor | None,
    score_mod: Any,
    **options: Any,
) -> str | None:
    """Why this extend goes to upstream's kernel; None if the split kernels do the same. No values are read.

    Args:
        sizes: heads, KV heads, DK and DV that the kernels were made for.
        options: as `_split_kv.gate.option_reason`.
    """
    if mask is not None:
        return "mask"
    if score_mod is not None:
        return "score_mod"
    if reason := gate.option_reason(**options) or gate.batch_reason(q, k, kv_indptr, tokens):
        return reason
    # A pool of whole pages ("page_major", HND) has more dimensions.
    if any(tensor.dim() != 3 or tensor.stride(-1) != 1 for tensor in (q, k, v, out, k_cache, v_cache)):
        return "layout"
    heads, kv_heads, key_width, width = sizes
    if q.shape[1] != heads or any(tensor.shape[1] != kv_heads for tensor in (k, v, k_cache, v_cache)):
        return "heads"
    if any(tensor.shape[2] != key_width for tensor in (q, k, k_cache)):
        return "head_dim"
    if any(tensor.shape[2] != width for tensor in (v, out, v_cache)):
        return "head_dim"
    return gate.type_reason(q, k_cache, v_cache)
