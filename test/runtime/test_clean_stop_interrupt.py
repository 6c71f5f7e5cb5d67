"""clean-stop's Ctrl-C, on a stand-in with a server's command line and real children; e2e/test_stop.py has real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sglang_patches import processes

# Phases as upstream has them: imports, children, uvicorn, the end. `hold` makes the end slow, as GPU memory may.
SERVER = """
import multiprocessing, os, signal, sys, time
from types import SimpleNamespace
from sglang_patches.runtime import clean_stop

def work(told):
    held = multiprocessing.get_context("spawn").Semaphore()  # nobody removes it in time where this is killed
    print("child", os.getpid(), flush=True)
    told.send(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)
    time.sleep(600)

@clean_stop.interrupt.deaf
def launch():
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(False)
    child = context.Process(target=work, args=(send,))
    child.start()
    if "press" in sys.argv:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
        print("launched", flush=True)
    print("ignores", receive.recv(), flush=True)

if __name__ == "__main__":
    clean_stop.interrupt.listen()
    print("imports", flush=True)
    if "imports" in sys.argv:
        try:
            time.sleep(60)
        except BaseException:
            print("hidden by the module that is imported", flush=True)
        sys.exit(3)
    if "other" not in sys.argv:
        clean_stop.exit_on_sigterm()
    try:
        launch()
        if "uvicorn" in sys.argv:
            import uvicorn
            async def answer(scope, receive, send):
                raise NotImplementedError
            if "warm" in sys.argv:
                clean_stop.interrupt.serves(SimpleNamespace(server_status=SimpleNamespace(name="Up")))
            uvicorn.run(answer, port=int(sys.argv[-1]), lifespan="off")
        else:
            print("loads", flush=True)
            time.sleep(60)
    finally:
        if "hold" in sys.argv:
            print("holds", flush=True)
            time.sleep(60)
        from .srt.utils import kill_process_tree
        kill_process_tree(os.getpid(), include_parent=False)
"""
# What the end calls of upstream, without the half minute of its imports.
UPSTREAM = """
import psutil
from sglang_patches.runtime import clean_stop

def kill_process_tree(pid, include_parent):
    for child in clean_stop.before_kill(psutil.Process(pid).children(recursive=True)):
        child.kill()
        child.wait()
