"""Patch ``pcie-nccl-allreduce``: NCCL settings for GPUs without full NVLink, set before workers start, checked in them.

`decision` runs in the launching process and picks a profile (`sglang_patches.nccl.profile`); `agreement` makes every
rank check what it inherited just before the first communicator is made; `guard` keeps NCCL's rules for a communicator
that is made for CUDA graphs alone; `ipc` keeps PCIe-IPC all-reduce on all ranks or on none; `paths`
counts by which path all-reduces go.
"""

from __future__ import annotations

from typing import Any

from sglang_patches.runtime.pcie_nccl_allreduce import agreement, ipc, paths
from sglang_patches.runtime.pcie_nccl_allreduce.agreement import NcclSettingsMismatch, before_communicators
from sglang_patches.runtime.pcie_nccl_allreduce.decision import prepare
from sglang_patches.runtime.pcie_nccl_allreduce.guard import guards_eager_calls, made_for_graphs, replays_graph
from sglang_patches.runtime.pcie_nccl_allreduce.ipc import built_on_all_ranks
from sglang_patches.runtime.pcie_nccl_allreduce.paths import exports_counts, note_all_reduce

__all__ = [
    "NcclSettingsMismatch",
    "after_communicators",
    "before_communicators",
    "built_on_all_ranks",
    "exports_counts",
    "guards_eager_calls",
    "made_for_graphs",
    "note_all_reduce",
    "prepare",
    "replays_graph",
]


def after_communicators(coordinator: Any, group_name: str) -> None:
    """Upstream has made the pynccl and PCIe-IPC communicators of a group: tell of the first, agree on the second, and
    count its all-reduces if this server has metrics.

    Args:
        coordinator: upstream's ``GroupCoordinator``.
    """
    paths.decide()
    agreement.after_communicators(coordinator, group_name)
    ipc.all_ranks_or_none(coordinator, group_name)
