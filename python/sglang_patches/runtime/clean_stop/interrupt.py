"""Ctrl-C in the process that launches a server: the first ends it in order, the second at once.

A terminal sends SIGINT to every process of its foreground group. Upstream's workers then die of it in the midst of what
they do, with a traceback each, and so does the launching process after the HTTP server has ended. Here the launching
process alone hears it: it says that it stops, ends its children, says that it has stopped, and exits with status 0, for
Ctrl-C is how a person ends a server, and no failure (make and systemd take any other status, also 130, for one).

Only in a process whose command is a server's, and only where SIGINT would raise KeyboardInterrupt: a program that uses
the engine has its own use for that, and a background job that ignores SIGINT goes on doing so.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from types import FrameType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from sglang_patches import processes

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

P = ParamSpec("P")
R = TypeVar("R")
_NO_WARNING = "ignore:resource_tracker"


class _State:
    """Of this process.

    Attributes:
        asked: when Ctrl-C was pressed, by `time.monotonic`.
        end: kills the children and leaves nothing behind; None while there can be none.
        manager: of the requests, once there was one.
    """

    asked: float | None = None
    end: Callable[[], None] | None = None
    manager: TokenizerManager | None = None


def listen() -> None:
    """From upstream's first line on, which is many seconds of imports before there is a server."""
    # A worker that was forked has its parent's arguments, and its handlers, which it must not use.
    if (
        processes.is_server_command(sys.orig_argv)
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _interrupted)
        _start_tracker()
        atexit.register(_say_stopped, os.getpid())  # first in, so last out


def _start_tracker() -> None:
    """Start Python's resource tracker, which removes semaphores once all others have ended, such that it can.

    Where this process is the terminal's first, as by ``ssh -t HOST sglang-patches launch ...``, the system sends SIGHUP
    to the whole foreground as soon as it has ended. And the tracker would warn of every semaphore of a child that was
    killed, on a terminal that is the shell's again.
    """
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.warnoptions.append(_NO_WARNING)  # the tracker's command line has them
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(_NO_WARNING)
        signal.signal(signal.SIGHUP, before)


def listens() -> bool:
    """Whether this process ends in order on SIGINT."""
    return signal.getsignal(signal.SIGINT) is _interrupted


def before_children(end: Callable[[], None]) -> None:
    """From here on the server is more than this process; `end` as in `_State`."""
    if not listens():
        return
    _State.end = end
    import uvicorn

    uvicorn.Server.handle_exit = _in_order(uvicorn.Server.handle_exit)  # type: ignore[assignment, method-assign]


def serves(manager: TokenizerManager) -> None:
    """The first request, which is upstream's own to warm up, has come."""
    _State.manager = manager


def deaf(launch: Callable[P, R]) -> Callable[P, R]:
    """Around a function that starts processes: they and what they start ignore SIGINT, where this process handles it.

    What is pressed meanwhile is heard afterwards, or, where this process has other threads, may be lost: that lasts as
    long as the processes take to start, and it may be pressed again.
    """

    @functools.wraps(launch)
    def launched(*args: P.args, **kwargs: P.kwargs) -> R:
        if threading.current_thread() is not threading.main_thread() or not listens():
            return launch(*args, **kwargs)
        # As the first child does; starting it would end the blocking.
        resource_tracker.ensure_running()
        # Ignored signals are inherited and not kept; blocked ones are kept, whether ignored or not.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            return launch(*args, **kwargs)
        finally:
            signal.signal(signal.SIGINT, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    return launched


def before_kill() -> None:
    """Children are about to be killed: where Ctrl-C was pressed, nobody shall take that for a crash and tell of it."""
    if _State.asked is None:
        return
    logging.disable(logging.CRITICAL)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # what upstream's watchdog sends this process then


def before_own_kill() -> None:
    """Upstream kills this process, its own, next: where Ctrl-C was pressed, it has ended in order and exits."""
    if _State.asked is not None:
        _say_stopped(os.getpid())
        os._exit(0)


def _interrupted(signum: int, frame: FrameType | None) -> None:
    _ask()
    if _State.end is None and not multiprocessing.active_children():
        # Nothing is there to be ended; and an exception would come up in the midst of an import, some of which hide it.
        # Other servers of upstream's (diffusion, an encoder alone) have children without `before_children`.
        _say_stopped(os.getpid())
        os._exit(0)
    raise SystemExit(0)  # upstream ends its children on the way out


def _in_order(upstream: Callable[[Any, int, FrameType | None], None]) -> Callable[[Any, int, FrameType | None], None]:
    """uvicorn's handler of signals, which would raise SIGINT once more when it has ended, and let it be a traceback."""

    @functools.wraps(upstream)
    def handle_exit(server: Any, signum: int, frame: FrameType | None) -> None:
        if signum != signal.SIGINT:
            upstream(server, signum, frame)
            return
        if _State.manager is None or _State.manager.server_status.name == "Starting":
            # Nobody's request runs, and upstream would wait two minutes for its own to get through.
            _ask()
            if _State.end:
                _State.end()
            before_own_kill()
        _ask(" when the requests that run have ended")
        server.should_exit = True

    return handle_exit


def _ask(rest: str = "") -> None:
    """Take Ctrl-C down and say so, with `rest` of what then happens; does not return where it is the second."""
    if _State.asked is not None:
        _end_at_once()
    _State.asked = time.monotonic()
    logging.disable(logging.INFO)
    again = "; again: at once" if _State.end else ""
    _say(f"{_new_line()}sglang-patches: Ctrl-C: stopping{rest}{again}\n")


def _end_at_once() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    before_kill()
    _say(f"{_new_line()}sglang-patches: Ctrl-C again: killing what is left\n")
    if _State.end:
        _State.end()
    # By the signal: whoever started this then knows that it was cut short.
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(128 + signal.SIGINT)  # the first process of a container does not die of its own signal


def _say_stopped(owner: int) -> None:
    if _State.asked is not None and os.getpid() == owner:
        _say(f"sglang-patches: stopped after {time.monotonic() - _State.asked:.1f} s\n")


def _new_line() -> str:
    return "\n" if os.isatty(2) else ""  # a terminal has written ^C into this one


def _say(text: str) -> None:
    # Not by print: what the signal interrupts may be printing.
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
