"""clean-stop: which files are removed, and when. Whole servers are stopped in e2e/test_stop.py."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

OWNER = """
import os, signal, sys, time, multiprocessing
from sglang.srt.server_args import PortArgs
from sglang.srt.managers.load_snapshot import shm_path_for
from sglang.srt.utils import kill_process_tree, set_prometheus_multiproc_dir
from sglang_patches.runtime import clean_stop

def work(held):
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    names = [f"ipc://{sys.argv[1]}/{n}" for n in range(5)]
    ports = PortArgs(*names[:3], 1, *names[3:], None, None, instance_id=sys.argv[2])
    for file in clean_stop.files_of(ports):
        open(file, "w").close()
    clean_stop.remove_at_exit(ports)
    child = context.Process(target=work, args=(context.Semaphore(),), daemon=True)
    child.start()
    if os.fork() == 0:
        sys.exit()  # a fork must not remove its parent's files
    os.wait()
    assert os.path.exists(shm_path_for(sys.argv[2]))
    set_prometheus_multiproc_dir()
    open(os.environ["PROMETHEUS_MULTIPROC_DIR"] + "/gauge.db", "w").close()
    if sys.argv[3] == "exit":
        kill_process_tree(os.getpid(), include_parent=False)
    elif sys.argv[3] == "sigterm":
        clean_stop.exit_on_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    elif sys.argv[3] == "from outside":
        kill_process_tree(os.getpid(), include_parent=False)
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        kill_process_tree(os.getpid())
"""


@pytest.mark.parametrize(
    ("how", "status", "stay"),
    [
        ("exit", 0, False),
        ("sigterm", 128 + signal.SIGTERM, False),
        ("kill", -signal.SIGKILL, False),  # itself, as upstream does when a child has failed
        ("from outside", -signal.SIGKILL, True),
    ],
)
def test_files_go_with_the_process_that_owns_them(tmp_path: Path, how: str, status: int, stay: bool) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    folder = tmp_path / "sockets"
    folder.mkdir()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    instance = f"test{os.getpid()}{how.replace(' ', '')}"
    before = set(os.listdir("/dev/shm"))
    command = [sys.executable, str(script), str(folder), instance, how]
    environ = {key: found for key, found in os.environ.items() if key != "PROMETHEUS_MULTIPROC_DIR"}
    environ["TMPDIR"] = str(temporary)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ)
    assert done.returncode == status, done.stderr
    # After a kill it is the resource tracker that removes shared memory, once it sees that all others have ended.
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and [name for name in os.listdir("/dev/shm") if instance in name]:
        time.sleep(0.1)
    left = [name for name in set(os.listdir("/dev/shm")) - before if instance in name]
    assert left == []
    assert len(list(folder.iterdir())) == (5 if stay else 0)
    assert bool(list(temporary.rglob("gauge.db"))) == stay
    if how == "exit":
        assert "leaked" not in done.stderr


@pytest.mark.parametrize(("enabled", "waited"), [(None, 0), ("1", 1)])
def test_a_server_that_lost_a_child_waits_for_core_dumps_only_where_they_can_come(
    monkeypatch: pytest.MonkeyPatch, enabled: str | None, waited: int
) -> None:
    """Upstream's own code after a child failed: 60 seconds for dumps, beside 5 for the GPU to settle."""
    from sglang.srt.managers import tokenizer_manager

    monkeypatch.delenv("CUDA_ENABLE_USER_TRIGGERED_COREDUMP", raising=False)
    if enabled:
        monkeypatch.setenv("CUDA_ENABLE_USER_TRIGGERED_COREDUMP", enabled)
    monkeypatch.setenv("SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS", "60")
    slept: list[float] = []
    asked: list[bool] = []
    monkeypatch.setattr(tokenizer_manager.time, "sleep", slept.append)
    monkeypatch.setattr(tokenizer_manager, "collect_scheduler_processes", lambda: ["one"])
    monkeypatch.setattr(tokenizer_manager, "pyspy_dump_schedulers", lambda **_: None)
    monkeypatch.setattr(tokenizer_manager, "trigger_cuda_user_coredump", lambda **_: asked.append(True))
    manager = tokenizer_manager.TokenizerManager.__new__(tokenizer_manager.TokenizerManager)
    manager.crash_dump_folder, manager.crash_dump_performed = "", False
    manager.dump_requests_before_crash()
    assert slept.count(60) == len(asked) == waited


