"""Which path upstream's all-reduces take, by size: noted where the path is taken, told in ``/metrics``.

A call that is captured into a CUDA graph is noted once, when it is captured: replays do not come through Python.
Nothing is noted where the server has no metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from sglang_patches.runtime import _metrics

CAPTURED, EAGER, WARM_UP = "captured", "eager", "warm_up"


class Calls:
    """All-reduces of this process.

    Attributes:
        wanted: whether anybody can read them: this server has metrics.
        counts: by group, path, bits of the size in bytes, and whether it was captured. Kept as it comes, because this
            is written in each layer and read in a decode step.
        warm_up: the uncaptured ones of `counts` from before the first decode step had ended; None until then.
    """

    def __init__(self, wanted: bool = False) -> None:
        self.wanted = wanted
        self.counts: Counter[tuple[str, str, int, bool]] = Counter()
        self.warm_up: Counter[tuple[str, str, int, bool]] | None = None
        self._exported = _metrics.Exported(_metrics.ALLREDUCE)

    def export(self, labels: Mapping[str, Any]) -> None:
        """Bring the metric up to date; called at the end of each decode step.

        What ran before the first of them is no traffic: forwards before each capture, tuning, and, as a rule, the
        prompt of the request that the server sends itself.

        Args:
            labels: upstream's own, from its metrics collector.
        """
        if self.warm_up is None:
            self.warm_up = Counter({key: count for key, count in self.counts.items() if not key[3]})
        told: Counter[tuple[str, str, str, str]] = Counter()
        for key, count in list(self.counts.items()):
            group, path, bits, captured = key
            series = (group.partition(":")[0], path, str(1 << bits))
            if captured:
                told[*series, CAPTURED] += count
                continue
            early = self.warm_up[key]
            if early:
                told[*series, WARM_UP] += early
            if count > early:
                told[*series, EAGER] += count - early
        self._exported.export(told.items(), labels)


calls = Calls()
exports_counts = _metrics.on_decode_step("pcie-nccl-allreduce", lambda labels: calls.export(labels))


def decide() -> None:
    """Count from now on if this server has metrics; called when a group is made, before anything is reduced."""
    calls.wanted = _has_metrics()


def _has_metrics() -> bool:
    try:
        from sglang.srt.runtime_context import get_observability
    except ImportError:  # a release that keeps it elsewhere
        return True
    try:
        return bool(get_observability().enable_metrics)
    except Exception:  # not published in this process, of which nobody reads metrics; errors are of several classes
        return False


def note_all_reduce(path: str, coordinator: Any, tensor: torch.Tensor) -> None:
    """Upstream's ``GroupCoordinator`` is about to reduce `tensor` by `path`; host memory only, no wait.

    Args:
        path: upstream's name of the method; ``pynccl`` and ``torch`` (ProcessGroupNCCL, or gloo) are NCCL itself.
    """
    # Nothing behind the second question is traced by torch.compile.
    if not calls.wanted or torch.compiler.is_compiling():
        return
    captured = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    calls.counts[coordinator.unique_name, path, size_bits(tensor.nbytes), captured] += 1


def size_bits(size: int) -> int:
    """The power of two that `size` in bytes is rounded up to, as its exponent."""
    return (size - 1).bit_length() if size else 0
