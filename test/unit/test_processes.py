"""Ending processes: what was killed is gone when the call returns."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from sglang_patches import processes

# Its memory takes the kernel a while to give back, so that it outlives the signal for longer than a look takes.
HEAVY = """
import os, subprocess, sys
held = bytearray(1 << 29)
held[::4096] = b"x" * len(held[::4096])
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def heavy() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HEAVY], stdout=subprocess.PIPE, text=True, start_new_session=True
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def test_what_was_killed_is_gone(heavy: subprocess.Popen[str]) -> None:
    found = processes.tree(heavy.pid)
    assert len(found) == 2
    assert {process.pid for process in processes.session(heavy.pid)} == {process.pid for process in found}
    assert processes.alive(found) == found
    assert processes.kill(found) == []
    assert processes.alive(found) == []
    # The exit code is left to whoever started it.
    assert heavy.wait(5) == -9


def test_what_cannot_be_killed_is_told(heavy: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = processes.tree(heavy.pid)
    with monkeypatch.context() as patched:
        patched.setattr(psutil.Process, "kill", lambda self: None)
        assert processes.kill(found, seconds=0.1) == found
    assert str(heavy.pid) in processes.stuck(found)
    assert processes.kill(found) == []
    heavy.wait(5)


def test_what_is_gone_is_no_fault() -> None:
    process = subprocess.Popen(["sleep", "600"])
    found = processes.tree(process.pid)
    process.kill()
    process.wait()
    assert processes.kill(found) == []
    assert processes.tree(process.pid) == []
    assert os.getpid() in {process.pid for process in processes.tree(os.getpid())}
