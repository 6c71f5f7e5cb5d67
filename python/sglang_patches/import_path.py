"""What Python looks through before its own library: the current folder and `PYTHONPATH`.

``python -m`` puts the current folder first, so whoever can write to the folder that a server is started from chooses
its `json`, and with it everything else. ``PYTHONSAFEPATH`` (Python 3.11) leaves that folder out and, unlike ``-P``,
reaches every process that the server starts. An empty entry of `PYTHONPATH`, as ``PYTHONPATH=/x:$PYTHONPATH`` leaves
where there was none, is the current folder again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping

from sglang_patches.trust import distrusted

SAFE = "PYTHONSAFEPATH"
_PATH = "PYTHONPATH"


def settle(environ: dict[str, str]) -> list[str]:
    """Keep the current folder off the import path of processes with this environment, which is changed in place.

    ``PYTHONSAFEPATH=`` (set, and empty) in it says that the folder is wanted.

    Returns:
        Remarks for the person who starts them.
    """
    if environ.setdefault(SAFE, "1") == "":
        return [f"{SAFE} is empty: modules in the current folder come before the installed ones"]
    kept = [entry for entry in environ.get(_PATH, "").split(os.pathsep) if entry]
    if not environ.get(_PATH) or os.pathsep.join(kept) == environ[_PATH]:
        return []
    environ[_PATH] = os.pathsep.join(kept)
    return [f"{_PATH} had an empty entry, which is the current folder: left out"]


def exposed(environ: Mapping[str, str], folder: str | None = None) -> dict[str, str]:
    """Folders from which a ``python -m`` in `folder` with this environment would load what another user can put there,
    each with the reason. By default in the current folder; none where that is gone."""
    folder = folder or _here()
    return _checked(_first(environ, folder)) if folder else {}


def of_this_process() -> dict[str, str]:
    """The same for what this process has on its import path."""
    here = _here()
    named = [os.path.abspath(entry) for entry in os.environ.get(_PATH, "").split(os.pathsep) if entry]
    found = (entry or here for entry in sys.path if entry in ("", here) or entry in named)
    return _checked(entry for entry in found if entry)


def _here() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it is gone, and nobody can put anything there
        return None


def _first(environ: Mapping[str, str], folder: str) -> Iterator[str]:
    if not environ.get(SAFE):
        yield folder
    if environ.get(_PATH):
        for entry in environ[_PATH].split(os.pathsep):
            yield os.path.join(folder, entry) if entry else folder


def _checked(folders: Iterator[str]) -> dict[str, str]:
    found = {}
    for folder in dict.fromkeys(map(os.path.abspath, folders)):
        try:
            reason = distrusted(folder)
        except OSError as error:
            reason = f"it cannot be examined: {error.strerror}"
        if reason:
            found[folder] = reason
    return found
