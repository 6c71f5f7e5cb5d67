"""Patch ``clean-stop``: a server that ends, also one that is told to while it starts, leaves none of its files behind.

Upstream 0.5.23 never removes the shared-memory file of its load snapshots (``managers/load_snapshot.py``) and the
UNIX sockets between its processes (``PortArgs.init_new``). Where it kills its children (``kill_process_tree``: on
SIGINT, and whenever one of them fails), it kills Python's resource tracker too, whose job is to remove the semaphores
of processes that die so. Where the launching process then kills itself as well (when a child has failed, and on 0.5.17
at the end of every SIGTERM), nothing is done that Python does at exit, such as to remove the Prometheus files. And a
SIGTERM before the first request kills the launching process where it stands. Where a child has died, it holds the rest
of the server for a minute in which it answers nothing. Which child it was, it often does not say: where a rank is
killed, the others lose their connection and report that first. And a running server looks for a SIGTERM every five
seconds only. What becomes of Ctrl-C is in `interrupt`.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import signal
import threading
from collections.abc import Sequence
from multiprocessing import resource_tracker
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from sglang_patches.runtime.clean_stop import interrupt

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.server_args import PortArgs

logger = logging.getLogger("sglang_patches")

_IPC = "ipc://"
_SHARED_MEMORY = "/dev/shm"
# Between SIGKILL and the end of a process that writes files.
_CHILDREN_END_SECONDS = 2.0
# Process that launched the server -> its files; emptied as they are removed.
_owned: dict[int, list[str]] = {}
# What `before_kill` was given: their end is this process's doing.
_killed: set[psutil.Process] = set()
# What a person or a supervisor ends a process with.
_ORDERLY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds between looks for a SIGTERM: nothing against what ending takes, and few enough to cost nothing.
_LOOK = 0.2


def files_of(port_args: PortArgs) -> list[str]:
    """Paths of the files by which the processes of one server meet; they need not exist."""
    from sglang.srt.managers.load_snapshot import shm_path_for

    values = [getattr(port_args, field.name) for field in dataclasses.fields(port_args)]
    sockets = [value.removeprefix(_IPC) for value in values if isinstance(value, str) and value.startswith(_IPC)]
    return [*sockets, shm_path_for(port_args.instance_id)]


def remove_at_exit(port_args: PortArgs) -> None:
    """Remove this server's files when this process, which launches the others and outlives them, ends.

    After a SIGKILL from outside, the resource tracker still removes what is in shared memory; the sockets stay.
    """
    files = files_of(port_args)
    for name in _shared_memory_names(files):
        resource_tracker.register(name, "shared_memory")
    _owned.setdefault(os.getpid(), []).extend(files)
    atexit.register(_remove)


def before_own_kill(killed: Sequence[psutil.Process]) -> None:
    """What would be removed at exit, removed now: upstream is about to send SIGKILL to this process, its own.

    Args:
        killed: the children that have been sent one already.
    """
    if os.getpid() not in _owned:
        return
    _clean(killed)
    interrupt.before_own_kill()


def _clean(killed: Sequence[psutil.Process]) -> None:
    # Whatever goes wrong: a launching process that outlives its children would hold the port and serve nothing.
    with contextlib.suppress(Exception):
        psutil.wait_procs(killed, timeout=_CHILDREN_END_SECONDS)
        _remove()
    with contextlib.suppress(Exception):
        from sglang.srt.utils import common

        # Upstream's own folder, made where metrics are on.
        if folder := getattr(common, "prometheus_multiproc_dir", None):
            folder.cleanup()


def _shared_memory_names(files: Sequence[str]) -> list[str]:
    return [file.removeprefix(_SHARED_MEMORY) for file in files if file.startswith(_SHARED_MEMORY + "/")]


def _remove() -> None:
    files = _owned.pop(os.getpid(), [])  # a fork, which inherits exit handlers, has none
    for file in files:
        with contextlib.suppress(OSError):
            os.unlink(file)
    for name in _shared_memory_names(files):
        resource_tracker.unregister(name, "shared_memory")


def before_kill(children: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those of `children`, which upstream is about to kill, that are to be killed; the log names the dead among them.

    Python's resource tracker is none: it cleans up and ends by itself once the others have ended.
    """
    interrupt.before_kill()
    for child in children:
        # Upstream comes here more than once, and leaves those that it killed as zombies.
        if child not in _killed and (how := _ended_by(child)) and how not in _ORDERLY:
            logger.error(_DEAD, child.pid, _name(child), how.name if isinstance(how, signal.Signals) else how)
    _killed.update(children)
    return [child for child in children if not _is_resource_tracker(child)]


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return "gone"


_DEAD = (
    "sglang-patches: clean-stop: process %d (%s) of this server was ended by %s, and the server ends with it. "
    "If nobody sent that: SIGKILL is what the kernel sends where memory is short (`dmesg` has it), any other signal "
    "comes from a crash of native code, whose last lines are above."
)


def _ended_by(child: psutil.Process) -> int | None:
    """The signal that ended `child`; None while it runs, after an exit, and where its end is not ours to know."""
    try:
        # Leaves the exit code where it is, for whoever waits for this child.
        result = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:  # a grandchild, or waited for already: then upstream's watchdog has named it
        return None
    if result is None or result.si_code == os.CLD_EXITED:
        return None
    with contextlib.suppress(ValueError):  # real-time signals have numbers only
        return signal.Signals(result.si_status)
    return int(result.si_status)


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:  # gone, or a zombie
        return False


def can_dump_core() -> bool:
    """Whether CUDA was told to dump core when asked, which it must be before it starts.

    Upstream asks for dumps when a child fails, and waits a minute for them, blocked, whether they can come or not.
    """
    return os.environ.get("CUDA_ENABLE_USER_TRIGGERED_COREDUMP") == "1"


def exit_on_sigterm() -> None:
    """Until the running server takes SIGTERM over, let it unwind the launching process, which ends its children.

    Does nothing where the application has a handler of its own, or outside the main thread, where none can be set.
    """
    interrupt.before_children(_kill_and_clean)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)


def _kill_and_clean() -> None:
    """End the children without grace, and leave nothing behind."""
    with contextlib.suppress(Exception):
        killed = before_kill(psutil.Process().children(recursive=True))
        for child in killed:
            with contextlib.suppress(psutil.Error):
                child.kill()
        _clean(killed)


def _exit(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


async def told_to_end(manager: TokenizerManager) -> None:
    """Return soon after the server was sent SIGTERM; upstream's own loop, which comes next, sleeps five seconds."""
    import asyncio  # long to import, and every process of a server begins with this module

    interrupt.serves(manager)
    while not manager.gracefully_exit:
        await asyncio.sleep(_LOOK)
