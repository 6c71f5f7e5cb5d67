"""Faults that befall a server, one function each: it does the harm, and raises `Unexpected` where the server does not
take it as its entry in `SCENARIOS` says.

A scenario finds a server that serves. Those that end it leave its restart to the next one, on the same port, with the
same cache folder and command, as a supervisor would: `Stage.server` starts it, and checks that it answers rightly.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmark.endurance.clock import Clock
from benchmark.endurance.servers import Tiny, provenance_of
from sglang_patches.bench.server import free_port

PROMPTS = ("It was a dark and stormy night; the rain", "The captain looked at the", "Of these causes and", "The sea")
LONG = 96
#: Seconds within which a server that lost a process must be gone, all of it.
GONE_S = 60.0
STOPPED_S = 10.0
#: What the clock is off by, one after another.
JUMPS_S = (3600, -3600, 86400, -86400)
_OUR_SECONDS = re.compile(r"^(sglang_patches_\w*seconds(?:_sum|_total)?(?:\{.*\})? (\S+))$", re.MULTILINE)


class Unexpected(Exception):
    """The server did not take it as it must."""


class NotRun(Exception):
    """This machine lacks what the scenario needs."""


@dataclass
class Stage:
    """The server that the scenarios harm, and what it must answer.

    `folder` gets the logs; `cache` is the cache folder of patched modules, `port` stays through all restarts.
    """

    folder: Path
    cache: Path
    say: Callable[[str], None]
    port: int = field(default_factory=free_port)
    right: list[str] = field(default_factory=list)
    running: Tiny | None = None
    starts: int = 0
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def server(self) -> Tiny:
        """The server that serves now, started (or started again) where none does. Raises PatchError, Unexpected."""
        if self.running is None:
            self.start()
        assert self.running is not None
        return self.running

    def start(self, fills: bool = True, **options: Any) -> Tiny:
        """Start a server on this stage's port and check it, and that it `fills` the cache folder."""
        assert self.running is None
        self.starts += 1
        self.say(f"start {self.starts} of the server")
        environ = {"SGLANG_PATCHES_CACHE": str(self.cache), **options.pop("environ", {})}
        log = options.pop("log", self.folder / f"server-{self.starts}.log")
        server = Tiny(log, port=self.port, environ=environ, **options)
        self.running = server.__enter__()
        self.provenance = self.provenance or provenance_of(server.url)
        self.check()
        half = half_written(self.cache)
        if half:
            raise Unexpected(f"half-written in the cache after a start: {half[:3]}")
        if fills and not any(self.cache.rglob("*.py")):
            raise Unexpected(f"{self.cache} has no patched module after a start")
        return server

    def stop(self) -> None:
        """End the server, however it is; another start has another."""
        if self.running is not None:
            self.running.end()
            self.running = None

    def check(self) -> None:
        """Raise Unexpected if the server does not answer as the first one did."""
        server = self.running
        assert server is not None
        answers = [server.ask(prompt, LONG, timeout=300) for prompt in PROMPTS]
        self.right = self.right or answers
        if answers != self.right:
            raise Unexpected(f"answers {answers}, wanted {self.right}")

    def under_way(self) -> tuple[ThreadPoolExecutor, list[Any]]:
        """Requests that run now, in threads; returns once the scheduler has them. Raises Unexpected if it gets none."""
        pool = ThreadPoolExecutor(len(PROMPTS))
        asked = [pool.submit(self.server.ask, prompt, LONG, 300) for prompt in PROMPTS]
        deadline = time.monotonic() + 60
        while not self.server.get("/v1/loads")["loads"][0]["num_running_reqs"]:
            if time.monotonic() > deadline:
                pool.shutdown()
                raise Unexpected("no request was seen to run: nothing would be shown")
            time.sleep(0.02)
        return pool, asked


def half_written(cache: Path) -> list[str]:
    """Files of a cache folder that are temporary or no Python."""
    found = []
    for path in cache.rglob("*"):
        if path.is_symlink() or not path.is_file() or path.suffix == ".pyc":
            continue
        if path.name.endswith(".tmp"):
            found.append(f"{path}: a temporary file")
        elif path.suffix == ".py":
            try:
                compile(path.read_bytes(), str(path), "exec")
            except (SyntaxError, ValueError) as error:
                found.append(f"{path}: {error}")
    return found


