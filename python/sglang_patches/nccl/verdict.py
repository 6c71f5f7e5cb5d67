"""From raw samples to a decision: which candidate, if any, is better than NCCL as it comes, and up to which size."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_patches.nccl.candidates import AS_IT_COMES, CONTROL, Candidate
from sglang_patches.nccl.intervals import Comparison, compare, crossover
from sglang_patches.nccl.profile import PCIE_IPC, Crossover, Profile
from sglang_patches.nccl.topology import Topology
from sglang_patches.nccl.tune import Measured

#: With fewer rounds an interval knows too little of what differs from process to process; with these few only a large
#: gain shows beyond chance.
MIN_ROUNDS = 3
#: A winner may not be slower than this at any size (the lower end of its interval decides).
_NO_SLOWER_THAN = 1.03

_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_CROSSOVER_NAMES = {"pcie-ipc": PCIE_IPC, "custom": "custom"}


@dataclass
class Entry:
    """One candidate: how it did (None where it has no figures), and why it may not win."""

    candidate: Candidate
    comparison: Comparison | None
    out: str = ""


@dataclass
class Verdict:
    """The decision. `winner` is None where NCCL as it comes is kept; `why` says it in one sentence either way.

    Attributes:
        rounds: in how many NCCL as it comes was measured well.
        crossovers: all-reduce path -> rows up to which it beats NCCL with the winner's settings.
    """

    entries: list[Entry]
    winner: Candidate | None
    why: str
    rounds: int = 0
    crossovers: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """All of it, JSON-able."""
        return {
            "winner": self.winner.name if self.winner else None,
            "why": self.why,
            "crossover_rows": self.crossovers,
            "notes": self.notes,
            "candidates": {
                entry.candidate.name: {
                    "out": entry.out,
                    "comparison": asdict(entry.comparison) if entry.comparison else None,
                }
                for entry in self.entries
            },
        }


def decide(measured: Measured) -> Verdict:
    """Compare every candidate with NCCL as it comes, over the rounds both finished, and pick.

    The winner is the NCCL setting with the least geometric mean of the ratios over all sizes, among those whose
    interval, widened for the number of settings compared, lies below 1, and that are significantly slower at no size.
    Neither a setting nor a path that failed in any round (wrong sums, a hang, a crash) is installed.
    """
    base = measured.table(AS_IT_COMES)
    settings = [c for c in measured.plan.candidates if c.is_nccl and c.name not in (AS_IT_COMES, CONTROL)]
    comparisons = max(len(settings), 1)
    entries = []
    for candidate in measured.plan.candidates:
        table = measured.table(candidate.name)
        # The control is one comparison named beforehand, not the best of many: widened it would hide the noise.
        among = 1 if candidate.name == CONTROL else comparisons
        found = compare(table, base, comparisons=among) if table else None
        entries.append(Entry(candidate, found, _out(measured, candidate, found, set(base))))
    able = [
        entry for entry in entries if not entry.out and entry.comparison and entry.comparison.overall.high < 1
    ]  # fmt: skip
    able.sort(key=lambda entry: entry.comparison.overall.value if entry.comparison else 1.0)
    winner = able[0].candidate if able else None
    rounds = next((e.comparison.rounds for e in entries if e.candidate.name == AS_IT_COMES and e.comparison), 0)
    verdict = Verdict(entries, winner, _why(able, entries, rounds), rounds)
    reference = measured.table(winner.name) if winner else base
    for entry in entries:
        name = _CROSSOVER_NAMES.get(entry.candidate.path)
        # A path that summed wrongly, hung or crashed even once is no path to take, whatever its other rounds say.
        if not name or measured.failure(entry.candidate.name):
            continue
        if entry.comparison and entry.comparison.rounds >= MIN_ROUNDS:
            against = compare(measured.table(entry.candidate.name), reference)
            if against and against.rounds >= MIN_ROUNDS and (rows := crossover(against.ratio)):
                verdict.crossovers[name] = rows
    verdict.notes += _notes(measured, entries)
    return verdict


def _out(measured: Measured, candidate: Candidate, found: Comparison | None, sizes: set[int]) -> str:
    if failure := measured.failure(candidate.name):
        return f"{failure[0]}: {failure[1]}"
    if candidate.name == AS_IT_COMES:
        return "the baseline"
    if candidate.name == CONTROL:
        return "the baseline again, to show the noise"
    if found is None:
        return "not measured in a round that the baseline finished too"
    if not candidate.is_nccl:
        return "not a setting of NCCL"
    if candidate.unsafe:
        return candidate.unsafe
    if found.rounds < MIN_ROUNDS:
        return f"measured in {found.rounds} rounds, and a winner needs {MIN_ROUNDS}"
    if missing := sizes - set(found.ratio):
        return f"not measured at {', '.join(map(str, sorted(missing)))} rows"
    slower = [rows for rows, ratio in found.ratio.items() if ratio.low > _NO_SLOWER_THAN]
    return f"slower at {', '.join(map(str, slower))} rows" if slower else ""


def _why(able: list[Entry], entries: list[Entry], rounds: int) -> str:
    if not able or able[0].comparison is None:
        failed = next((e.out for e in entries if e.candidate.name == AS_IT_COMES and e.out != "the baseline"), "")
        if failed:
            return f"NCCL as it comes could not be measured ({failed}): there is nothing to compare with"
        if rounds < MIN_ROUNDS:
            return f"no verdict: {rounds} whole rounds, and one needs {MIN_ROUNDS}"
        return "NCCL as it comes is kept: no setting that may be used is better beyond chance"
    best = able[0].comparison.overall
    return (
        f"{able[0].candidate.name} takes {best.value:.2f} of the time of NCCL as it comes "
        f"(interval {best.low:.2f} to {best.high:.2f}, geometric mean over the sizes, "
        f"{able[0].comparison.rounds} rounds)"
    )


def _notes(measured: Measured, entries: list[Entry]) -> list[str]:
    notes = []
    control = next((e.comparison for e in entries if e.candidate.name == CONTROL), None)
    if control and control.rounds >= MIN_ROUNDS and not control.overall.low <= 1 <= control.overall.high:
        notes.append(
            f"NCCL as it comes differs from itself ({control.overall.low:.3f} to {control.overall.high:.3f}): the "
            f"machine was not quiet, and differences of this size mean nothing"
        )
    barred = [
        e for e in entries
        if e.out == e.candidate.unsafe != "" and e.comparison and e.comparison.overall.high < 1
    ]  # fmt: skip
    if barred:
        best = min(barred, key=lambda entry: entry.comparison.overall.value if entry.comparison else 1.0)
        assert best.comparison is not None
        notes.append(
            f"{best.candidate.name} takes {best.comparison.overall.value:.2f} of the time, but {best.candidate.unsafe}"
        )
    if measured.interrupted:
        notes.append(f"not all rounds were run: {measured.interrupted}")
    return notes


def profile(measured: Measured, verdict: Verdict, topology: Topology, provenance: dict[str, Any]) -> Profile:
    """What the server will use on hosts of this make with this NCCL; keeps NCCL as it comes where nothing won."""
    job = measured.plan.job
    row_bytes = job.hidden * _ELEMENT_BYTES[job.dtype]
    winner = verdict.winner
    return Profile(
        name=f"tuned-{winner.name if winner else AS_IT_COMES}",
        environment={k: v for k, v in winner.environment.items() if k.startswith("NCCL_")} if winner else {},
        graphs_only=bool(winner and winner.path == "nccl-graphs-only"),
        fingerprint=topology.fingerprint(),
        nccl_version=str(measured.versions().get("nccl", "none")),
        crossovers={name: Crossover(rows, rows * row_bytes) for name, rows in verdict.crossovers.items()},
        provenance={**provenance, "verdict": verdict.why},
    )
