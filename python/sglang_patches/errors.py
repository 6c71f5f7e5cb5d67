"""What this distribution raises when it refuses to go on."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path  # what starts with every interpreter imports this module too


class PatchError(Exception):
    """A patch, a selection or an installation that cannot be used.

    The message names the thing, the value seen, the value expected and what to do, and is complete without a
    traceback.
    """


class ProcessStop(SystemExit):
    """Ends a process that would otherwise run code other than the selected one.

    A `SystemExit`, because upstream imports many modules under `except Exception` and goes on without them.
    """


#: A disk, a quota, or the size that a file may have is used up.
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


@contextlib.contextmanager
def of_file(path: Path) -> Iterator[None]:
    """Around writing a file: an error that names none, as of a full disk, or a temporary one beside it, names it."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def of_system(error: OSError) -> str:
    """An operating system's error as a message: the file if it is about one, and then what to do."""
    if error.filename is None:
        return str(error)
    import shlex
    from pathlib import Path

    path = Path(str(error.filename))
    above = shlex.quote(str(path.parent))
    seen, remedy = "", "name a place that exists and can be written (free space, permissions)"
    if error.errno in _FULL:
        remedy = f"make space: df -h {above}; then the same command again"
    if isinstance(error, FileNotFoundError):
        seen, remedy = first_missing(path), f"name a file that is there (ls {above})"
        if not path.parent.is_dir():
            remedy = f"name a file that is there; to write one, first: mkdir -p {above}"
    elif isinstance(error, IsADirectoryError):
        remedy = "name a file, such as one in it"
    elif isinstance(error, NotADirectoryError):
        remedy = "name a folder, or a file in one"
    elif isinstance(error, PermissionError):
        remedy = f"name a place that this user may read or write, or change who may: ls -ld {above}"
    return f"{error.filename}: {error.strerror}{seen}\n  remedy     {remedy}"


def first_missing(path: Path) -> str:
    """Of a path that is not there: which folder above it is missing already, as the end of a message; else empty."""
    missing = [folder for folder in reversed(path.parents) if not folder.exists()]
    return f"; already {missing[0]} is not there" if missing else ""


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Around a command: PatchErrors and failed file operations end it with a message on stderr and exit code 2."""
    import typer  # what starts with every interpreter imports this module too

    try:
        yield
    except BrokenPipeError:
        raise  # whoever read our output has had enough; click ends quietly
    except (PatchError, OSError) as error:
        message = of_system(error) if isinstance(error, OSError) else str(error)
        typer.echo(f"sglang-patches: {message}", err=True)
        raise typer.Exit(2) from None