def _gone(stage: Stage, pool: ThreadPoolExecutor, asked: list[Any], reason: str) -> dict[str, Any]:
    """After a process was killed: wait for the end of all, and check what the log and the clients were told."""
    server, begun = stage.server, time.monotonic()
    stage.running = None
    left = [entry for entry in server.leftovers(GONE_S) if entry.startswith(("process", "/dev/shm"))]
    seconds = round(time.monotonic() - begun, 1)
    outcomes = []
    for one in asked:
        error = one.exception(timeout=30)
        outcomes.append(type(error).__name__ if error else "answered")
    pool.shutdown()
    text = server.log_text()
    sockets = sum(path.is_socket() for path in server.tmp.rglob("*"))
    server.end()
    if server.process.returncode == 0 or left:
        raise Unexpected(f"after {seconds} s: status {server.process.returncode}, left: {left}")
    named = [line for line in text.splitlines() if reason in line]
    if not named:
        raise Unexpected(f"the log does not name {reason!r}: {text[-600:]}")
    if set(outcomes) == {"answered"}:
        raise Unexpected("no request was under way when the process was killed: nothing was shown")
    if half := half_written(stage.cache):
        raise Unexpected(f"half-written in the cache: {half[:3]}")
    return {"seconds_until_gone": seconds, "status": server.process.returncode, "log": named[0][:200],
            "requests": outcomes, "sockets_left": sockets}  # fmt: skip


def scheduler_killed(stage: Stage) -> dict[str, Any]:
    """kill -9 of the scheduler while requests run."""
    victim = stage.server.named("sglang::scheduler")
    pool, asked = stage.under_way()
    victim.kill()
    return _gone(stage, pool, asked, "Subprocess scheduler")


def detokenizer_killed(stage: Stage) -> dict[str, Any]:
    """kill -9 of the detokenizer while requests run."""
    victim = stage.server.named("sglang::detokenizer")
    pool, asked = stage.under_way()
    victim.kill()
    return _gone(stage, pool, asked, "Subprocess detokenizer")


def scheduler_stopped(stage: Stage) -> dict[str, Any]:
    """SIGSTOP of the scheduler while requests run, SIGCONT 10 s later."""
    victim = stage.server.named("sglang::scheduler")
    pool, asked = stage.under_way()
    victim.suspend()
    time.sleep(STOPPED_S)
    waiting = sum(not one.done() for one in asked)
    victim.resume()
    answers = [one.result(timeout=300) for one in asked]
    pool.shutdown()
    if answers != stage.right:
        raise Unexpected(f"answers {answers}, wanted {stage.right}")
    if not waiting:
        raise Unexpected("no request was under way when the scheduler stopped: nothing was shown")
    stage.check()
    return {"requests_that_waited": waiting}


def cache_deleted(stage: Stage) -> dict[str, Any]:
    """The folder with the patched modules is deleted while the server runs."""
    _ = stage.server
    files = sum(path.is_file() for path in stage.cache.rglob("*"))
    if not files:
        raise Unexpected(f"{stage.cache} held no file: the server does not use it")
    shutil.rmtree(stage.cache)
    stage.check()
    info = stage.server.get("/server_info")["sglang_patches"]
    image = [{"type": "text", "text": "x"}]
    body = {"model": stage.server.model, "messages": [{"role": "user", "content": image}], "max_tokens": 2}
    httpx.post(f"{stage.server.url}/v1/chat/completions", json=body, timeout=120).raise_for_status()
    return {"files_deleted": files, "patch_set": info["patch_set_id"]}


def port_in_use(stage: Stage) -> dict[str, Any]:
    """Another server is started on the port of one that serves."""
    _ = stage.server
    log = stage.folder / "port-in-use.log"
    second = Tiny(log, port=stage.port, environ={"SGLANG_PATCHES_CACHE": str(stage.cache)}, wait=False)
    with second:
        deadline = time.monotonic() + 600
        while second.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
            second.tree()
        seconds, status = round(time.monotonic() - second.started, 1), second.process.poll()
        left = [entry for entry in second.leftovers(GONE_S) if entry.startswith(("process", "/dev/shm"))]
        text = second.log_text()
    if status in (None, 0) or left:
        raise Unexpected(f"the second one: status {status} after {seconds} s, left {left}")
    named = [line for line in text.splitlines() if "in use" in line.lower() and str(stage.port) in line]
    if not named:
        raise Unexpected(f"its log does not say that port {stage.port} is in use: {text[-600:]}")
    stage.check()
    return {"seconds_until_gone": seconds, "status": status, "log": named[0][:200]}


