"""The measuring behind `sglang-patches nccl tune`: candidates in interleaved rounds, each in fresh processes."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sglang_patches.nccl.candidates import Candidate, overruled
from sglang_patches.nccl.group import Group, Job, Outcome
from sglang_patches.nccl.settings import Settings

FORMAT = 1
_IMPORT_TIMEOUT = 180.0  # seconds; only Python's imports, on a busy machine


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        rounds: how often each candidate is measured, each time in fresh processes, in a new random order.
        timeout: seconds that one measurement may take once its processes have started.
        seconds: no measurement begins after so long; 0 for no limit. Rounds that are whole by then count.
        ahead: groups whose processes start, and import torch, together; only one at a time then runs.
        stop_after: a candidate that failed so often (hung, crashed, wrong) is not tried again.
    """

    job: Job
    candidates: tuple[Candidate, ...]
    rounds: int = 5
    timeout: float = 120.0
    seconds: float = 0.0
    seed: int = 1
    ahead: int = 1
    stop_after: int = 1


@dataclass
class Run:
    """One candidate in one round. `samples`: rows -> rank -> microseconds of each replay."""

    candidate: str
    round: int
    order: int
    status: str
    reason: str
    seconds: float
    samples: dict[int, list[list[float]]] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)


@dataclass
class Measured:
    """All runs so far. `interrupted`: Ctrl-C, or the time limit, ended it before the last round."""

    plan: Plan
    runs: list[Run] = field(default_factory=list)
    interrupted: str = ""
    made: str = ""

    def table(self, candidate: str) -> dict[int, dict[int, list[float]]]:
        """rows -> round -> microseconds of each replay, of the slowest rank; only of rounds that went well."""
        found: dict[int, dict[int, list[float]]] = {}
        for run in self.runs:
            if run.candidate == candidate and run.status == "measured":
                for rows, ranks in run.samples.items():
                    found.setdefault(rows, {})[run.round] = [max(values) for values in zip(*ranks, strict=False)]
        return found

    def failure(self, candidate: str) -> tuple[str, str] | None:
        """(status, reason) of its first run that did not go well."""
        for run in self.runs:
            if run.candidate == candidate and run.status not in ("measured", "interrupted"):
                return run.status, run.reason
        return None

    def versions(self) -> dict[str, Any]:
        """Of torch, CUDA and NCCL, as the ranks told them."""
        return next((run.versions for run in self.runs if run.versions), {})

    def document(self) -> dict[str, Any]:
        """Raw samples and all that made them, JSON-able."""
        plan = asdict(self.plan)
        plan["job"].pop("folder")
        return {
            "format": FORMAT,
            "made": self.made,
            "interrupted": self.interrupted,
            "plan": plan,
            "versions": self.versions(),
            "runs": [asdict(run) for run in self.runs],
        }


@dataclass(frozen=True)
class Progress:
    """Where the measurement stands: `left` is seconds, None until something has been timed."""

    done: int
    total: int
    candidate: str
    round: int
    left: float | None


def measure(
    plan: Plan,
    settings: Settings,
    *,
    progress: Callable[[Progress], None] = lambda _: None,
    save: Callable[[Measured], None] = lambda _: None,
) -> Measured:
    """Measure all candidates in all rounds.

    Args:
        settings: the environment of "NCCL as it comes"; candidates add to it.
        save: called after every run, so that nothing measured is ever lost.

    Returns:
        What was measured, also after Ctrl-C.
    """
    measured = Measured(plan, made=datetime.now(UTC).isoformat(timespec="seconds"))
    order = random.Random(plan.seed)
    begun = time.monotonic()
    queue = _skip(plan, settings, measured)
    total, done = len(queue) * plan.rounds, 0
    scratch = Path(tempfile.mkdtemp(prefix="sglang-patches-nccl-"))
    try:
        for number in range(plan.rounds):
            turn = [candidate for candidate in queue if _failures(measured, candidate.name) < plan.stop_after]
            order.shuffle(turn)
            for start in range(0, len(turn), plan.ahead):
                batch = turn[start : start + plan.ahead]
                if plan.seconds and time.monotonic() - begun > plan.seconds:
                    measured.interrupted = f"the limit of {plan.seconds:.0f} s was reached in round {number + 1}"
                    return measured
                for index, candidate, outcome in _batch(plan, settings, batch, scratch, measured, number, progress,
                                                        begun, done, total):  # fmt: skip
                    measured.runs.append(_run(candidate, number, start + index, outcome))
                    done += 1
                    save(measured)
            done = len(queue) * (number + 1)
    except KeyboardInterrupt:
        measured.interrupted = "Ctrl-C"
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        save(measured)
    return measured


