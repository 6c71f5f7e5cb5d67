"""A real server process for the end-to-end tests: started as a person would, watched, stopped, and inspected for
what it leaves behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
from benchmark.endurance.servers import mapped

from sglang_patches import lane, processes
from sglang_patches.bench.server import end_with_us

REPO = Path(__file__).resolve().parents[2]
# Cold byte-code caches and a busy machine together cost minutes; a hang should still be told from slowness.
READY_SECONDS = 400.0
STOP_SECONDS = 90.0
# Python's resource tracker removes files after the processes that it serves have ended.
SHM_SECONDS = 10.0


def _in_terminal() -> None:
    """Runs in the child, a session's leader: its standard input becomes the session's terminal."""
    end_with_us()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def present(tree: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that run or wait to be asked for their exit code, which a clean stop leaves none of."""
    return [process for process in tree if process.is_running()]


class Server:
    """One server process tree.

    ``command`` starts it; its temporary files go to a folder of its own (``tmp``), so that what it leaves there can be
    told from what others do. ``model_path`` and ``draft_path`` are what it serves. With ``terminal`` it has one of its
    own, in whose foreground it runs, and at which `type` types.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        model_path: Path,
        draft_path: Path | None,
        env: Mapping[str, str],
        terminal: bool = False,
    ) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.model_path = model_path
        self.draft_path = draft_path
        # Short: paths of UNIX sockets in it may have 107 bytes.
        self.tmp = Path(tempfile.mkdtemp(prefix="srv", dir="/tmp"))
        self.log_path = Path(tempfile.mkstemp(prefix=f"server-{port}-", suffix=".log")[1])
        # Inodes in /dev/shm that its processes have had in memory: other servers and tests make files there too, and
        # some of these are killed.
        self._mapped: set[int] = set()
        environ = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        self._keyboard = -1
        with self.log_path.open("wb") as log:
            screen = log.fileno()
            if terminal:
                self._keyboard, screen = os.openpty()
            self.process = subprocess.Popen(
                command,
                cwd=REPO,
                env={**environ, "TMPDIR": str(self.tmp), "PYTHONUNBUFFERED": "1", **env},
                stdin=screen if terminal else subprocess.DEVNULL,
                stdout=screen,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # A shell's background job, as which tests may run, ignores SIGINT, and so would the server it starts;
                # and a test run that is ended without ceremony, such as a worker of pytest-xdist, takes it along.
                preexec_fn=_in_terminal if terminal else end_with_us,
            )
        if terminal:
            os.close(screen)
            self._reader = threading.Thread(target=self._read_screen, daemon=True)
            self._reader.start()
        self.started = time.monotonic()
        self.ready_seconds = float("nan")

    def _read_screen(self) -> None:
        with self.log_path.open("ab", buffering=0) as log, contextlib.suppress(OSError):  # EIO: nobody has it any more
            while shown := os.read(self._keyboard, 65536):
                log.write(shown)

    def screen_is_read(self) -> None:
        """Return when all that its processes showed is in the log; they must have ended."""
        self._reader.join(10)
        assert not self._reader.is_alive()

    def type(self, keys: str) -> None:
        """Press these keys at its terminal; ``\\x03`` is Ctrl-C."""
        os.write(self._keyboard, keys.encode())

    def log(self) -> str:
        """All that the server printed so far."""
        return self.log_path.read_text(errors="replace")

    def log_tail(self, lines: int = 60) -> str:
        """The last ``lines`` lines of the log."""
        return "\n".join(self.log().splitlines()[-lines:])

    def wait_ready(self) -> Server:
        """Wait until the server has served its own warm-up request; RuntimeError with the log's end if it does not."""
        while time.monotonic() < self.started + READY_SECONDS:
            if self.process.poll() is not None:
                raise RuntimeError(f"server ended with {self.process.returncode} before ready:\n{self.log_tail()}")
            try:
                with urllib.request.urlopen(f"{self.url}{lane.here().ready_path}", timeout=5):
                    self.ready_seconds = time.monotonic() - self.started
                    self._look(self.tree())
                    return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        tail = self.log_tail()
        self.kill()
        raise RuntimeError(f"server not ready within {READY_SECONDS:.0f} s:\n{tail}")

    def tree(self) -> list[psutil.Process]:
        """The process that was started and all that descend from it, now."""
        return processes.tree(self.process.pid)

    def get(self, path: str) -> Any:
        """The JSON document at ``path``."""
        return httpx.get(self.url + path, timeout=60).raise_for_status().json()

    def metrics(self) -> str:
        """The Prometheus text."""
        return httpx.get(self.url + "/metrics", timeout=60, follow_redirects=True).raise_for_status().text

    def healthy(self) -> bool:
        """Whether the server generates a token when asked for its health."""
        return httpx.get(self.url + "/health_generate", timeout=60).status_code == 200

    def stop(self, how: signal.Signals = signal.SIGTERM) -> list[str]:
        """Send ``how`` to the started process, wait for the whole tree to end, and return what is left behind.

        The list names processes still alive, the port if taken, and files in /dev/shm or the temporary folder; it is
        empty after a clean stop. What remains alive is killed after being reported.
        """
        tree = self.tree()
        self._look(tree)
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.leftovers(tree)

    def _look(self, tree: Sequence[psutil.Process]) -> None:
        self._mapped |= mapped(process.pid for process in tree)

    def leftovers(self, tree: Sequence[psutil.Process]) -> list[str]:
        """Wait for the processes in ``tree`` to end and say what remains, see `stop`."""
        self._look(tree)
        deadline = time.monotonic() + STOP_SECONDS
        while (self.process.poll() is None or present(tree)) and time.monotonic() < deadline:
            time.sleep(0.1)
        left = [
            f"process {process.pid}: {process.as_dict(['cmdline'])['cmdline']}" for process in processes.alive(tree)
        ]
        self.kill(tree)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                left.append(f"port {self.port} still answers")
        left += [f"shared memory {path}" for path in self._left_in_shared_memory()]
        # Empty folders stay: torch makes one in each process and a killed process cannot remove it.
        left += [f"temporary file {path}" for path in sorted(self.tmp.rglob("*")) if not path.is_dir()]
        left += [
            f"process {process.pid} of this session" for process in processes.alive(processes.session(self.process.pid))
        ]
        return left

    def _left_in_shared_memory(self) -> list[str]:
        """Files that its processes have had in memory, and that stay: nobody is left to remove them."""
        deadline = time.monotonic() + SHM_SECONDS
        while True:
            left = sorted(entry.path for entry in os.scandir("/dev/shm") if entry.inode() in self._mapped)
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.2)

    def kill(self, tree: Sequence[psutil.Process] = ()) -> None:
        """End whatever of this server is still alive, without grace."""
        assert not processes.kill([*tree, *self.tree()])
        self.process.wait()


def serve_command(port: int, model: Path, draft: Path | None, arguments: Sequence[str] = (), tp: int = 1) -> list[str]:
    """The command that ``make serve`` runs, for this interpreter; ``tp`` ranks."""
    command = [sys.executable, "-m", "sglang_patches.serve", "--port", str(port), "--model", str(model)]
    return [*command, "--draft", str(draft or ""), "--tp", str(tp), "--", *arguments]
