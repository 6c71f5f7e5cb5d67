"""What this distribution raises when it refuses to go on."""

from __future__ import annotations


class PatchError(Exception):
    """A patch, a selection or an installation that cannot be used.

    The message names the thing, the value seen, the value expected and what to do, and is complete without a
    traceback.
    """


class ProcessStop(SystemExit):
    """Ends a process that would otherwise run code other than the selected one.

    A `SystemExit`, because upstream imports many modules under `except Exception` and goes on without them.
    """
