"""What the code in `runtime/` finds at another place, or not at all, from one upstream release to the next.

Each lane whose upstream differs has a module here, `v0_5_17` for `patches/0.5.17/`, with a class `Lane` that overrides
what differs from the newest lane's; the installed release picks one, once. Code asks `here()` and never for a version.
"""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.util import find_spec

from sglang_patches import upstream
from sglang_patches.lane.newest import Lane

__all__ = ["Lane", "here", "of"]


@functools.cache
def here() -> Lane:
    """The adapter of the installed release."""
    installed = upstream.locate()
    return of(installed.release if installed else "")


def of(release: str) -> Lane:
    """The adapter of an upstream release: its own, or the newest lane's where it has none."""
    module = f"{__name__}.v{release.replace('.', '_')}"
    if not release or find_spec(module) is None:
        return Lane()
    found = import_module(module).Lane()
    assert isinstance(found, Lane)
    return found
