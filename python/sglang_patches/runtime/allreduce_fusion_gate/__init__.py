"""Patch ``allreduce-fusion-gate``: all-reduce, add and RMSNorm in one kernel only where the group of GPUs can do it.

`decision` is the rule; `kernels` asks the libraries what their kernels can do; `launch` decides in the launching
process, `ranks` on all ranks together before a workspace is made; `captured` checks that hidden states which a draft
reads are whole sums.
"""

from __future__ import annotations

from sglang_patches.runtime.allreduce_fusion_gate.captured import PartialSumCaptured, compares_ranks
from sglang_patches.runtime.allreduce_fusion_gate.kernels import resolves_where_compiled, runs_where_compiled
from sglang_patches.runtime.allreduce_fusion_gate.launch import AllReduceFusionRefused, before_workers
from sglang_patches.runtime.allreduce_fusion_gate.ranks import agree, only_if_agreed

__all__ = [
    "AllReduceFusionRefused",
    "PartialSumCaptured",
    "agree",
    "before_workers",
    "compares_ranks",
    "only_if_agreed",
    "resolves_where_compiled",
    "runs_where_compiled",
]
