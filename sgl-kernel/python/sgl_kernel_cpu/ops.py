"""The ``torch.ops.sgl_kernel`` namespace of the CPU build."""

from __future__ import annotations

import torch

from .absent import NotProvided
from .murmur import murmur_hash32_cpu

# SGLang reads these at import, on CPU, whether or not the model that uses them is served.
READ_AT_IMPORT = (
    "fused_dual_residual_rmsnorm_cpu",
    "fused_gdn_gating_cpu",
    "fused_moe_router_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_scale_residual_norm_scale_shift",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_mul_cpu",
    "rmsnorm_cpu",
)

# Keeps the registration alive: torch drops a library's operators when the object dies.
_fragment: torch.library.Library | None = None


def register() -> None:
    """Register the operators once per process; a second copy of this package under another name is harmless."""
    global _fragment
    namespace = torch.ops.sgl_kernel
    if hasattr(namespace, "murmur_hash32_cpu"):
        return
    _fragment = torch.library.Library("sgl_kernel", "FRAGMENT")
    _fragment.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
    _fragment.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")
    for name in READ_AT_IMPORT:
        if not hasattr(namespace, name):
            setattr(namespace, name, NotProvided(f"torch.ops.sgl_kernel.{name}"))
