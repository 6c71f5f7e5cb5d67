"""One real server for an arm: started, waited for, asked what it is, and ended whatever happens."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from sglang_patches import direct, import_path, lane, ports, processes, selection, serve
from sglang_patches.bench.model import Arm
from sglang_patches.errors import PatchError

_STOP_S = 60.0
# Children that the server leaves behind are on their way out, or will never end by themselves.
_ORPHANS_S = 5.0
_ASK_S = 120.0
# What a pristine interpreter must not get from ours: where our package and patches are found, and which are on.
_OURS = re.compile(r"SGLANG_PATCHES\w*|PYTHONPATH")
_TELLING = re.compile(r"\w*(Error|Exception|Interrupt)\b|^sglang-patches:|^serve:|\berror:|Killed|signal")
_PORT_TAKEN = re.compile(r"address already in use|port \d+ (is|was) (already )?(in use|occupied|taken)", re.IGNORECASE)


class PortTaken(PatchError):
    """Someone took the port between choosing and binding it; another try chooses another."""


class Server:
    """A running server process; made by `running`, which also ends it."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, model: str, log: Path) -> None:
        self.process, self.url, self.model, self.log = process, url, model, log
        self.started = time.monotonic()
        self.ready_s = float("nan")

    def wait_ready(self, timeout: float, tick: Callable[[float], None] = lambda seconds: None) -> None:
        """Return when it answers 200 at `Lane.ready_path`, which it does after its own warm-up request.

        Args:
            timeout: seconds since it was started.
            tick: called twice a second with the seconds that passed.

        Raises:
            PortTaken: it ended because its port is in use.
            PatchError: it ended otherwise, or is not ready in time.
        """
        while True:
            passed = time.monotonic() - self.started
            self.check_alive(f"before it was ready, after {passed:.0f} s")
            failures = (OSError, http.client.HTTPException)
            with contextlib.suppress(*failures), direct.opener.open(f"{self.url}{lane.here().ready_path}", timeout=10):
                self.ready_s = time.monotonic() - self.started
                self._check_ours()
                return
            if passed >= timeout:
                break
            tick(passed)
            time.sleep(0.5)
        raise PatchError(
            f"the server is not ready after {timeout:.0f} s\n{shown(self.log)}\n"
            f"  remedy     --ready-timeout gives it longer; a large model takes as long as its weights take to load"
        )

    def _check_ours(self) -> None:
        """Raise PortTaken if the one that answers is another's server, which took the port before ours came to it."""
        port = int(self.url.rpartition(":")[2])
        listening = set()
        for process in processes.tree(self.process.pid):
            with contextlib.suppress(psutil.Error):
                found = process.net_connections("inet")
                listening |= {entry.laddr.port for entry in found if entry.status == psutil.CONN_LISTEN}
        if port not in listening:
            raise PortTaken(f"another server answers at {self.url}\n{shown(self.log)}\n  remedy     try again")

    def check_alive(self, when: str) -> None:
        """Raise PatchError (`PortTaken` where that is why) with the log's telling lines if it has ended."""
        code = self.process.poll()
        if code is None:
            return
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        taken = _PORT_TAKEN.search(tail(self.log))
        kind = PortTaken if taken else PatchError
        remedy = "read the log; the last lines tell most"
        if taken:
            remedy = f"end what listens on {self.url}, or try again"
        elif code == -signal.SIGKILL:  # of which a log has no line
            remedy = (
                "see who ended it: the kernel does where memory is short (dmesg | tail, memory.events of a container)"
            )
        raise kind(f"the server ended {when} ({how})\n{shown(self.log)}\n  remedy     {remedy}")

    def info(self) -> dict[str, Any]:
        """What /server_info answers.

        Raises:
            PatchError: it does not answer.
        """
        try:
            with direct.opener.open(f"{self.url}/server_info", timeout=_ASK_S) as answer:
                return json.load(answer)
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.check_alive("when it was asked for /server_info")
            raise PatchError(f"{self.url}/server_info: {error}\n{shown(self.log)}") from None

    def stop(self) -> None:
        """End it and all it started: SIGTERM, a minute, SIGKILL for what is left. Can be called twice.

        A second Ctrl-C or SIGTERM meanwhile is a person who does not want to wait: SIGKILL at once.

        Raises:
            PatchError: something outlives SIGKILL, and may still hold its GPU.
        """
        # Once it has been waited for, its number may be another's; its session's may not while somebody is in it.
        ended = self.process.poll() is not None
        tree = processes.session(self.process.pid) if ended else processes.tree(self.process.pid)
        try:
            self._end(tree)
        finally:
            left = processes.kill([*tree, *processes.session(self.process.pid)])
            if left:
                raise PatchError(f"the server of {self.url} cannot be ended: {processes.stuck(left)}")
            self.process.wait()

    def _end(self, tree: Sequence[psutil.Process]) -> None:
        """Ask it to end, and wait for it and for what it started as long as that is worth it."""
        if self.process.poll() is None:
            self.process.terminate()
        deadline = time.monotonic() + _STOP_S
        orphaned = None
        while (self.process.poll() is None or processes.alive(tree)) and time.monotonic() < deadline:
            if orphaned is None and self.process.poll() is not None:
                orphaned = time.monotonic()
                deadline = min(deadline, orphaned + _ORPHANS_S)
            time.sleep(0.1)


