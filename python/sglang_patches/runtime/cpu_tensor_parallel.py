"""Patch ``cpu-tensor-parallel``: tensor parallelism on any CPU.

Upstream's ranks on a CPU sum with a shared-memory kernel of `sgl_kernel` where that build has AMX or Arm kernels, and
with torch's gloo elsewhere. It never gets to the latter: it asks for a NUMA node a rank, to bind threads to that nobody
then binds, and makes an NCCL communicator for the group wherever NCCL's library is found.
"""

from __future__ import annotations

import torch


def binds_threads() -> bool:
    """Whether ``sgl_kernel`` has the kernel that binds a rank's threads; the shared-memory ones come with it.

    Without it a rank has nothing to bind with (`_bind_threads_if_cpu` only finds the cores for it), and
    `_init_cpu_threads_env`, which also tells upstream to sum through shared memory, ends in an AttributeError on Arm.
    """
    return hasattr(torch.ops.sgl_kernel, "init_cpu_threads_env")


def refuse_cpu(device: torch.device | str | int) -> None:
    """Return where NCCL can serve ``device``, which as a number is a GPU's.

    Raises:
        ValueError: it is a CPU. Upstream catches what comes up while it loads NCCL, and does without it.
    """
    if not isinstance(device, int) and torch.device(device).type == "cpu":
        raise ValueError("NCCL sums tensors of GPUs only")
