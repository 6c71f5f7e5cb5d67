"""CPU build of the ``sgl_kernel`` functions that EAGLE speculation needs on a machine without a GPU.

Loaded under the name ``sgl_kernel`` only where the CUDA build of that package cannot load; see ``README.md`` beside
the source tree for the list of functions. Everything else that SGLang imports by name from ``sgl_kernel`` is
importable too, and raises ``NotImplementedError`` naming the function when it is called. Names and operators that
SGLang probes for (``try: import`` and ``hasattr``) are absent, so that it takes its own fallback.

Arguments are CPU tensors. The functions work on NumPy views of them, because at these sizes (1-8 requests, tens of
tokens) the fixed cost of a tensor operation is most of the time.
"""

from __future__ import annotations

from . import ops as _ops
from .absent import module_getattr
from .cache_locs import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from .kvcacheio import copy_all_layer_kv_cache_cpu
from .murmur import murmur_hash32_cpu
from .tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

__version__ = "0.1.0"

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "murmur_hash32_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

__getattr__ = module_getattr("")
_ops.register()
