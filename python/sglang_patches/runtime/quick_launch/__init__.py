"""Patch ``quick-launch``: the small Triton kernels of an EAGLE cycle are launched with less Python.

Each cycle upstream launches about a dozen of them one by one, outside any CUDA graph. For each, Triton binds arguments,
spells out options, looks a long key up twice and builds what hooks would read if there were any. `launch` keeps, for
arguments that Triton specialises as it did before, the compiled kernel it chose and calls that kernel's native launch.
`small_copy` keeps what upstream's fused copy of a batch's inputs works out of shapes and strides.

Both ask Triton's or upstream's own code whenever anything is new or unusual, so they can only choose what it chose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import triton

from sglang_patches.runtime import _outcome

if TYPE_CHECKING:
    from sglang_patches.runtime.quick_launch.launch import Counts

__all__ = ["copies", "kernel"]

PATCH = "quick-launch"
# Its launch path was read line by line; another one may look at more than this one does.
CHECKED_TRITON = "3.8.0"
# The kernel that upstream's `try_small_copy` launches, a global of its module.
SMALL_COPY_KERNEL = "_small_copy_kernel"


def kernel(jitted: Any) -> Any:
    """Decorate what ``@triton.jit`` made: the same object, whose ``[grid](...)`` is quick where it can be."""
    counts = _counts()
    if counts is None:
        return jitted
    from sglang_patches.runtime.quick_launch import launch

    return launch.quicken(jitted, counts)


def copies(try_small_copy: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Decorate upstream's ``try_small_copy``: its plan is kept by shapes, strides, types and addresses."""
    if _counts() is None:
        return try_small_copy
    from sglang_patches.runtime.quick_launch.small_copy import SmallCopy

    quick = SmallCopy(try_small_copy, SMALL_COPY_KERNEL)

    @functools.wraps(try_small_copy)
    def copied(dsts: Any, srcs: Any) -> bool:
        return quick(dsts, srcs)

    return copied


@functools.cache
def _counts() -> Counts | None:
    """What this process counts; None, and told once, where launches are left to Triton."""
    if not (torch.version.cuda and torch.cuda.is_available()):
        _outcome.record(PATCH, "not needed", "no NVIDIA GPU: kernels are not launched, or by another driver")
        return None
    if triton.__version__ != CHECKED_TRITON:
        detail = f"off: Triton {triton.__version__}; its way to launch was checked in {CHECKED_TRITON} only"
        _outcome.record(PATCH, "not needed", detail, reason="triton")
        return None
    from sglang_patches.runtime.quick_launch.launch import Counts

    counts = Counts(first=_applied)
    _outcome.live_figures(PATCH, lambda: figures(counts))
    return counts


def _applied() -> None:
    _outcome.record(PATCH, "applied", "small Triton kernels are launched without Triton's own look-up")


def figures(counts: Counts) -> dict[str, Any]:
    """``kernels`` decorated, ``variants`` of them that are quick, and ``launches``, quick or by reason."""
    return {
        "kernels": counts.kernels,
        "variants": counts.variants,
        "launches": {"quick": counts.quick[0], **dict(sorted(counts.usual.items()))},
    }
