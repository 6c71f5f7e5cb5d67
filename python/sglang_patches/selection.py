"""`SGLANG_PATCHES`: which patches of a series are on in this environment.

    unset or empty       every patch's own default
    none / all           no patch / every patch
    a,b                  exactly these
    +a,-b                the defaults, with a on and b off
    none,+a / all,-b     the same, starting from none or all (`default` names the defaults)

Case and order do not matter; patches always apply in the order of the series.
"""

from __future__ import annotations

import ctypes
import glob
import os
from collections.abc import Callable

from sglang_patches.errors import PatchError
from sglang_patches.series import Patch, Series, unknown_patches

VARIABLE = "SGLANG_PATCHES"


def cuda_driver_loads() -> bool:
    """Whether the CUDA driver's library can be loaded, which says nothing about a working GPU; without torch."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def has_gpu() -> bool:
    """Whether this machine may have an NVIDIA GPU: a device node, or a loadable driver."""
    return bool(glob.glob("/dev/nvidia[0-9]*")) or cuda_driver_loads()


def is_none(text: str) -> bool:
    """Whether the selection is the single word `none`."""
    return text.strip().lower() == "none"


def select(series: Series, text: str | None = None, gpu: Callable[[], bool] = has_gpu) -> tuple[Patch, ...]:
    """The patches that are on, in series order.

    Args:
        series: the patches of the installed release.
        text: a selection; `SGLANG_PATCHES` where it is None.
        gpu: asked at most once, and only if the default of a `no-gpu` patch matters.

    Raises:
        PatchError: a malformed selection, an unknown patch, a conflict, or a required patch that is off.
    """
    if text is None:
        text = os.environ.get(VARIABLE, "")
    names = _names(series, text, gpu)
    on = tuple(patch for patch in series.patches if patch.name in names)
    check(on, series, text)
    return on


def check(on: tuple[Patch, ...], series: Series, text: str) -> None:
    """Raise PatchError if patches that are on exclude each other or miss one they require."""
    names = {patch.name for patch in on}
    shown = f"{VARIABLE}={text}" if text.strip() else f"{VARIABLE} is unset: the defaults"
    for patch in on:
        for other in patch.conflicts:
            if other in names:
                raise PatchError(
                    f"conflicting patches: {patch.name} cannot be on together with {other}\n"
                    f"  selected   {', '.join(p.name for p in on)} ({shown})\n"
                    f"  remedy     switch one of them off: add -{patch.name} or -{other} to {VARIABLE}"
                )
        missing = [other for other in patch.requires if other not in names]
        if missing:
            absent = [other for other in missing if other not in series.by_name]
            remedy = (
                f"the series for {series.release} has no {', '.join(absent)}: switch {patch.name} off"
                if absent
                else f"switch {', '.join(missing)} on as well, or {patch.name} off"
            )
            raise PatchError(
                f"missing required patch: {patch.name} needs {', '.join(missing)}\n"
                f"  selected   {', '.join(p.name for p in on)} ({shown})\n"
                f"  remedy     {remedy}"
            )


def defaults(series: Series, gpu: Callable[[], bool] = has_gpu) -> set[str]:
    """Names of the patches that are on where nothing is selected."""
    on = {patch.name for patch in series.patches if patch.default == "on"}
    conditional = {patch.name for patch in series.patches if patch.default == "no-gpu"}
    return on | conditional if conditional and not gpu() else on


def _names(series: Series, text: str, gpu: Callable[[], bool]) -> set[str]:
    items = [item.strip().lower() for item in text.split(",") if item.strip()]
    changes = [item for item in items if item[0] in "+-"]
    plain = [item for item in items if item[0] not in "+-"]
    bases: dict[str, Callable[[], set[str]]] = {
        "none": set,
        "all": lambda: set(series.by_name),
        "default": lambda: defaults(series, gpu),
    }
    base = next((item for item in plain if item in bases), None)
    if (
        (text.strip() and not items)
        or (base and (len(plain) > 1 or items[0] != base))
        or (changes and plain and not base)
    ):
        raise PatchError(
            f"{VARIABLE}={text!r} is not a selection\n"
            f"  expected   none, all, a list (a,b), or changes (+a,-b) to the defaults or to a first word "
            f"none, all or default\n"
            f"  remedy     either list exactly the patches that should be on, or only changes"
        )
    turned = [item[1:].strip() for item in changes]
    listed = [] if base else plain
    unknown = [name for name in listed + turned if name not in series.by_name]
    if unknown:
        raise PatchError(unknown_patches(unknown, series))
    both = sorted({name for name in turned if f"+{name}" in changes and f"-{name}" in changes})
    if both:
        raise PatchError(
            f"{VARIABLE}={text!r} switches {', '.join(both)} both on and off\n  remedy     keep one of the two"
        )
    names = set(listed) if listed else bases[base or "default"]()
    for item in changes:
        (names.add if item[0] == "+" else names.discard)(item[1:].strip())
    return names
