"""Upstream's PCIe-IPC all-reduce on all ranks of a group or on none.

Its kernels wait for their peers without a time limit, and each rank decides for itself whether it can build them: a
rank that falls back alone leaves the others waiting for ever.
"""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Callable
from typing import Any

from sglang_patches import lane
from sglang_patches.runtime._agreement import exchange, first_verdict

logger = logging.getLogger("sglang_patches")

_AGREED = "_sglang_patches_agreed"
# How often this process has asked, so that a second workspace of the same ranks is not answered with the first one's.
_asked: collections.Counter[str] = collections.Counter()


def all_ranks_or_none(coordinator: Any, group_name: str) -> None:
    """After upstream tried to make ``coordinator.pcie_ipc_comm``: drop it on all ranks if any rank is without it.

    Args:
        coordinator: upstream's ``GroupCoordinator``.
    """
    if not lane.here().pcie_ipc_allreduce(coordinator, group_name):
        return
    communicator = coordinator.pcie_ipc_comm
    usable = communicator is not None and not communicator.disabled
    if _lacking(coordinator.unique_name, usable, coordinator.rank, coordinator.ranks, "have its kernels"):
        coordinator.pcie_ipc_comm = None


def built_on_all_ranks(prepare: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``PcieIpcCommunicator.prepare``, which builds the workspace; every rank calls it at start."""

    @functools.wraps(prepare)
    def prepared(self: Any, **sizes: Any) -> None:
        prepare(self, **sizes)
        if getattr(self, _AGREED, False):
            return
        setattr(self, _AGREED, True)
        import torch.distributed as dist

        ranks = dist.get_process_group_ranks(self._group)
        if _lacking("workspace", not self.disabled, dist.get_rank(), ranks, "build its workspace"):
            self.disabled = True

    return prepared


def _lacking(name: str, usable: bool, rank: int, ranks: list[int], what: str) -> bool:
    """Whether any rank lacks the path, the same on all; rank 0 of the group then says which."""
    turn = f"ipc/{name}/{'-'.join(map(str, ranks))}"
    name = f"ipc/{name}/{_asked[turn]}"
    _asked[turn] += 1
    said = exchange(name, "yes" if usable else "no", rank, ranks)
    # A rank that came too late for the others hears no complaint, but uses the path alone and waits for ever.
    lacking = first_verdict(name, ", ".join(str(other) for other, answer in said.items() if answer != "yes"), ranks)
    if lacking and rank == ranks[0]:
        logger.warning(
            "sglang-patches: pcie-nccl-allreduce: PCIe-IPC all-reduce is off on all ranks, because rank %s could not "
            "%s (or not in time); NCCL reduces instead",
            lacking,
            what,
        )
    return bool(lacking)
