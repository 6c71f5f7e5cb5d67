"""Engine processes, one after another: the next one imports while one starts, and none outlives this process."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

from sglang_patches import processes
from sglang_patches.bench.verify_step import grid as grids
from sglang_patches.bench.verify_step.arguments import Chosen
from sglang_patches.bench.verify_step.engine import Spec
from sglang_patches.errors import PatchError

#: An engine that tells nothing for so long hangs; a first start with compiling takes a few minutes.
SILENCE_S = 900
_SAY_EVERY_S = 5
_TELLING = ("Error", "error:", "Exception", "out of memory", "assert")


class Worker:
    """One engine process."""

    def __init__(self, draft_tokens: int, chosen: Chosen, folder: Path, scratch: Path, sweep: bool) -> None:
        self.draft_tokens = draft_tokens
        self.log = scratch / f"engine-{draft_tokens}.log"
        read, write = os.pipe()
        spec = Spec(
            draft_tokens=draft_tokens,
            arguments=chosen.arguments(draft_tokens),
            shown=chosen.shown(draft_tokens),
            command=chosen.command,
            grid=chosen.grid,
            share=chosen.share,
            vocabulary=chosen.vocabulary(),
            sweep=sweep,
            folder=folder.resolve(),
            progress=write,
        )
        file = scratch / f"engine-{draft_tokens}.json"
        file.write_text(spec.model_dump_json())
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "sglang_patches.bench.verify_step.engine", str(file)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[write],
                env=chosen.environment(),
                start_new_session=True,
            )
        os.close(write)
        self.read = read
        self._rest = b""

    def go(self) -> None:
        """Let it start its engine. One that is dead already is told of by `told`."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(b"go\n")
            self.process.stdin.flush()

    def told(self, seconds: float) -> list[dict[str, Any]] | None:
        """What it tells within `seconds`; None once it has closed its end."""
        if not select.select([self.read], [], [], seconds)[0]:
            return []
        data = os.read(self.read, 65536)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        """End it and all it started, and wait until their memory is free for the next one.

        Raises:
            PatchError: something outlives SIGKILL, and may still hold the GPU.
        """
        # It leads its session, so the number stays taken while any member is left.
        left = processes.kill(processes.session(self.process.pid))
        if left:
            raise PatchError(
                f"the engine with {self.draft_tokens} draft tokens cannot be ended: {processes.stuck(left)}"
            )
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        os.close(self.read)


def measure(engines: Sequence[int], chosen: Chosen, folder: Path, scratch: Path, sweep: bool) -> list[int]:
    """Measure these engines; returns those that failed, whose records so far are kept and whose log is in `folder`."""
    failed: list[int] = []
    ahead: list[Worker] = []
    clock = Clock(len(engines))
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        for at, tokens in enumerate(engines):
            worker = ahead.pop() if ahead else Worker(tokens, chosen, folder, scratch, sweep)
            try:
                worker.go()
                if at + 1 < len(engines):
                    ahead.append(Worker(engines[at + 1], chosen, folder, scratch, sweep))
                whole = _follow(worker, clock)
            finally:
                worker.end()
            if not whole:
                failed.append(tokens)
                kept = folder / f"engine-{tokens}.log"
                shutil.copy(worker.log, kept)
                typer.echo(f"{grids.key(tokens)}: the engine ended early, its records are kept. Log: {kept}", err=True)
                typer.echo(_last_words(kept), err=True)
            clock.next()
    finally:
        for worker in ahead:
            worker.end()
        signal.signal(signal.SIGTERM, before)
    return failed


def _interrupt(_number: int, _frame: Any) -> None:
    raise KeyboardInterrupt


def _follow(worker: Worker, clock: Clock, now: Callable[[], float] = time.monotonic) -> bool:
    """Show progress until the worker is done (True) or gone, or silent for too long (False)."""
    heard = said = now()
    name = grids.key(worker.draft_tokens)
    while True:
        told = worker.told(1)
        if told is None:
            return False
        for line in told:
            heard = now()
            clock.at(line.get("part"))
            if line["say"] == "done":
                typer.echo(f"{name}: done")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(10)
                return True
            if "part" not in line or heard - said >= _SAY_EVERY_S:
                said = heard
                typer.echo(f"{name}: {line['say']}{clock.left()}")
        if now() - heard > SILENCE_S:
            typer.echo(f"{name}: no sign of life for {SILENCE_S} s", err=True)
            return False


class Clock:
    """Time left, from how long engines took to start and measure so far."""

    def __init__(self, engines: int, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._engines = engines
        self._done: list[float] = []
        self._begun = now()
        self._measuring: float | None = None
        self._part = 0.0

    def at(self, part: float | None) -> None:
        """The engine has done this part of its measuring; None: it still starts."""
        if part is not None:
            if self._measuring is None and part > 0:
                self._measuring = self._now()
            self._part = part

    def next(self) -> None:
        """The engine is over."""
        self._done.append(self._now() - self._begun)
        self._begun, self._measuring, self._part = self._now(), None, 0.0

    def seconds(self) -> float | None:
        """Seconds left; None while nothing can be told."""
        spent = self._now() - self._begun
        whole = sum(self._done) / len(self._done) if self._done else None
        if self._measuring is not None and self._part > 0.02:
            whole = spent + (self._now() - self._measuring) * (1 - self._part) / self._part
        if whole is None:
            return None
        return max(whole - spent, 0) + (self._engines - len(self._done) - 1) * whole

    def left(self) -> str:
        """In words, empty while nothing can be told."""
        left = self.seconds()
        return "" if left is None else f" ({int(left) // 60}:{int(left) % 60:02d} left)"


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    telling = [line for line in lines if any(word in line for word in _TELLING)]
    return "\n".join(f"  {line[:200]}" for line in (telling or lines)[-6:])
