"""Which path upstream's all-reduces take, by size: noted where the path is taken, told in ``/metrics``.

A call that is captured into a CUDA graph is noted once, when it is captured: replays do not come through Python.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from sglang_patches.runtime import _metrics

# (group, path, up to bytes, eager or captured), as the labels of `_metrics.ALLREDUCE`.
Key = tuple[str, str, str, str]

calls: Counter[Key] = Counter()
_exported = _metrics.Exported(_metrics.ALLREDUCE)
exports_counts = _metrics.on_decode_step(
    "pcie-nccl-allreduce", lambda labels: _exported.export(list(calls.items()), labels)
)


def note_all_reduce(path: str, coordinator: Any, tensor: torch.Tensor) -> None:
    """Upstream's ``GroupCoordinator`` is about to reduce `tensor` by `path`; host memory only, no wait.

    Args:
        path: upstream's name of the method; ``pynccl`` and ``torch`` (ProcessGroupNCCL, or gloo) are NCCL itself.
    """
    if torch.compiler.is_compiling():  # asked first, so that nothing behind it is traced
        return
    captured = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    group = str(coordinator.unique_name).partition(":")[0]
    size = up_to(tensor.numel() * tensor.element_size())
    calls[group, path, str(size), "captured" if captured else "eager"] += 1


def up_to(size: int) -> int:
    """`size` in bytes, rounded up to a power of two."""
    return 1 << max(size - 1, 0).bit_length()
