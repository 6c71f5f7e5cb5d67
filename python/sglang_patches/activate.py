"""Interpreter start-up: makes `import sglang` load the selected patches.

`sglang_patches.pth` calls `install` in every interpreter of the environment, spawned workers included, so this module
does next to nothing: it puts one finder on `sys.meta_path`, or none where `SGLANG_PATCHES=none`. Series, selection and
pre-images are looked at when SGLang is first imported. Processes that never import it are neither slowed nor stopped by
a bad selection; a process that does import it stops before SGLang's first line runs.

An interpreter that skips `.pth` files (`python -S`, or this distribution on PYTHONPATH only) is not patched;
`sglang-patches status` tells.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # not from `typing`, whose import costs more than all the rest of start-up
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any

    from sglang_patches.overlay import Overlay

# Top-level modules that start the engine: upstream itself, and what a patch may provide in its stead.
ROOTS = ("sglang", "sgl_kernel")


class PatchFinder:
    """Meta-path finder that redirects the patched modules and nothing else."""

    is_sglang_patches = True

    def __init__(self) -> None:
        self.overlay: Overlay | None = None
        self.error: Exception | None = None

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """A spec for a patched module, or for one that cannot be patched and stops the process when it is executed."""
        if fullname.partition(".")[0] not in ROOTS:
            return None
        if self.overlay is None and self.error is None:
            self.start()
        if self.overlay is not None:
            return self.overlay.find_spec(fullname, path, target)
        if self.error is None or fullname not in ROOTS:
            return None
        from sglang_patches.overlay import refusal

        return refusal(fullname, self.error)

    def start(self) -> None:
        """Read the selection and check it against the installed upstream, once a process."""
        from sglang_patches.errors import PatchError
        from sglang_patches.overlay import Overlay

        try:
            self.overlay = Overlay.from_environment()
        except PatchError as error:
            # Kept, not raised: libraries probe for SGLang with find_spec, and only a real import may stop a process.
            self.error = error


def finder() -> PatchFinder | None:
    """This interpreter's finder, if it has one."""
    return next((entry for entry in sys.meta_path if isinstance(entry, PatchFinder)), None)


def overlay() -> Overlay | None:
    """What this process patches; None if it patches nothing because activation is off.

    Raises:
        PatchError: the selection is not usable, or does not fit the installed upstream.
    """
    found = finder()
    if found is None:
        return None
    if found.overlay is None and found.error is None:
        found.start()
    if found.error is not None:
        raise found.error
    return found.overlay


def install() -> None:
    """Put the finder on `sys.meta_path`, unless the selection is `none` or it is there already.

    Raises:
        PatchError: SGLang was imported before, so that its patched modules can no longer be redirected.
    """
    if os.environ.get("SGLANG_PATCHES", "").strip().lower() == "none" or finder() is not None:
        return
    if "sglang" in sys.modules:
        from sglang_patches.errors import PatchError

        raise PatchError(
            "sglang was imported before sglang_patches.activate.install()\n"
            "  remedy     call it first, or rely on sglang_patches.pth, which calls it at interpreter start"
        )
    sys.meta_path.insert(0, PatchFinder())
