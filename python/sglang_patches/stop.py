"""Ends one SGLang server: the one that listens on a port."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from sglang_patches import ports, processes
from sglang_patches.errors import PatchError


def stop_server(port: int, timeout: float, echo: Callable[[str], None] = print) -> None:
    """End the server on `port` and its descendants: SIGTERM, up to `timeout` seconds, then SIGKILL for what is left.

    Only processes found by walking from the listener are touched, each by its pid and start time.

    Raises:
        PatchError: nothing listens there, the listener is not SGLang or not ours to see, or a process outlives SIGKILL.
    """
    server = find_server(port)
    ours = [server, *_children(server)]
    echo(f"port {port}: ending pid {server.pid} ({processes.shown(server)}) and {len(ours) - 1} child processes")
    try:
        server.terminate()
    except psutil.AccessDenied:
        raise PatchError(
            f"port {port}: pid {server.pid} belongs to {server.username()}\n  remedy     run this as that user"
        ) from None
    started = last = time.monotonic()
    while (alive := processes.alive(ours)) and time.monotonic() - started < timeout:
        time.sleep(0.1)
        if server.is_running():
            # Children started meanwhile; a child whose parent has ended can no longer be found this way.
            ours += [child for child in _children(server) if child not in ours]
        if time.monotonic() - last >= 5:
            last = time.monotonic()
            echo(f"  {last - started:.0f} s: waiting for {', '.join(str(process.pid) for process in alive)}")
    if alive:
        echo(f"  after {timeout:g} s: killing {', '.join(f'{p.pid} ({processes.shown(p)})' for p in alive)}")
        if left := processes.kill(alive):
            raise PatchError(f"port {port}: {processes.stuck(left)}")
    echo(f"port {port}: ended after {time.monotonic() - started:.1f} s")


def find_server(port: int) -> psutil.Process:
    """The top process of the SGLang server that listens on `port`.

    Raises:
        PatchError: nothing listens there, or the listener is not an SGLang server.
    """
    listeners = ports.listeners(port)
    if not listeners:
        raise PatchError(f"port {port}: nothing listens there\n  remedy     check the port; nothing was ended")
    pids = sorted({entry.pid for entry in listeners if entry.pid})
    if not pids:
        raise PatchError(
            f"port {port}: the listener belongs to another user\n  remedy     run this as that user; nothing was ended"
        )
    listening = [psutil.Process(pid) for pid in pids]
    foreign = [process for process in listening if not processes.is_server(process)]
    if foreign:
        raise PatchError(
            f"port {port}: pid {foreign[0].pid} listens there and is not an SGLang server\n"
            f"  seen       {processes.shown(foreign[0])}\n"
            f"  expected   python -m sglang.launch_server, or sglang serve\n"
            f"  remedy     check the port; nothing was ended"
        )
    # Several HTTP workers may share the port: the server is their common SGLang ancestor.
    server = listening[0]
    while (parent := server.parent()) is not None and processes.is_server(parent):
        server = parent
    return server


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
