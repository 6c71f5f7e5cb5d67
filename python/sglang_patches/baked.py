"""Where the patched files of a server go whose cache folder came with an image, and takes no others.

An image is baked with the files of its own selection, on a root file system that is read-only as a rule. A recipe or
`SGLANG_PATCHES` may select other patches; without a folder for their files each process of the server would make its
own and lose it at its end, and where `/tmp` is open to every user, as an `emptyDir` is, none would start.
"""

from __future__ import annotations

import os

from sglang_patches import cache, upstream
from sglang_patches.overlay import Overlay
from sglang_patches.selection import VARIABLE, is_none, select
from sglang_patches.series import load
from sglang_patches.trust import distrusted, folder_of_ones_own

_CACHE = "SGLANG_PATCHES_CACHE"


def settle(environ: dict[str, str]) -> list[str]:
    """Let a server with this environment, which is changed in place, keep its patched files where it can write them.

    Nothing is changed where its cache folder has all of them, or takes them.

    Returns:
        Remarks for the person who starts it.

    Raises:
        PatchError: the selection is not usable, or does not fit the installed upstream.
    """
    chosen, selected = environ.get(_CACHE), environ.get(VARIABLE, "")
    installed = upstream.locate()
    if not chosen or is_none(selected) or installed is None or _writable(chosen):
        return []
    overlay = Overlay(installed, select(load(installed.release), selected))
    missing = overlay.missing(os.path.abspath(chosen))
    if not missing:
        return []
    instead = cache.default_folder()
    said = (
        f"{VARIABLE}={selected or '(the defaults)'}: {len(missing)} of {len(overlay.by_path)} patched files are not "
        f"among those in {chosen}, which cannot be written to"
    )
    try:
        problem = distrusted(instead) or (None if _writable(instead) else f"{instead} cannot be written to")
    except OSError as error:  # a home folder that this user may not look into; the processes can do without it
        problem = str(error)
    if problem:
        return [
            f"{said}; and {problem}: each process keeps them in a temporary folder of its own, if it can; set "
            f"{_CACHE} to {folder_of_ones_own()}"
        ]
    environ[_CACHE] = instead
    return [f"{said}: they go to {instead}"]


def _writable(folder: str) -> bool:
    """Whether files can be added to the folder, or it can be made."""
    at = os.path.abspath(folder)
    while not os.path.lexists(at):
        at = os.path.dirname(at)
    return os.access(at, os.W_OK | os.X_OK)