@contextlib.contextmanager
def running(
    arm: Arm, *, model: str, draft: str, tp: int, shared: Sequence[str], log: Path, environ: Mapping[str, str]
) -> Iterator[Server]:
    """The arm's server, started but not waited for; on leaving, however that is, it is ended.

    Args:
        model, draft, tp: as for `serve.plan`.
        shared: server arguments of all arms; the arm's own follow.
        log: file for all it prints.
        environ: what all arms share, `os.environ` as a rule.

    Raises:
        PatchError: the arm cannot be started like this.
    """
    argv, env, name, host, port = command(arm, model=model, draft=draft, tp=tp, shared=shared, environ=environ)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=end_with_us,
        )  # fmt: skip
    server = Server(process, f"http://{host}:{port}", name, log)
    try:
        yield server
    finally:
        server.stop()


def command(
    arm: Arm, *, model: str, draft: str, tp: int, shared: Sequence[str], environ: Mapping[str, str]
) -> tuple[list[str], dict[str, str], str, str, int]:
    """What to execute for an arm: argv, environment, served name, host and a port that is free now.

    The parameters and errors are those of `running`.
    """
    env = {name: value for name, value in environ.items() if name != selection.VARIABLE}
    pristine = bool(arm.python) and not _has_us(arm.python)
    if arm.patches:
        if pristine:
            raise PatchError(
                f"arm {arm.name}: {arm.python} has no sglang-patches, so patches cannot be selected there\n"
                f"  seen       {arm.spec}\n  remedy     leave the patches out of the selection, or install them there"
            )
        env[selection.VARIABLE] = arm.patches
    if arm.python:
        env = {name: value for name, value in env.items() if not _OURS.fullmatch(name)} | (
            {selection.VARIABLE: arm.patches} if arm.patches else {}
        )
    for name, value in arm.environment.items():
        env.pop(name, None)
        if value:
            env[name] = value
    port = free_port(ports.bound_host([*shared, *arm.arguments]))
    try:
        plan = serve.plan(
            model, draft, tp, port, [*shared, *arm.arguments], cuda=selection.has_gpu(),
            environ={**env, selection.VARIABLE: "default"} if pristine else env,
        )  # fmt: skip
    except SystemExit as error:
        raise PatchError(f"arm {arm.name}: {error}") from None
    if pristine:
        plan.env.pop(selection.VARIABLE, None)
    plan.env["PYTHONUNBUFFERED"] = "1"
    return [arm.python or sys.executable, *plan.argv[1:]], plan.env, plan.name, ports.reachable(plan.bind), port


def free_port(host: str = "0.0.0.0") -> int:
    """A TCP port that nobody listens on now at this address or name, below the range for outgoing connections.

    Raises:
        PatchError: none is free, or the host is not this machine's.
    """
    refused = None
    for port in random.SystemRandom().sample(range(20000, 30000), 200):
        refused = ports.refused(host, port)
        if refused is None:
            return port
        if not refused.in_use:
            break
    assert refused is not None
    raise PatchError(
        f"no port of 20000-29999 is free: {refused.seen}\n"
        f"  remedy     {'end the servers that hold them' if refused.in_use else refused.remedy}"
    )


def tail(log: Path, size: int = 65536) -> str:
    """The last `size` bytes of a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def shown(log: Path, lines: int = 6) -> str:
    """Where the log is and its last lines that tell of errors (or just the last), for a message."""
    found = [line.strip() for line in tail(log).splitlines() if line.strip()]
    telling = [line for line in found if _TELLING.search(line)] or found
    cut = [line if len(line) <= 240 else f"{line[:237]}..." for line in dict.fromkeys(telling[-lines:])]
    return "\n".join([f"  log        {log}", *(f"  | {line}" for line in cut)])


@functools.cache
def _has_us(python: str) -> bool:
    """Whether another interpreter has sglang-patches, as it starts a server: without our PYTHONPATH."""
    env = {name: value for name, value in os.environ.items() if not _OURS.fullmatch(name)} | {import_path.SAFE: "1"}
    code = "from importlib.util import find_spec; print(bool(find_spec('sglang')), bool(find_spec('sglang_patches')))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    words = done.stdout.split()
    if done.returncode != 0 or words[:1] != ["True"]:
        raise PatchError(
            f"python:{python} cannot serve: {done.stderr.strip()[-300:] or 'it has no sglang'}\n"
            f"  remedy     pip install sglang there, the release that is pinned here"
        )
    return words[1] == "True"


def end_with_us() -> None:
    """Runs in the child: it gets SIGTERM when this process dies, also of SIGKILL; and Ctrl-C is ours to handle."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_DFL)
