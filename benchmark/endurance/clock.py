"""A wall clock that jumps while processes run: `clock.c`, compiled here and put before their C library.

Not libfaketime: Debian 12's (0.9.10) that is told to leave the monotonic clock alone makes every `time.sleep` of
Python 3.11 fail (its issue 426), so that a server never gets ready.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")
_COMPILERS = ("cc", "gcc", "clang")


class Clock:
    """The wall clock of processes that are started with `environ`; right until it is `set`.

    Args:
        folder: for the library and the file with the offset; must stay while they run.

    Raises:
        FileNotFoundError: no C compiler is here.
        OSError: the compiler fails.
    """

    def __init__(self, folder: Path) -> None:
        compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
        if compiler is None:
            raise FileNotFoundError(f"no C compiler is here (looked for {', '.join(_COMPILERS)}): apt-get install gcc")
        library = folder.resolve() / "clock.so"
        command = [compiler, "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{SOURCE.name} does not compile: {done.stderr.strip()[-500:]}")
        self._file = folder.resolve() / "clock-offset"
        self.set(0)
        self.environ = {"LD_PRELOAD": str(library), "CLOCK_OFFSET_FILE": str(self._file)}

    def set(self, seconds: int) -> None:
        """Let it be off by so many seconds, from now on, in processes that run, too."""
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)  # in place: it is mapped
        try:
            os.pwrite(descriptor, struct.pack("=q", seconds), 0)
        finally:
            os.close(descriptor)