def test_a_running_server_sees_sigterm_at_once() -> None:
    """Upstream's own coroutine, from the signal to the order that ends the scheduler: 5 seconds without the patch."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    class Ordered(Exception):
        pass

    def order(request: object) -> None:
        raise Ordered

    manager: Any = SimpleNamespace(
        gracefully_exit=False, rid_to_state={}, server_status=None, _subprocess_watchdog=None,
        _dispatch_to_scheduler=order,
    )  # fmt: skip

    async def told() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(0.1, setattr, manager, "gracefully_exit", True)
        began = loop.time()
        with pytest.raises(Ordered):
            await asyncio.wait_for(TokenizerManager.sigterm_watchdog(manager), 30)
        return loop.time() - began

    assert 0.1 <= asyncio.run(told()) < 3


def test_nothing_keeps_a_launching_process_from_ending_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that outlives its children holds the port and serves nothing."""
    from sglang_patches.runtime import clean_stop

    def broken(*_: Any, **__: Any) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(clean_stop.os, "unlink", broken)
    monkeypatch.setattr(clean_stop, "_owned", {os.getpid(): ["/tmp/a-socket"]})
    clean_stop.before_own_kill([])
    assert clean_stop._owned == {}
    monkeypatch.setattr(clean_stop, "_owned", {os.getpid(): []})
    monkeypatch.setattr(clean_stop.psutil, "wait_procs", broken)
    clean_stop.before_own_kill([])


def test_children_that_a_signal_ended_are_named_and_the_resource_tracker_is_spared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Who waits for a child still gets its exit code. In a whole server: e2e/test_cpu_tensor_parallel.py."""
    from sglang_patches.runtime import clean_stop

    code = "import time, sys; print(flush=True); time.sleep(600)"
    tracker = "import time; print(flush=True); time.sleep(600)  # multiprocessing.resource_tracker"
    commands = {"killed": code, "crashed": code, "told": code, "ended": "print()", "alive": code, "tracker": tracker}
    children = {
        name: subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE)
        for name, command in commands.items()
    }
    try:
        for child in children.values():
            assert child.stdout is not None
            child.stdout.readline()
        sent = {"killed": signal.SIGKILL, "crashed": signal.SIGSEGV, "told": signal.SIGTERM}
        for name, how in sent.items():
            children[name].send_signal(how)
        for name in [*sent, "ended"]:  # without taking the exit code
            os.waitid(os.P_PID, children[name].pid, os.WEXITED | os.WNOWAIT)
        given = {name: psutil.Process(child.pid) for name, child in children.items()}
        assert clean_stop.before_kill([*given.values()]) == [given[name] for name in given if name != "tracker"]
        told = [record.getMessage() for record in caplog.records if "was ended by" in record.getMessage()]
        assert len(told) == 2
        for name in ("killed", "crashed"):
            said = f"ended by {sent[name].name}"
            assert sum(f"process {children[name].pid} (" in line and said in line for line in told) == 1
        for name, how in sent.items():
            assert children[name].wait(10) == -how
        assert children["ended"].wait(10) == 0
        assert children["alive"].poll() is children["tracker"].poll() is None
        # Upstream kills and comes again; what it killed itself is a zombie then, and no crash.
        children["alive"].kill()
        os.waitid(os.P_PID, children["alive"].pid, os.WEXITED | os.WNOWAIT)
        caplog.clear()
        clean_stop.before_kill([given["alive"]])
        assert "was ended by" not in caplog.text
        late = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        children["late"] = late
        late.send_signal(signal.SIGRTMIN + 1)  # which has no name
        os.waitid(os.P_PID, late.pid, os.WEXITED | os.WNOWAIT)
        clean_stop.before_kill([psutil.Process(late.pid)])
        assert f"ended by {signal.SIGRTMIN + 1}," in caplog.text
    finally:
        for child in children.values():
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()
