"""Processes that somebody started: found, looked at, and ended so that they are gone when the call returns."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence

import psutil

from sglang_patches.document import secrets


def tree(pid: int) -> list[psutil.Process]:
    """The process and all that descend from it now; empty if it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def session(leader: int) -> list[psutil.Process]:
    """Processes of the session that `leader` began, which includes those that are no longer its descendants."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getsid(process.pid) == leader:
                found.append(process)
    return found


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; a zombie, which only waits to be asked for its exit code, has ended."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill(processes: Sequence[psutil.Process], seconds: float = 10.0) -> list[psutil.Process]:
    """SIGKILL, and wait until they are gone: the signal is sent at once, but memory is given back some time later.

    Children of this process are left to whoever started them to be asked for their exit code.

    Returns:
        Those that are still there after `seconds`: a process that waits inside a driver can take for ever.
    """
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + seconds
    while (left := alive(processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def stuck(processes: Sequence[psutil.Process]) -> str:
    """What to tell of those that `kill` could not end."""
    pids = ", ".join(str(process.pid) for process in processes)
    return (
        f"still alive after SIGKILL: {pids}\n"
        f"  remedy     they wait for a device or a disk; see for what: ps -o pid,stat,wchan -p PID"
    )


def is_server(process: psutil.Process) -> bool:
    """Whether a process is an SGLang server or one of its workers, which name themselves `sglang::...`."""
    try:
        return is_server_command(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def is_server_command(command: Sequence[str]) -> bool:
    """Whether the words of a command line are those of a server, or the title of one of its workers."""
    title = command[0] if command else ""
    words = [word.rpartition("/")[2] for word in command]
    launched = any(words[at : at + 2] == ["-m", "sglang.launch_server"] for at in range(len(words)))
    served = any(words[at : at + 2] == ["sglang", "serve"] for at in range(min(len(words), 3)))
    return title.startswith("sglang::") or launched or served


def shown(process: psutil.Process) -> str:
    """Its command line for a message, cut to 100 characters and without secrets."""
    try:
        command = " ".join(secrets.command(process.cmdline())) or process.name()
    except psutil.Error:
        return "gone"
    return command if len(command) <= 100 else command[:97] + "..."
