"""Plain files with patched source, where tracebacks, debuggers, `inspect` and bytecode caching find them.

A copy is never trusted: its content is compared with what it must be whenever its module is imported, and written anew
(temporary file, atomic rename) where it differs. So neither a race nor a crash nor an edit leaves half a file in use.
Bytecode beside it cannot be compared, and a file can change between being compared and being loaded: a folder where
another user could do either is not used, and bytecode that another user can write to is removed (`trust`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import shutil
import tempfile
from importlib.util import cache_from_source

from sglang_patches.errors import PatchError
from sglang_patches.trust import distrusted, folder_of_ones_own
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
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        home = os.path.expanduser("~")
        if not os.path.isabs(home):  # no HOME, and nobody knows this user: `~` would be a folder of the current one
            return _without_home()
        base = os.path.join(home, ".cache")
    return os.path.join(os.path.abspath(base), "sglang-patches")


@functools.cache
def _without_home() -> str:
    """A temporary folder of this process."""
    temporary = tempfile.mkdtemp(prefix="sglang-patches-")
    atexit.register(_remove, temporary, os.getpid())
    logger.warning(
        "user %d has no home folder, so no cache folder: this process keeps its files in %s until it ends; "
        "set SGLANG_PATCHES_CACHE to a writable folder of your own",
        os.geteuid(),
        temporary,
    )
    return temporary


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
    key, linked = _kept_as(key, relative, original, source)
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


def holds(root: str, key: str, relative: str, content: bytes, original: str, source: bytes) -> bool:
    """Whether the cache folder `root` has what `store` would put there, as it has to be; see there."""
    key, _ = _kept_as(key, relative, original, source)
    copy = os.path.join(root, key, *relative.split("/"))
    try:
        with open(copy, "rb") as file:
            return file.read() == content and not distrusted(copy)
    except OSError:
        return False


def _kept_as(key: str, relative: str, original: str, source: bytes) -> tuple[str, str | None]:
    """(folder within the cache, the original if the copy gets links to what stands beside it)."""
    if b"__file__" in source or relative.endswith("/__init__.py"):  # such modules look for files beside them
        return f"{key}-{digest(original.encode())[:8]}", original
    return key, None


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
        "set SGLANG_PATCHES_CACHE to %s",
        folder(),
        problem,
        temporary,
        folder_of_ones_own(),
    )


def _put(root: str, key: str, relative: str, content: bytes, original: str | None) -> str:
    target = os.path.join(root, key, *relative.split("/"))
    parent = os.path.dirname(target)
    _refuse_distrusted(parent)  # before anything is written there
    make_folder(parent)
    _refuse_distrusted(parent)
    _secure_bytecode(cache_from_source(target))
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


def make_folder(path: str) -> None:
    """Make a folder, with each missing one above it, for this user alone, whatever the umask.

    Raises:
        OSError: one cannot be made.
    """
    missing = []
    at = os.path.abspath(path)
    while not os.path.lexists(at):
        missing.append(at)
        at = os.path.dirname(at)
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.mkdir(folder, mode=0o700)  # os.makedirs gives its mode to the last folder only


def _secure_bytecode(file: str) -> None:
    """Make sure that the bytecode `file` is this user's, or is not there, and that nobody else can put one there.

    Raises:
        OSError: neither can be had.
    """
    folder = os.path.dirname(os.path.abspath(file))
    _refuse_distrusted(folder)
    try:
        make_folder(folder)  # Python would by umask, and below /tmp another user could be first
    except OSError:
        # A cache may be read-only. Then nobody but this user must be able to make it later.
        while not os.path.lexists(folder):
            folder = os.path.dirname(folder)
    _refuse_distrusted(folder)
    _remove_distrusted(file)


def _remove_distrusted(file: str) -> None:
    if distrusted(file):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            os.unlink(file)


def _link_siblings(original: str, target: str, depth: int) -> None:
    """Link to what stands beside `original` and beside each of its `depth` parent folders, up to `sglang`."""
    for _ in range(depth):
        source, copy = os.path.dirname(original), os.path.dirname(target)
        for entry in os.listdir(source):
            if entry not in ("__pycache__", os.path.basename(original)):
                _link(os.path.join(source, entry), os.path.join(copy, entry))
        original, target = source, copy


def _link(source: str, link: str) -> None:
    if os.path.lexists(link):
        # Where it leads is trusted as far as the original is, so only what is no such link is looked at.
        if os.path.islink(link) and os.readlink(link) == source:
            return
        _remove_distrusted(link)
    with contextlib.suppress(FileExistsError):  # another process was faster
        os.symlink(source, link)


def _remove(folder: str, creator: int) -> None:
    if os.getpid() == creator:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)


def _unwritable(problem: OSError, temporary: str, error: OSError) -> PatchError:
    return PatchError(
        f"cannot write patched files\n"
        f"  cache      {folder()}: {problem}\n"
        f"  temporary  {temporary}: {error}\n"
        f"  remedy     set SGLANG_PATCHES_CACHE to {folder_of_ones_own()} with a few megabytes free, "
        f"or run without patches: SGLANG_PATCHES=none"
    )