"""


def _as_from_a_terminal() -> None:
    """The tests may be a shell's background job, or nohup's, which ignore these."""
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


class Foreground:
    """A process group of its own, to all of which `press` sends SIGINT as a terminal does."""

    def __init__(self, folder: Path, *words: str, module: str = "sglang.launch_server") -> None:
        package = folder / module.partition(".")[0]
        (package / "srt").mkdir(parents=True)
        for file in ("__init__.py", "srt/__init__.py"):
            (package / file).write_text("")
        (package / "srt/utils.py").write_text(UPSTREAM)
        (package / f"{module.rpartition('.')[2]}.py").write_text(SERVER)
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *words], cwd=folder, env={"SGLANG_PATCHES": "none"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            preexec_fn=_as_from_a_terminal,
        )  # fmt: skip
        self.children: list[psutil.Process] = []
        self.said: list[str] = []

    def wait_for(self, word: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.strip())
            if line.startswith("child "):
                self.children.append(psutil.Process(int(line.split()[1])))
            if line.startswith(word):
                return
        raise AssertionError(f"ended without {word!r}: {self.said} {self.process.communicate()}")

    def press(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> list[str]:
        """What it printed to stderr, by lines, once it and its children have ended."""
        said = self.process.communicate(timeout=60)[1].splitlines()
        deadline = time.monotonic() + 10
        while processes.alive(self.children) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not processes.alive(self.children)
        return said


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Foreground]]:
    running: list[Foreground] = []
    yield running
    for one in running:
        processes.kill(processes.session(one.process.pid))
        one.process.communicate()


def start(started: list[Foreground], folder: Path, *words: str, module: str = "sglang.launch_server") -> Foreground:
    started.append(Foreground(folder, *words, module=module))
    return started[-1]


def stopped_in_order(said: list[str], stopping: str) -> bool:
    first, last = said
    return first == f"sglang-patches: Ctrl-C: {stopping}" and last.startswith("sglang-patches: stopped after ")


def test_while_it_imports(tmp_path: Path, started: list[Foreground]) -> None:
    server = start(started, tmp_path, "imports")
    server.wait_for("imports")
    server.press()
    assert stopped_in_order(server.end(), "stopping")
    assert server.process.returncode == 0


def test_while_it_loads(tmp_path: Path, started: list[Foreground]) -> None:
    """The child gets the signal too, and neither dies of it nor prints."""
    server = start(started, tmp_path)
    server.wait_for("loads")
    assert "ignores True" in server.said
    assert len(server.children) == 1
    server.press()
    assert stopped_in_order(server.end(), "stopping; again: at once")
    assert server.process.returncode == 0


def test_while_it_starts_a_child_it_is_heard_afterwards(tmp_path: Path, started: list[Foreground]) -> None:
    server = start(started, tmp_path, "press")
    server.wait_for("launched")
    assert stopped_in_order(server.end(), "stopping; again: at once")
    assert server.process.returncode == 0


@pytest.mark.parametrize("warm", [True, False])
def test_while_it_serves(warm: bool, tmp_path: Path, started: list[Foreground]) -> None:
    """uvicorn raises the signal again at its end, which would be a traceback."""
    server = start(started, tmp_path, "uvicorn", *(["warm"] if warm else ["hold"]), "0")
    server.wait_for("ignores")
    assert server.process.stderr is not None
    while "Uvicorn running" not in server.process.stderr.readline():
        assert server.process.poll() is None
    server.press()
    when = " when the requests that run have ended" if warm else ""
    assert stopped_in_order(server.end(), f"stopping{when}; again: at once")
    assert server.process.returncode == 0


def test_a_server_of_another_kind_ends_its_children(tmp_path: Path, started: list[Foreground]) -> None:
    """One that upstream launches elsewhere, so that nobody said that there are children: sent to it alone, as by a
    supervisor, SIGINT runs its own way out."""
    server = start(started, tmp_path, "other")
    server.wait_for("loads")
    os.kill(server.process.pid, signal.SIGINT)
    assert stopped_in_order(server.end(), "stopping")
    assert server.process.returncode == 0


def test_the_second_ends_at_once(tmp_path: Path, started: list[Foreground]) -> None:
    server = start(started, tmp_path, "hold")
    server.wait_for("loads")
    server.press()
    server.wait_for("holds")
    began = time.monotonic()
    server.press()
    said = server.end()
    assert time.monotonic() - began < 10
    assert said[1:] == ["sglang-patches: Ctrl-C again: killing what is left"]
    assert server.process.returncode == -signal.SIGINT


def test_a_program_that_is_no_server_keeps_its_own_way(tmp_path: Path, started: list[Foreground]) -> None:
    other = start(started, tmp_path, module="other.program")
    other.wait_for("loads")
    assert "ignores False" in other.said
    other.press()
    said = "\n".join(other.end())
    assert said.count("KeyboardInterrupt") >= 1
    assert "sglang-patches" not in said


def test_the_terminal_may_go_with_the_server(tmp_path: Path, started: list[Foreground]) -> None:
    """The resource tracker, which removes what killed children leave, outlives the SIGHUP that the end then sends."""
    server = start(started, tmp_path)
    server.wait_for("loads")
    found = psutil.Process(server.process.pid).children()
    (tracker,) = [one for one in found if any("resource_tracker" in word for word in one.cmdline())]
    status = Path(f"/proc/{tracker.pid}/status").read_text()
    ignored = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn")), 16)
    assert ignored >> (signal.SIGHUP - 1) & 1
    own = Path(f"/proc/{server.process.pid}/status").read_text()
    ignored = int(next(line.split()[1] for line in own.splitlines() if line.startswith("SigIgn")), 16)
    assert not ignored >> (signal.SIGHUP - 1) & 1
    server.press()
    server.end()


def test_a_background_job_goes_on_ignoring_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_patches.runtime.clean_stop import interrupt

    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "sglang.launch_server"])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupt.listen()
        assert not interrupt.listens()
    finally:
        signal.signal(signal.SIGINT, before)
