"""What this distribution raises when it refuses to go on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class PatchError(Exception):
    """A patch, a selection or an installation that cannot be used.

    The message names the thing, the value seen, the value expected and what to do, and is complete without a
    traceback.
    """


class ProcessStop(SystemExit):
    """Ends a process that would otherwise run code other than the selected one.

    A `SystemExit`, because upstream imports many modules under `except Exception` and goes on without them.
    """


def of_system(error: OSError) -> str:
    """An operating system's error as a message: the file if it is about one, and then what to do."""
    if error.filename is None:
        return str(error)
    return (
        f"{error.filename}: {error.strerror}\n"
        f"  remedy     name a place that exists and can be written (free space, permissions)"
    )


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
