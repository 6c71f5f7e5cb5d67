"""`sglang-patches nccl check`: what is set, what each rank's process sees of it, and what NCCL says that it took."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sglang_patches.nccl import debug_log
from sglang_patches.nccl.bindings import names_variable
from sglang_patches.nccl.group import Group, Job, Outcome
from sglang_patches.nccl.settings import Settings

Verdict = Literal["taken", "not told", "not taken"]

#: What `check` itself needs, whatever is set: NCCL's log, one file a rank.
_LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,TUNING"}

#: Variables that NCCL does not log when it reads them.
_SILENT = {"NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", "NCCL_CONF_FILE", "NCCL_DEBUG_TIMESTAMP_FORMAT"}

#: Set by NVIDIA's container images, for people to read.
_VERSION = "NCCL_VERSION"

#: Named like NCCL's, read by torch's process group.
_TORCH = {
    "NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG", "NCCL_ENABLE_TIMING",
    "NCCL_TRACE_BUFFER_SIZE", "NCCL_AVOID_RECORD_STREAMS", "NCCL_USE_COMM_NONBLOCKING",
}  # fmt: skip

#: Read by every all-reduce within one host, so that silence means that it was not taken.
_ALWAYS_READ = {
    "NCCL_PROTO", "NCCL_ALGO", "NCCL_P2P_LEVEL", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_BUFFSIZE",
    "NCCL_NTHREADS", "NCCL_GRAPH_MIXING_SUPPORT", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One variable.

    Attributes:
        wanted: the value set, None where a process has one that nobody set; `by`: who set it.
        seen: the value in the processes (Python's and C's view alike on all ranks, else what differs).
        told: what NCCL logged, None for nothing.
        why: for people, where the verdict is not simply "taken".
    """

    name: str
    wanted: str | None
    by: str
    seen: str
    told: str | None
    verdict: Verdict
    why: str = ""


@dataclass
class Result:
    """A whole check; `problems` is empty if all is well."""

    settings: Settings
    outcome: Outcome
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """All of it, JSON-able."""
        return {
            "ok": not self.problems,
            "problems": self.problems,
            "variables": [asdict(row) for row in self.rows],
            "facts": self.facts,
            "profile": self.settings.profile_document(),
            "all_reduce": {"status": self.outcome.status, "reason": self.outcome.reason},
        }


def run(
    settings: Settings, *, backend: str, world: int, hidden: int, timeout: float, keep: Path | None = None
) -> Result:
    """Start a process group with these settings, let it all-reduce in a graph and eagerly, and read NCCL's log.

    Args:
        keep: a folder to copy the logs to.
    """
    in_graph = "nccl-graphs-only" if settings.profile.graphs_only else "nccl"
    paths = ("gloo",) if backend == "gloo" else (in_graph, "torch-nccl")
    job = Job(backend, world, paths, rows=(1, 64), hidden=hidden, calls=1, replays=3, warmups=1)
    with tempfile.TemporaryDirectory(prefix="sglang-patches-nccl-") as scratch:
        folder = Path(scratch) / "check"
        log = {} if backend == "gloo" else {**_LOG, "NCCL_DEBUG_FILE": str(folder / "nccl%RANK%.log")}
        group = Group(job, folder, {**settings.environment, **log})
        try:
            group.prepare(timeout)
            outcome = group.run(timeout)
        finally:
            group.end()
        if keep:
            keep.mkdir(parents=True, exist_ok=True)
            for file in folder.glob("nccl*.log"):
                shutil.copy(file, keep)
        logs = []
        for rank in range(world):
            file = folder / f"nccl{rank}.log"
            logs.append(debug_log.read(file.read_text(errors="replace").splitlines() if file.exists() else []))
    return judge(settings, outcome, logs, own=log)


def judge(settings: Settings, outcome: Outcome, logs: list[debug_log.Told], own: Mapping[str, str]) -> Result:
    """Compare what was set with what the ranks saw and what their NCCL logged.

    Args:
        own: variables that `check` set for itself; they are no part of the comparison.
    """
    result = Result(settings, outcome)
    if outcome.status != "measured":
        result.problems.append(f"the all-reduce {outcome.status}: {outcome.reason}")
    for path, why in (outcome.ranks[0].get("cannot_run", {}) if outcome.ranks else {}).items():
        result.problems.append(f"{path} cannot run: {why}")
    joined = [(rank, found) for rank, found in enumerate(outcome.ranks) if "python_environment" in found]
    uses_nccl = any("nccl" in found["versions"] for _, found in joined)
    library = next((Path(found["versions"]["nccl_file"]) for _, found in joined if uses_nccl), None)
    seen_names = {name for _, found in joined for name in {**found["python_environment"], **_last(found)}}
    for name in sorted({*settings.by, *seen_names} - set(own)):
        row = _row(name, settings, joined, logs, library, uses_nccl)
        result.rows.append(row)
        if row.verdict == "not taken":
            result.problems.append(f"{name}: {row.why}")
    if settings.profile.graphs_only and uses_nccl:
        # 1: for graphs alone, in stream order; a variable can put it back to 2.
        for rank, log in enumerate(logs):
            if 1 not in log.graph_modes:
                result.problems.append(
                    f"profile {settings.profile.name} wants a communicator for graphs alone, and NCCL on rank {rank} "
                    f"did not log graphUsageMode 1"
                )
    result.facts = _facts(joined, logs)
    return result