def _batch(
    plan: Plan, settings: Settings, batch: list[Candidate], scratch: Path, measured: Measured, number: int,
    progress: Callable[[Progress], None], begun: float, done: int, total: int,
) -> Any:  # fmt: skip
    """Start the groups of a batch together, then run one after the other; yields (index, candidate, outcome)."""
    groups: list[Group] = []
    try:
        for index, candidate in enumerate(batch):
            job = _job(plan, candidate)
            folder = scratch / f"{number}-{candidate.name}-{len(measured.runs)}-{index}"
            groups.append(Group(job, folder, {**settings.environment, **candidate.environment}))
        for group in groups:
            group.prepare(_IMPORT_TIMEOUT)
        for index, (candidate, group) in enumerate(zip(batch, groups, strict=True)):
            spent = time.monotonic() - begun
            left = spent / (done + index) * (total - done - index) if done + index else None
            progress(Progress(done + index, total, candidate.name, number, left))
            yield index, candidate, group.run(plan.timeout)
    finally:
        for group in groups:
            group.end()


def _job(plan: Plan, candidate: Candidate) -> Job:
    return replace(plan.job, paths=(candidate.path,))


def _skip(plan: Plan, settings: Settings, measured: Measured) -> list[Candidate]:
    """The candidates that mean something here; the others are recorded as not run."""
    mine = {name: settings.environment[name] for name, by in settings.by.items() if by == "you"}
    queue = []
    for candidate in plan.candidates:
        why = overruled(candidate, mine)
        if why:
            measured.runs.append(Run(candidate.name, 0, 0, "cannot run", why, 0.0))
        else:
            queue.append(candidate)
    return queue


def _failures(measured: Measured, name: str) -> int:
    failed = [run for run in measured.runs if run.candidate == name and run.status != "measured"]
    # What cannot run never will.
    return len(failed) + 10**6 * any(run.status == "cannot run" for run in failed)


def _run(candidate: Candidate, number: int, order: int, outcome: Outcome) -> Run:
    first = outcome.ranks[0] if outcome.ranks else {}
    sizes = first.get("sizes", {}).get(candidate.path, {})
    skipped = {int(rows): size["skipped"] for rows, size in sizes.items() if "skipped" in size}
    return Run(
        candidate.name, number, order, outcome.status, outcome.reason, round(outcome.seconds, 2),
        outcome.samples(candidate.path), first.get("versions", {}), skipped,
    )  # fmt: skip


def load(file: Path) -> tuple[Measured, dict[str, Any]]:
    """Read what `nccl tune` wrote, also gzipped: the runs, and what made them (`provenance.document`).

    Raises:
        ValueError: no such file, or one of another format.
    """
    try:
        text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        data = json.loads(text)
        found = data.get("format")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{file}: not the results of `nccl tune`: {error}") from error
    if found != FORMAT:
        raise ValueError(f"{file}: format {found!r}, expected {FORMAT}\n  remedy     use the release that wrote it")
    plan = dict(data["plan"])
    entry = plan.pop("job")
    job = Job(**{**entry, "paths": tuple(entry["paths"]), "rows": tuple(entry["rows"])})
    candidates = tuple(Candidate(**entry) for entry in plan.pop("candidates"))
    runs = [
        Run(**{
            **run,
            "samples": {int(rows): ranks for rows, ranks in run["samples"].items()},
            "skipped": {int(rows): why for rows, why in run["skipped"].items()},
        })
        for run in data["runs"]
    ]  # fmt: skip
    measured = Measured(Plan(job, candidates, **plan), runs, data["interrupted"], data["made"])
    return measured, data.get("provenance", {})