@contextlib.contextmanager
def small_disk(size: str) -> Iterator[Path]:
    """A file system of its own, of so many bytes (``64k``). Raises NotRun where none can be mounted."""
    place = Path(tempfile.mkdtemp(prefix="disk", dir="/tmp"))
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "endurance", str(place)], capture_output=True, text=True
    )
    if done.returncode:
        place.rmdir()
        raise NotRun(f"a file system of {size} cannot be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
        place.rmdir()


def fill(place: Path) -> int:
    """Write until nothing more fits; bytes."""
    with (place / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 4096)
    return (place / "filler").stat().st_size


def disk_full(stage: Stage) -> dict[str, Any]:
    """A server starts with its cache folder on a full disk, and then the disk of its log is full, too."""
    stage.stop()
    with small_disk("64k") as cache, small_disk("8m") as logs:
        fill(cache)
        log = logs / "server.log"
        usual, stage.cache = stage.cache, cache / "cache"
        try:
            server = stage.start(fills=False, log=log)
            text = log.read_text(errors="replace")
            said = [line for line in text.splitlines() if "cannot use the cache folder" in line]
            if not said:
                raise Unexpected("the log does not say that the cache folder cannot be used")
            filled = fill(logs)
            for _ in range(3):
                stage.check()
            full = log.stat().st_size
            if troubles := server.troubles():
                raise Unexpected(f"with a full disk: {troubles}")
            shutil.copy(log, stage.folder / "disk-full.log")
        finally:
            stage.cache = usual
            stage.stop()
    return {"log": said[0][:200], "bytes_left_to_the_log": filled, "log_bytes": full}


def clock_jump(stage: Stage) -> dict[str, Any]:
    """The clock jumps ahead and back, by an hour and by a day, while requests run (`clock`: only that of the day)."""
    stage.stop()
    try:
        clock = Clock(stage.cache.parent)
    except FileNotFoundError as error:
        raise NotRun(str(error)) from None
    begun = time.monotonic()
    server = stage.start(environ=clock.environ)
    seen = []
    for jump in JUMPS_S:
        pool, asked = stage.under_way()
        clock.set(jump)
        if all(one.done() for one in asked):
            raise Unexpected(f"clock {jump:+} s: no request was under way: nothing was shown")
        answers = [one.result(timeout=300) for one in asked]
        pool.shutdown()
        if answers != stage.right:
            raise Unexpected(f"clock {jump:+} s: answers {answers}, wanted {stage.right}")
        stage.check()
        if httpx.get(f"{server.url}/health", timeout=60).status_code != 200:
            raise Unexpected(f"clock {jump:+} s: the server says that it is not healthy")
        body = {"model": server.model, "prompt": "x", "max_tokens": 1}
        created = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()["created"]
        if abs(created - time.time() - jump) > 600:
            raise Unexpected(f"clock {jump:+} s: the server says it is {created}, so its clock did not jump")
        seen.append(round(created - time.time()))
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    if wrong := impossible_times(metrics, time.monotonic() - begun):
        raise Unexpected(f"times of patches that went with the clock: {wrong}")
    left = stage.server.end(signal.SIGTERM)
    stage.running = None
    if left:
        raise Unexpected(f"after the end: {left}")
    return {"clock_off_by_s": seen}


def impossible_times(metrics: str, elapsed: float) -> list[str]:
    """Lines of our own times in `metrics` (Prometheus' text) that are below 0 or above `elapsed` seconds."""
    found = _OUR_SECONDS.findall(metrics)
    if not found:
        raise Unexpected("/metrics has no times of our patches: nothing was shown")
    return [line for line, value in found if not 0 <= float(value) <= elapsed]


#: Name -> (what must come of it, the function). In this order three of them need no start of their own.
SCENARIOS: dict[str, tuple[str, Callable[[Stage], dict[str, Any]]]] = {
    "scheduler-stopped": ("requests under way complete, rightly, once it goes on", scheduler_stopped),
    "cache-deleted": ("goes on serving; the next start writes the folder anew", cache_deleted),
    "port-in-use": ("the second ends and names the port; the first is not disturbed", port_in_use),
    "scheduler-killed": (f"all of the server is gone within {GONE_S:.0f} s, the log names it, no request hangs; "
                         "the restart serves", scheduler_killed),
    "detokenizer-killed": (f"all of the server is gone within {GONE_S:.0f} s, the log names it, no request hangs; "
                           "the restart serves", detokenizer_killed),
    "disk-full": ("serves from a private folder and says so; goes on where the log's disk is full", disk_full),
    "clock-jump": ("requests under way complete, rightly; it stays healthy, its times stay possible, and it "
                   "ends clean", clock_jump),
}  # fmt: skip
