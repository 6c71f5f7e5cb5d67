"""Measures turns one after another into a result folder, so that nothing measured is lost and a rerun continues.

What others build on (`ab` is `run_turns` and a verdict; a search that decides as it goes uses `Journal` itself):

    setup = Setup(model=..., draft=..., tp=1, server_args=[...], prompts=prompts,
                  workload=prompts.workload(output_tokens=64, concurrency=1, warm_up=4), folder=Path(...))
    with Journal(setup, kind="bisect", settings={"metric": "verify_ms"}) as journal:
        turn = journal.turn(arm, block=0)     # measured now, or taken from an earlier, interrupted run
        turn.figures["verify_ms"]; journal.samples(turn.index)
    turns = run_turns(setup, "ab", arms, abba(["a", "b"], rounds=4), settings={})

    turn, samples = one_turn(setup, arm, index=0, block=0, say=print)     # without a journal

`Journal.turn` is called in the same order in every run of the same command: the n-th call gets the n-th recorded turn
where there is one (of another arm or block it is an error), so an algorithm that decides by what it measured arrives
where it was, without a server being started. `journal.expect(n)` tells how many turns there will be, for the time left.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from sglang_patches import provenance, series, upstream
from sglang_patches.bench.figures import VERSION
from sglang_patches.bench.folder import replace
from sglang_patches.bench.model import Arm, Sample, Turn
from sglang_patches.bench.progress import Progress
from sglang_patches.bench.turns import Setup, one_turn
from sglang_patches.document import diff as differ
from sglang_patches.document import secrets
from sglang_patches.errors import PatchError

__all__ = ["Journal", "Setup", "abba", "one_turn", "run_turns"]

_Line = TypeVar("_Line", bound=BaseModel)


def abba(arms: Sequence[str], rounds: int) -> list[tuple[int, str]]:
    """(block, arm) of each turn: every block has each arm once, in order, and every second block in reverse."""
    return [(block, arm) for block in range(rounds) for arm in (arms if block % 2 == 0 else list(reversed(arms)))]


def run_turns(
    setup: Setup,
    kind: str,
    arms: Sequence[Arm],
    schedule: Sequence[tuple[int, str]],
    settings: Mapping[str, Any] | None = None,
    check: Callable[[list[Turn], Journal], None] = lambda turns, journal: None,
    quiet: bool = False,
) -> list[Turn]:
    """Measure a schedule of (block, arm) turn by turn into the folder, or go on where an earlier run of it stopped.

    Args:
        kind: of the result.
        settings: what else must be the same to go on with an earlier run's turns.
        check: called after every turn with all so far; it raises where going on is pointless.
        quiet: show no progress.

    Raises:
        PatchError: as `Journal` and `one_turn` say; the turns before it are kept.
    """
    by_name = {arm.name: arm for arm in arms}
    turns: list[Turn] = []
    with Journal(setup, kind, settings or {}, quiet=quiet) as journal:
        for arm in arms:
            journal.know(arm)
        journal.expect(len(schedule))
        if len(journal.turns) > len(schedule):
            rounds = -(-len(journal.turns) // max(1, len(arms)))
            raise PatchError(
                f"{setup.folder}: holds {len(journal.turns)} turns, and this run has {len(schedule)}\n"
                f"  expected   as many or more: leaving out what was measured would be choosing a result\n"
                f"  remedy     --rounds {rounds}, or name another --out"
            )
        for block, name in schedule:
            turns.append(journal.turn(by_name[name], block))
            check(turns, journal)
    return turns


class Journal(AbstractContextManager["Journal"]):
    """The turns of one result folder: run.json says what they are of, turns.jsonl and samples.jsonl hold them.

    A turn's samples are written before it, so a turn that is there is whole; what a killed run left half is dropped.
    """

    def __init__(self, setup: Setup, kind: str, settings: Mapping[str, Any], quiet: bool = False) -> None:
        """Open the folder, made where it is missing; nothing is measured yet.

        Args:
            setup, kind, settings: must say the same as in the run that began the folder (its time-outs aside).
            quiet: show no progress.

        Raises:
            PatchError: the folder holds another run, or one that is going on, or is not one of ours.
            OSError: the folder cannot be written.
        """
        self.setup = setup
        self.folder = setup.folder
        self.progress = Progress(quiet)
        self._next = 0
        self._arms: dict[str, Arm] = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise PatchError(
                f"{self.folder}: another run measures into it now\n  remedy     wait for it, or name another --out"
            ) from None
        try:
            self._identity = {**_identity(setup), "kind": kind, "settings": dict(settings)}
            self._open()
        except BaseException:
            self._lock.close()
            raise

    def _open(self) -> None:
        file = self.folder / "run.json"
        self._turns: list[Turn] = []
        self._samples: dict[int, list[Sample]] = {}
        if not file.exists():
            taken = [name for name in ("turns.jsonl", "samples.jsonl", "result.json") if (self.folder / name).exists()]
            if taken:
                raise PatchError(
                    f"{self.folder}: holds {', '.join(taken)} and no run.json, so it cannot be continued\n"
                    f"  remedy     name another --out, or move it away"
                )
            self._write_run()
            return
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            self._arms = {name: Arm.model_validate(arm) for name, arm in found.pop("arms").items()}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise PatchError(
                f"{file}: does not say what run began here\n"
                f"  expected   what this command wrote at the beginning; the file was changed or damaged\n"
                f"  remedy     restore it, or name another --out"
            ) from None
        if differing := _differing(found, self._identity):
            said = "\n".join(f"  {name:<10} {one} in the folder, {other} now" for name, one, other in differing[:5])
            raise PatchError(
                f"{self.folder}: began as another run, and its turns cannot go on with this one\n{said}\n"
                f"  remedy     name another --out, or run what began it"
            )
        self._turns = _read(self.folder / "turns.jsonl", Turn)
        kept = {turn.index for turn in self._turns}
        samples = _read(self.folder / "samples.jsonl", Sample)
        for sample in samples:
            if sample.turn in kept:
                self._samples.setdefault(sample.turn, []).append(sample)
        wanted = len(self.setup.prompts.ids)
        for index in sorted(kept):
            if (there := len(self._samples.get(index, []))) != wanted:
                raise PatchError(
                    f"{self.folder}: samples.jsonl has {there} requests of turn {index}, and {wanted} were measured\n"
                    f"  expected   every request of a turn that turns.jsonl has: its samples were written first\n"
                    f"  remedy     restore the file, or name another --out"
                )
        if len(samples) != sum(map(len, self._samples.values())):
            self._rewrite_samples()

    def __enter__(self) -> Journal:
        self._before = signal.signal(signal.SIGTERM, _terminated)
        self.progress.__enter__()
        if self._turns:
            self.progress.say(f"{self.folder}: going on after {len(self._turns)} turns of an earlier run")
        return self

    def __exit__(self, *failure: Any) -> None:
        self.progress.__exit__(*failure)
        signal.signal(signal.SIGTERM, self._before)
        self._lock.close()

    @property
    def turns(self) -> list[Turn]:
        """All kept turns, those that this run has not yet come to included."""
        return list(self._turns)

    @property
    def arms(self) -> list[Arm]:
        """All arms of the folder."""
        return list(self._arms.values())

    def samples(self, index: int) -> list[Sample]:
        """The samples of a turn, in order of prompts."""
        return list(self._samples.get(index, []))

    def expect(self, turns: int) -> None:
        """Say how many turns there will be in all, for the time left."""
        self.progress.total = turns

    def know(self, arm: Arm) -> None:
        """Add an arm to run.json. Raises PatchError if the folder has another arm of that name."""
        known = self._arms.get(arm.name)
        if known == arm:
            return
        if known is not None:
            raise PatchError(
                f"{self.folder}: arm {arm.name} is {known.spec!r} in the folder, {arm.spec!r} now\n"
                f"  remedy     name another --out, or run what began it"
            )
        self._arms[arm.name] = arm
        self._write_run()

    def turn(self, arm: Arm, block: int) -> Turn:
        """The next turn: from an earlier run if it has one, or measured now and kept.

        Raises:
            TurnFailed: the arm could not be measured; the next call measures the turn that this one did not.
            PatchError: the earlier run's next turn is of another arm or block, or there is no space to keep it. What
                was kept before stays.
        """
        index, self._next = self._next, self._next + 1
        self.know(arm)
        if index < len(self._turns):
            turn = self._turns[index]
            if (turn.arm, turn.block) != (arm.name, block):
                raise PatchError(
                    f"{self.folder}: turn {index} is of arm {turn.arm}, block {turn.block}\n"
                    f"  expected   arm {arm.name}, block {block}\n  remedy     name another --out"
                )
            self.progress.done = index + 1
            return turn
        self.progress.done = index
        self.progress.begin(f"turn {index}, arm {arm.name}")
        try:
            turn, samples = one_turn(self.setup, arm, index, block, self.progress.phase)
            self._keep(turn, samples)
        except PatchError as error:
            self._next = index  # a caller that goes on with another arm has its turn next
            raise type(error)(f"{error}\n  kept       {self._kept()}") from None
        except OSError as error:
            raise PatchError(
                f"{error.filename or self.folder}: {error.strerror or error}: turn {index} is not kept\n"
                f"  kept       {self._kept()}\n  remedy     make space or the folder writable, then run the same again"
            ) from None
        shown = [f"{name} {turn.figures[name]:.4g}" for name in ("tokens_per_s", "verify_ms") if name in turn.figures]
        self.progress.end(", ".join(shown))
        return turn

    def _kept(self) -> str:
        return f"{len(self._turns)} turns in {self.folder}; running the same command again goes on after them"

    def _keep(self, turn: Turn, samples: list[Sample]) -> None:
        _append(self.folder / "samples.jsonl", samples)
        try:
            _append(self.folder / "turns.jsonl", [turn])
        except OSError:
            self._rewrite_samples()
            raise
        self._turns.append(turn)
        self._samples[turn.index] = samples

    def _write_run(self) -> None:
        arms = {name: arm.model_dump() for name, arm in self._arms.items()}
        replace(self.folder / "run.json", json.dumps({**self._identity, "arms": arms}, indent=1) + "\n")

    def _rewrite_samples(self) -> None:
        lines = [sample.model_dump_json() for samples in self._samples.values() for sample in samples]
        replace(self.folder / "samples.jsonl", "".join(f"{line}\n" for line in lines))


def _append(file: Path, entries: Sequence[BaseModel]) -> None:
    """Add lines and wait for the disk; if it fails, the file is as long as before."""
    with file.open("ab") as out:
        before = out.tell()
        try:
            out.write(b"".join(entry.model_dump_json().encode() + b"\n" for entry in entries))
            out.flush()
            os.fsync(out.fileno())
        except OSError:
            with suppress(OSError):
                os.truncate(file, before)
            raise


def _read(file: Path, kind: type[_Line]) -> list[_Line]:
    """The lines of a file; a last line that a killed run left half is cut off.

    Raises:
        PatchError: another line is not what it should be.
    """
    if not file.exists():
        return []
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(file, len(whole))
    found = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            found.append(kind.model_validate_json(line))
        except ValidationError as error:
            raise PatchError(
                f"{file}, line {number}: not a {kind.__name__}: {error.errors()[0]['msg']}\n"
                f"  remedy     name another --out; the file was changed, or another version wrote it"
            ) from None
    return found


def _identity(setup: Setup) -> dict[str, Any]:
    """What must be the same for turns to belong to one run; variables as far as a document compares them."""
    installed = upstream.locate()
    if installed is None:
        raise PatchError("SGLang is not installed here\n  remedy     pip install sglang-patches, which pins it")
    patches = series.load(installed.release).patches
    return {
        "model": setup.model,
        "draft": setup.draft,
        "tp": setup.tp,
        "server_args": secrets.command(setup.server_args),
        "environment": differ.same_environment(secrets.environment(setup.environ)),
        "workload": setup.workload.model_dump(),
        "code": provenance.patch_set(installed.release, patches)["id"],
        "figures": VERSION,
    }


def _differing(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str, str]]:
    """(name, value, value) of what differs, by the innermost names; as JSON has it on both sides."""
    other = json.loads(json.dumps(other))
    found: list[tuple[str, str, str]] = []
    for name in dict.fromkeys([*one, *other]):
        a, b = one.get(name), other.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differing(a, b, f"{prefix}{name}.")
        elif a != b:
            found.append((f"{prefix}{name}", json.dumps(a), json.dumps(b)))
    return found


def _terminated(*_signal: Any) -> None:
    raise SystemExit(128 + signal.SIGTERM)
