"""Plain files with patched source, where tracebacks, debuggers, `inspect` and bytecode caching find them.

A copy is never trusted: its content is compared with what it must be whenever its module is imported, and written anew
(temporary file, atomic rename) where it differs. So neither a race nor a crash nor an edit leaves half a file in use.
Bytecode beside it cannot be compared, and a file can change between being compared and being loaded: a folder where
another user could do either is not used (`trust`).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import tempfile
from importlib.util import cache_from_source

from sglang_patches.errors import PatchError
from sglang_patches.trust import distrusted
from sglang_patches.upstream import digest

logger = logging.getLogger("sglang_patches")

# This process's own folder once the cache folder has failed, and how that failed.
_private: tuple[str, OSError] | None = None


def folder() -> str:
    """`SGLANG_PATCHES_CACHE`, else `sglang-patches` in the user's cache folder."""
    chosen = os.environ.get("SGLANG_PATCHES_CACHE")
    return os.path.abspath(chosen) if chosen else default_folder()


def default_folder() -> str:
    """`sglang-patches` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(os.path.abspath(base), "sglang-patches")


def store(key: str, relative: str, content: bytes, original: str, source: bytes) -> str:
    """Make sure that the cache holds `content`, and return its path, `<cache>/<key>/sglang/...`.

    Args:
        key: identifies upstream file and patches.
        relative: upstream path of the file.
        content: the patched file.
        original: the installed upstream file.
        source: that file's bytes.

    Raises:
        PatchError: neither the cache folder nor the temporary folder takes the file.
    """
    # Such modules look for files beside them: the copy gets links to what stands beside the original.
    linked = original if b"__file__" in source or relative.endswith("/__init__.py") else None
    if linked:
        key = f"{key}-{digest(original.encode())[:8]}"
    if _private is None:
        try:
            return _put(folder(), key, relative, content, linked)
        except OSError as error:
            _use_private_folder(error)
    assert _private is not None
    temporary, problem = _private
    try:
        return _put(temporary, key, relative, content, linked)
    except OSError as error:
        raise _unwritable(problem, temporary, error) from error


def _use_private_folder(problem: OSError) -> None:
    global _private
    try:
        temporary = tempfile.mkdtemp(prefix="sglang-patches-")
    except OSError as error:
        raise _unwritable(problem, tempfile.gettempdir(), error) from error
    atexit.register(_remove, temporary, os.getpid())
    _private = temporary, problem
    logger.warning(
        "cannot use the cache folder %s (%s): this process keeps its patched files in %s until it ends; "
        "set SGLANG_PATCHES_CACHE to a writable folder of your own",
        folder(),
        problem,
        temporary,
    )


def _put(root: str, key: str, relative: str, content: bytes, original: str | None) -> str:
    target = os.path.join(root, key, *relative.split("/"))
    parent = os.path.dirname(target)
    _refuse_distrusted(parent)  # before anything is written there
    _make_folders(root, parent)
    _refuse_distrusted(parent)
    _refuse_distrusted(os.path.dirname(cache_from_source(target)))
    if original is not None:
        _link_siblings(original, target, depth=relative.count("/"))
    try:
        with open(target, "rb") as file:
            # One that others can write to could change after this comparison; a new one they cannot.
            if file.read() == content and not distrusted(target):
                return target
    except FileNotFoundError:
        pass
    descriptor, temporary = tempfile.mkstemp(dir=parent, prefix=".", suffix=".tmp")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    return target


def _refuse_distrusted(path: str) -> None:
    if reason := distrusted(path):
        raise PermissionError(reason)


def _make_folders(root: str, parent: str) -> None:
    """Make `parent`, a folder in `root`, for this user alone, whatever the umask."""
    os.makedirs(root, mode=0o700, exist_ok=True)
    folder = root
    for part in os.path.relpath(parent, root).split(os.sep):
        folder = os.path.join(folder, part)
        with contextlib.suppress(FileExistsError):  # os.makedirs gives its mode to the last folder only
            os.mkdir(folder, mode=0o700)


def _link_siblings(original: str, target: str, depth: int) -> None:
    """Link to what stands beside `original` and beside each of its `depth` parent folders, up to `sglang`."""
    for _ in range(depth):
        source, copy = os.path.dirname(original), os.path.dirname(target)
        for entry in os.listdir(source):
            link = os.path.join(copy, entry)
            if entry not in ("__pycache__", os.path.basename(original)) and not os.path.lexists(link):
                with contextlib.suppress(FileExistsError):  # another process was faster
                    os.symlink(os.path.join(source, entry), link)
        original, target = source, copy


def _remove(folder: str, creator: int) -> None:
    if os.getpid() == creator:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)


def _unwritable(problem: OSError, temporary: str, error: OSError) -> PatchError:
    return PatchError(
        f"cannot write patched files\n"
        f"  cache      {folder()}: {problem}\n"
        f"  temporary  {temporary}: {error}\n"
        f"  remedy     set SGLANG_PATCHES_CACHE to a writable folder of your own with a few megabytes free, "
        f"or run without patches: SGLANG_PATCHES=none"
    )
