"""A server of the bundled pair on this machine's CPU, its process tree watched, and result files written whole."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import psutil

from sglang_patches import processes
from sglang_patches.bench.server import end_with_us, free_port, shown, tail
from sglang_patches.document import server as documents
from sglang_patches.document.unnamed import unnamed
from sglang_patches.errors import PatchError

REPO = Path(__file__).parents[2]
MODEL, DRAFT = REPO / "test/models/tiny-kimi", REPO / "test/models/tiny-kimi-eagle3"
READY_S, STOP_S = 600.0, 60.0


class Tiny(AbstractContextManager["Tiny"]):
    """One server, started on entering and ready then (unless `wait` is false), ended with all its children on leaving.

    Its temporary files go to a folder of its own, `tmp`, so that what stays there can be told.
    """

    def __init__(
        self,
        log: Path,
        speculative: bool = True,
        *,
        arguments: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        port: int | None = None,
        wait: bool = True,
    ) -> None:
        self.log, self.port, self.wait = log, port or free_port(), wait
        self.url = f"http://127.0.0.1:{self.port}"
        self.model = MODEL.name
        self.tmp = Path(tempfile.mkdtemp(prefix="endure", dir="/tmp"))  # short: paths of sockets have 107 bytes
        self.command = [sys.executable, "-m", "sglang_patches.serve", "--port", str(self.port), "--model", str(MODEL),
                        "--draft", str(DRAFT) if speculative else "", "--", *arguments]  # fmt: skip
        self.environ = {**os.environ, "TMPDIR": str(self.tmp), "PYTHONUNBUFFERED": "1", **(environ or {})}
        self.ready_s = float("nan")
        self.seen: dict[int, psutil.Process] = {}
        self.parts: dict[int, str] = {}
        self.mapped: set[int] = set()
        self.left: list[str] = []

    def __enter__(self) -> Tiny:
        self.shm = set(os.listdir("/dev/shm"))
        with self.log.open("wb") as out:  # what an earlier server wrote there must not be read as this one's
            self.process = subprocess.Popen(
                self.command, cwd=REPO, env=self.environ, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=end_with_us,
            )  # fmt: skip
        self.started = time.monotonic()
        try:
            if self.wait:
                self.wait_ready()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *failure: Any) -> None:
        self.end()

    def wait_ready(self, seconds: float = READY_S) -> None:
        """Return when it has served its own warm-up request.

        Raises:
            PatchError: it ended, or is not ready in time; with the telling lines of its log.
        """
        while time.monotonic() < self.started + seconds:
            if self.process.poll() is not None:
                raise PatchError(f"the server ended with {self.process.returncode} before ready\n{shown(self.log)}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/ready", timeout=5).status_code == 200:
                    self.ready_s = time.monotonic() - self.started
                    self.mapped |= mapped(process.pid for process in self.tree())
                    self.parts = {process.pid: title for process in self.tree() if (title := _title(process))}
                    return
            time.sleep(0.5)
        raise PatchError(f"the server is not ready after {seconds:.0f} s\n{shown(self.log)}")

    def tree(self) -> list[psutil.Process]:
        """The server and all that descend from it now; all ever seen are in `seen`."""
        found = processes.tree(self.process.pid)
        self.seen |= {process.pid: process for process in found}
        return found

    def named(self, title: str) -> psutil.Process:
        """Its process of this title, such as ``sglang::scheduler``. Raises PatchError if there is none."""
        self.mapped |= mapped(process.pid for process in self.tree())  # what is named may be killed next
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                if any(title in word for word in process.cmdline()):
                    return process
        raise PatchError(f"the server has no process {title}")

    def log_text(self) -> str:
        """The end of its log."""
        return tail(self.log, 1 << 20)

    def get(self, path: str) -> Any:
        """The JSON document at `path`. Raises httpx.HTTPError where there is none."""
        return httpx.get(self.url + path, timeout=120).raise_for_status().json()

    def ask(self, prompt: str, tokens: int = 24, timeout: float = 120) -> str:
        """A greedy completion. Raises httpx.HTTPError."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=timeout)
        return str(response.raise_for_status().json()["choices"][0]["text"])

    def troubles(self) -> list[str]:
        """What is wrong with its processes: ended ones, zombies."""
        found = [] if self.process.poll() is None else [f"the server ended with {self.process.returncode}"]
        tree = self.tree()
        gone = self.parts.keys() - {process.pid for process in tree}
        found += [f"process {pid} ({self.parts[pid]}) is gone" for pid in sorted(gone)]
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() == psutil.STATUS_ZOMBIE:
                    found.append(f"process {process.pid} ({process.name()}) is a zombie")
        return found

    def end(self, how: signal.Signals = signal.SIGTERM) -> list[str]:
        """Ask it to end, wait, kill what is left; what it left behind, also in `left`. Can be called twice."""
        self.mapped |= mapped(process.pid for process in self.tree())
        if self.process.poll() is None:
            self.process.send_signal(how)
        self.left = self.left or self.leftovers(STOP_S)
        processes.kill([*self.seen.values(), *processes.session(self.process.pid)])
        self.process.wait()
        shutil.rmtree(self.tmp, ignore_errors=True)
        return self.left

    def leftovers(self, seconds: float) -> list[str]:
        """Wait up to `seconds` for all its processes to end; what remains of them and of its files."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and (self.process.poll() is None or processes.alive(self.seen.values())):
            time.sleep(0.1)
        time.sleep(0.2)
        left = [f"process {process.pid} {_name(process)}" for process in processes.alive(self.seen.values())]
        # Other servers of this machine make files there, too, and some are killed.
        new = [entry for entry in os.scandir("/dev/shm") if entry.name not in self.shm]
        left += sorted(entry.path for entry in new if entry.inode() in self.mapped)
        return left + [f"{path}" for path in sorted(self.tmp.rglob("*")) if not path.is_dir()]


def mapped(pids: Iterable[int]) -> set[int]:
    """Inodes of the files in /dev/shm that these processes have in memory.

    By inode: a semaphore is mapped under the name that it was made with, and then gets another.
    """
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            lines = map(str.split, Path(f"/proc/{pid}/maps").read_text().splitlines())
            found |= {int(line[4]) for line in lines if len(line) > 5 and line[5].startswith("/dev/shm/")}
    return found


def _title(process: psutil.Process) -> str:
    """The title of a part of the server; empty for helpers, which may come and go."""
    name = _name(process)
    return name.strip() if name.startswith("sglang::") else ""


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())[:80]
    return "?"


def provenance_of(url: str) -> dict[str, Any]:
    """The server's provenance document and the machine's load, for a result file."""
    document = unnamed(documents.ask(url, with_time=True).model_dump())
    for process in document["processes"]:
        process["libraries"] = []  # hundreds, and the same as of every server of this environment
    return {"document": document, "load_average": os.getloadavg(), "cpus": os.cpu_count()}


def write(file: Path, data: Any) -> None:
    """JSON, whole or not at all."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(data) + "\n", encoding="utf-8")
    new.replace(file)
