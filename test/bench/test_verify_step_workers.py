"""bench/verify_step: engines that die, hang or are interrupted, and the time that is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sglang_patches.bench.verify_step import arguments, workers

from .cycles_made import made_grid


def test_the_clock_tells_the_time_left() -> None:
    now = [0.0]
    clock = workers.Clock(3, now=lambda: now[0])
    assert clock.left() == ""
    now[0] = 40  # the start
    clock.at(0.0)
    clock.at(0.1)
    now[0] = 60
    clock.at(0.5)
    # 20 s for what is half by now: 20 s more here, and two engines of 80 s.
    assert clock.seconds() == pytest.approx(20 + 2 * 80, rel=0.2)
    now[0] = 80
    clock.next()
    assert clock.seconds() == pytest.approx(160)


FAKE_ENGINE = """
import json, os, sys, time
from pathlib import Path
spec = json.loads(Path(sys.argv[1]).read_text())
if spec["draft_tokens"] == 5:
    sys.exit("ImportError: planted")
sys.stdin.readline()
if spec["draft_tokens"] == 3:
    print("RuntimeError: planted")
    sys.exit(1)
Path(spec["folder"], f"pid-{spec['draft_tokens']}").write_text(str(os.getpid()))
os.write(spec["progress"], (json.dumps({"say": "half", "part": 0.5}) + "\\n").encode())
if spec["draft_tokens"] == 8:
    time.sleep(600)
os.write(spec["progress"], (json.dumps({"say": "done", "part": 1}) + "\\n").encode())
"""


@pytest.fixture
def fake_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> arguments.Chosen:
    """Engines are a script that fails for 3 draft tokens, before it is let go for 5, and hangs for 8."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE_ENGINE)
    popen = workers.subprocess.Popen

    def start(words: list[str], **named: Any) -> Any:
        return popen([sys.executable, str(script), words[-1]], **named)

    monkeypatch.setattr(workers.subprocess, "Popen", start)
    (tmp_path / "config.json").write_text('{"vocab_size": 77}')
    (tmp_path / "scratch").mkdir()
    return arguments.Chosen(tmp_path, tmp_path, dummy=False, cuda=True, grid=made_grid())


def test_an_engine_that_dies_is_told_and_the_others_are_measured(
    fake_engine: arguments.Chosen, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert workers.measure([2, 3, 4], fake_engine, tmp_path, tmp_path / "scratch", sweep=False) == [3]
    assert (tmp_path / "pid-4").exists()
    said = capfd.readouterr()
    assert "2 tokens: done" in said.out
    assert "RuntimeError: planted" in said.err
    assert "RuntimeError: planted" in (tmp_path / "engine-3.log").read_text()


def test_an_engine_that_cannot_import_is_told(
    fake_engine: arguments.Chosen, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    go = workers.Worker.go

    def late(worker: workers.Worker) -> None:
        time.sleep(1)
        go(worker)

    monkeypatch.setattr(workers.Worker, "go", late)
    assert workers.measure([5, 4], fake_engine, tmp_path, tmp_path / "scratch", sweep=False) == [5]
    assert "ImportError: planted" in capfd.readouterr().err


def test_an_interrupt_leaves_no_engine_behind(fake_engine: arguments.Chosen, tmp_path: Path) -> None:
    started = tmp_path / "pid-8"
    if os.fork() == 0:  # SIGTERM comes while this process waits for the engine
        while not started.exists():
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(os.getppid(), signal.SIGTERM)
        os._exit(0)
    with pytest.raises(KeyboardInterrupt):
        workers.measure([8, 2], fake_engine, tmp_path, tmp_path / "scratch", sweep=False)
    os.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_a_silent_engine_is_given_up(
    fake_engine: arguments.Chosen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SILENCE_S", 1.5)
    assert workers.measure([8], fake_engine, tmp_path, tmp_path / "scratch", sweep=False) == [8]


def test_an_engine_ends_with_its_starter() -> None:
    """Closing its standard input is what the death of the starter does."""
    code = "from sglang_patches.bench.verify_step import engine; engine._end_with_starter()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True)
    assert child.stdin is not None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(1)
    child.stdin.close()
    assert child.wait(30) == -signal.SIGKILL
