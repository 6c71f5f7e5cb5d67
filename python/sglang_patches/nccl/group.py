"""A fresh process group: one process a rank, started, let go, timed out and ended with all that it started."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal

Status = Literal["measured", "wrong", "cannot run", "crashed", "timed out", "interrupted"]

_POLL = 0.02
_GRACE = 3.0  # seconds for the other ranks to fail by themselves, so that each can say why
_PATIENCE = 10.0  # seconds for a killed rank to be gone; one that waits inside a driver can take for ever
_TAIL = 1500  # characters of a rank's output worth keeping


@dataclass(frozen=True)
class Job:
    """What every rank of one group does; goes to the ranks as JSON.

    Attributes:
        paths: names for `paths.path_class`, done in this order.
        calls: all-reduces in a row: in one graph, or between two clock readings.
        replays: samples per size; `warmups` more come before them.
        folder: where the ranks meet and write; filled in by `Group`.
    """

    backend: str
    world: int
    paths: tuple[str, ...]
    rows: tuple[int, ...]
    hidden: int
    dtype: str = "bfloat16"
    calls: int = 50
    replays: int = 40
    warmups: int = 5
    seed: int = 1
    folder: str = ""


@dataclass
class Outcome:
    """How a group ended, and what its ranks wrote."""

    status: Status
    reason: str
    seconds: float
    ranks: list[dict[str, Any]] = field(default_factory=list)

    def samples(self, path: str) -> dict[int, list[list[float]]]:
        """rows -> rank -> microseconds of each replay; only sizes that every rank finished."""
        found: dict[int, list[list[float]]] = {}
        every = [rank.get("sizes", {}).get(path, {}) for rank in self.ranks]
        for rows in every[0] if every else {}:
            series = [sizes.get(rows, {}).get("us") for sizes in every]
            if all(series):
                found[int(rows)] = [list(values) for values in series if values]
        return found


class Group:
    """The processes of one group. The folder must be new, and may be removed once `run` has returned."""

    def __init__(self, job: Job, folder: Path, environment: Mapping[str, str]) -> None:
        folder.mkdir(parents=True)
        self.job, self.folder = replace(job, folder=str(folder)), folder
        (folder / "job.json").write_text(json.dumps(asdict(self.job)))
        self._processes: list[subprocess.Popen[str]] = []
        self._logs: list[IO[str]] = []
        self._first_fallen: list[int] = []
        self._open: set[int] = set(range(job.world))  # ranks whose process group may still have members
        self._stuck: list[str] = []
        for rank in range(job.world):
            log = (folder / f"log{rank}").open("w")
            self._logs.append(log)
            command = [sys.executable, "-P", "-m", "sglang_patches.nccl.worker", str(folder / "job.json"), str(rank)]
            # %RANK% lets a variable differ by rank: NCCL's log file, say.
            own = {name: value.replace("%RANK%", str(rank)) for name, value in environment.items()}
            self._processes.append(
                # A session of its own: Ctrl-C is for the parent, which then ends the ranks itself; and what a rank
                # starts (compilers of kernels, say) is in its process group and ends with it.
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=own,
                    text=True,
                    start_new_session=True,
                )
            )

    def prepare(self, timeout: float) -> None:
        """Wait until every rank has its imports done (or has ended, or time is up: `run` then tells)."""
        end = time.monotonic() + timeout
        for process in self._processes:
            assert process.stdout is not None
            # A rank writes one line, or ends and with it the pipe: either way there is something to read.
            select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))

    def run(self, timeout: float) -> Outcome:
        """Let the ranks go and wait for them, at most `timeout` seconds.

        Returns:
            What happened; a rank that hangs or crashes ends the whole group and is no exception.

        Raises:
            KeyboardInterrupt: after the group has been ended.
        """
        started = time.monotonic()
        try:
            for process in self._processes:
                assert process.stdin is not None
                with contextlib.suppress(OSError):  # it may have ended already; its exit code tells
                    process.stdin.write("go\n")
                    process.stdin.close()
            late = self._wait(started + timeout)
            bad = self._fallen()
        finally:
            self.end()
        seconds = time.monotonic() - started
        ranks = [self._found(rank) for rank in range(self.job.world)]
        outcome = self._outcome(bad, late, timeout, seconds, ranks)
        if self._stuck:
            outcome.reason = "; ".join([*filter(None, [outcome.reason]), *self._stuck])
        return outcome

    def _outcome(
        self, bad: list[int], late: list[int], timeout: float, seconds: float, ranks: list[dict[str, Any]]
    ) -> Outcome:
        if bad:
            # When one falls, the others' connections break: the first seen to fall is the cause, a signal before all.
            rank = min(self._first_fallen or bad, key=lambda index: self._processes[index].returncode)
            code = self._processes[rank].returncode
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            return Outcome("crashed", f"rank {rank}: {how}: {self._tail(rank)}", seconds, ranks)
        if late:
            told = ", ".join(f"rank {rank}: {self._progress(ranks[rank])}" for rank in late)
            return Outcome("timed out", f"after {timeout:.0f} s ({told})", seconds, ranks)
        cannot: dict[str, str] = ranks[0].get("cannot_run", {})
        if len(cannot) == len(self.job.paths):
            return Outcome("cannot run", "; ".join(cannot.values()), seconds, ranks)
        return self._verdict(seconds, ranks)

    def _verdict(self, seconds: float, ranks: list[dict[str, Any]]) -> Outcome:
        for rank, found in enumerate(ranks):
            for path, sizes in found.get("sizes", {}).items():
                for rows, size in sizes.items():
                    if not size.get("wrong", 0) <= 1:
                        reason = (
                            f"{path}, {rows} rows, rank {rank}: the error is {size['wrong']:.3g} times what rounding "
                            f"explains"
                        )
                        return Outcome("wrong", reason, seconds, ranks)
        return Outcome("measured", "", seconds, ranks)

    def _wait(self, end: float) -> list[int]:
        """Ranks still running when time was up, or a little after another rank had failed."""
        while True:
            running = [index for index, process in enumerate(self._processes) if process.poll() is None]
            for index in self._open.difference(running):  # at once: later its number may be another process's
                self._end_group(index)
            if not running or time.monotonic() >= end:
                return running
            if not self._first_fallen and (fallen := self._fallen()):
                self._first_fallen = fallen
                end = min(end, time.monotonic() + _GRACE)
            time.sleep(_POLL)

    def _fallen(self) -> list[int]:
        """Ranks that have ended, but not well."""
        return [index for index, process in enumerate(self._processes) if process.poll()]

    def end(self) -> None:
        """End whatever still runs, and what ranks started, by process group; wait for the ranks. Again is no harm."""
        for index in sorted(self._open):
            self._end_group(index)
        for index, process in enumerate(self._processes):
            try:
                process.wait(0 if self._stuck else _PATIENCE)
            except subprocess.TimeoutExpired:
                told = f"rank {index} (process {process.pid}) cannot be ended, and may still hold its GPU"
                if told not in self._stuck:
                    self._stuck.append(told)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        for log in self._logs:
            log.close()

    def _end_group(self, index: int) -> None:
        self._open.discard(index)
        # The rank leads its group, so the number stays taken while any member is left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._processes[index].pid, signal.SIGKILL)

    def _found(self, rank: int) -> dict[str, Any]:
        file = self.folder / f"rank{rank}.json"
        return json.loads(file.read_text()) if file.exists() else {}

    @staticmethod
    def _progress(found: Mapping[str, Any]) -> str:
        if "versions" not in found:
            return "before it had joined the group"
        done = [f"{path} {', '.join(sizes)}" for path, sizes in found.get("sizes", {}).items() if sizes]
        return f"sizes done: {'; '.join(done) or 'none'}"

    def _tail(self, rank: int) -> str:
        text = (self.folder / f"log{rank}").read_text(errors="replace").strip()
        return text[-_TAIL:] or "it said nothing"