def _last(found: Mapping[str, Any]) -> dict[str, str]:
    return found.get("c_environment_after", found["c_environment"])


def _row(
    name: str, settings: Settings, joined: list[tuple[int, dict[str, Any]]], logs: list[debug_log.Told],
    library: Path | None, uses_nccl: bool,
) -> Row:  # fmt: skip
    wanted, by = settings.environment.get(name), settings.by.get(name, "nobody")
    views = {}
    for rank, found in joined:
        views[f"rank {rank}, os.environ"] = found["python_environment"].get(name)
        views[f"rank {rank}, getenv"] = found["c_environment"].get(name)
        if _last(found).get(name) != found["c_environment"].get(name):
            views[f"rank {rank}, getenv once NCCL had started"] = _last(found).get(name)
    differing = {where: value for where, value in views.items() if value != wanted}
    told = {rank: log.taken[name] for rank, log in enumerate(logs) if name in log.taken}
    refused = {rank: log.refused[name] for rank, log in enumerate(logs) if name in log.refused}
    seen = wanted or "-"
    if differing:
        seen = "; ".join(f"{where}: {'unset' if value is None else value}" for where, value in differing.items())
    row = Row(name, wanted, by, seen, ", ".join(dict.fromkeys(told.values())) or None, "taken")
    if wanted is None:
        # NCCL's own configuration file (/etc/nccl.conf, ~/.nccl.conf) shows like this.
        why = "nobody set it: a configuration file of NCCL's, sitecustomize or other start-up code did"
        return replace(row, verdict="not taken" if by != "nobody" else "not told", why=why)
    if differing:
        return replace(row, verdict="not taken", why=f"set to {wanted}, but {seen}")
    if refused:
        rank, text = next(iter(refused.items()))
        return replace(row, verdict="not taken", told=text, why=f"NCCL on rank {rank}: {text}")
    if wrong := {rank: value for rank, value in told.items() if not debug_log.same_value(wanted, value)}:
        rank, value = next(iter(wrong.items()))
        return replace(row, verdict="not taken", why=f"set to {wanted}, and NCCL on rank {rank} took {value}")
    if told:
        return row
    return _silent(row, settings, library, uses_nccl)


def _silent(row: Row, settings: Settings, library: Path | None, uses_nccl: bool) -> Row:
    """A variable that the processes have and NCCL's log does not name."""
    name = row.name
    if not uses_nccl:
        return replace(row, verdict="not told", why="no NCCL in a gloo group")
    if name in _TORCH:
        return replace(row, verdict="not told", why="torch reads it, not NCCL")
    if name == _VERSION:
        return replace(
            row, verdict="not told", why="no setting: NVIDIA's container images say with it what they install"
        )
    if library is not None and not names_variable(library, name):
        return replace(row, verdict="not taken", why=f"{library} has no such variable: misspelt, or of another release")
    if name in _SILENT:
        return replace(row, verdict="not told", why="NCCL does not log it")
    if name == "NCCL_P2P_LEVEL" and settings.environment.get("NCCL_P2P_DISABLE") == "1":
        return replace(row, verdict="not taken", why="NCCL_P2P_DISABLE=1 overrules it")
    if name in _ALWAYS_READ:
        return replace(row, verdict="not taken", why="NCCL logs this variable when it takes it, and did not")
    if name == "NCCL_P2P_DISABLE" and row.wanted != "1":
        return replace(row, verdict="not told", why="NCCL logs it only where it is 1")
    return replace(row, verdict="not told", why="not needed for this all-reduce, or not logged")


def _facts(joined: list[tuple[int, dict[str, Any]]], logs: list[debug_log.Told]) -> dict[str, Any]:
    """What NCCL chose, for people and for the JSON."""
    facts: dict[str, Any] = {}
    if joined:
        facts["versions"] = joined[0][1]["versions"]
    if logs and logs[0].channels:
        facts["channels"] = logs[0].channels
    if logs and logs[0].graph_modes:
        facts["graph_usage_modes"] = logs[0].graph_modes
    if choices := [choice for log in logs for choice in log.choices]:
        facts["choices"] = [asdict(choice) for choice in dict.fromkeys(choices)]
    return facts
