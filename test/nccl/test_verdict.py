"""Which candidate wins, and what the profile then holds."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sglang_patches.errors import PatchError
from sglang_patches.nccl import profile as profiles
from sglang_patches.nccl.candidates import AS_IT_COMES, CONTROL, Candidate, builtin, from_file, overruled, pick
from sglang_patches.nccl.group import Job
from sglang_patches.nccl.topology import Topology
from sglang_patches.nccl.tune import Measured, Plan, Run, load
from sglang_patches.nccl.verdict import decide, profile

ROWS = (1, 8, 64)
LL = Candidate("ll", {"NCCL_PROTO": "LL"})
CHANNELS = Candidate("channels", {"NCCL_MIN_NCHANNELS": "16"})
GRAPHS = Candidate("graphs", {"NCCL_MIN_NCHANNELS": "8"}, "nccl-graphs-only")
MIXING = Candidate("mixing", {"NCCL_GRAPH_MIXING_SUPPORT": "0"})
IPC = Candidate("ipc", {}, "pcie-ipc")
BY_NAME = {c.name: c for c in (Candidate(AS_IT_COMES), Candidate(CONTROL), LL, CHANNELS, GRAPHS, MIXING, IPC)}
TIMES = {AS_IT_COMES: (20.0, 27.0, 60.0), CONTROL: (20.0, 27.0, 60.0)}


def measured(times: dict[str, tuple[float, ...]], rounds: int = 3, rows: tuple[int, ...] = ROWS) -> Measured:
    """Runs whose samples scatter by 1 % around `times`; the second rank is always a little slower."""
    random = np.random.default_rng(3)
    table = TIMES | times
    runs = []
    for index in range(rounds):
        for name, values in table.items():
            samples = {}
            for size, value in zip(rows, values, strict=True):
                series = value * random.lognormal(0, 0.01, 20)
                samples[size] = [list(series * 0.9), list(series)]
            run = Run(name, index, 0, "measured", "", 1.0, samples, {"nccl": "2.30.7", "torch": "2.14.1"})
            runs.append(run)
    job = Job("nccl", 2, (), rows, 7168)
    return Measured(Plan(job, tuple(BY_NAME[name] for name in table), rounds), runs, made="2026-01-31T00:00:00+00:00")


def test_the_fastest_setting_wins_and_becomes_a_profile(tmp_path: Path) -> None:
    found = measured({"ll": (19.0, 27.0, 60.0), "channels": (12.0, 15.0, 55.0), "graphs": (11.0, 14.0, 56.0)})
    verdict = decide(found)
    assert verdict.winner == GRAPHS
    assert verdict.why.startswith("graphs takes 0.6")
    assert verdict.rounds == 3
    made = profile(found, verdict, Topology(), {"made_by": "test"})
    assert made.environment == {"NCCL_MIN_NCHANNELS": "8"}
    assert made.graphs_only
    assert made.nccl_version == "2.30.7"
    read = profiles.load(profiles.save(made, tmp_path))
    assert (read.name, read.graphs_only) == ("tuned-graphs", True)
    assert read.provenance["verdict"] == verdict.why


def test_within_the_noise_nccl_as_it_comes_is_kept_and_the_profile_says_so(tmp_path: Path) -> None:
    found = measured({"ll": (20.0, 27.0, 60.0), "channels": (20.01, 26.99, 60.0)})
    verdict = decide(found)
    assert verdict.winner is None
    assert "NCCL as it comes is kept" in verdict.why
    made = profile(found, verdict, Topology(), {})
    assert made.empty
    assert "is kept" in profiles.load(profiles.save(made, tmp_path)).provenance["verdict"]


def test_a_setting_that_is_slower_at_one_size_does_not_win() -> None:
    verdict = decide(measured({"ll": (10.0, 14.0, 70.0), "channels": (19.0, 26.0, 58.0)}))
    assert verdict.winner == CHANNELS
    assert {entry.candidate.name: entry.out for entry in verdict.entries}["ll"] == "slower at 64 rows"


def test_what_is_not_safe_for_every_caller_is_told_but_never_chosen() -> None:
    verdict = decide(measured({"mixing": (11.0, 19.0, 56.0), "channels": (19.0, 26.0, 58.0)}))
    assert verdict.winner == CHANNELS
    (note,) = verdict.notes
    assert note.startswith("mixing takes 0.7")
    assert "every communicator of the process" in note


def test_too_few_rounds_make_no_winner() -> None:
    verdict = decide(measured({"channels": (12.0, 15.0, 55.0)}, rounds=2))
    assert verdict.winner is None
    assert verdict.why == "no verdict: 2 whole rounds, and one needs 3"
    assert verdict.entries[-1].out == "measured in 2 rounds, and a winner needs 3"


def test_one_failure_is_enough_to_be_out() -> None:
    found = measured({"channels": (12.0, 15.0, 55.0)})
    found.runs.append(Run("channels", 3, 0, "wrong", "8 rows: the error is 30 times what rounding explains", 1.0))
    verdict = decide(found)
    assert verdict.winner is None
    assert verdict.entries[-1].out.startswith("wrong: 8 rows")


def test_a_setting_that_lacks_a_size_does_not_win() -> None:
    found = measured({"channels": (12.0, 15.0, 55.0)})
    for run in found.runs:
        if run.candidate == "channels":
            del run.samples[64]
    assert decide(found).entries[-1].out == "not measured at 64 rows"


def test_a_noisy_machine_is_told() -> None:
    found = measured({CONTROL: (24.0, 32.0, 70.0)})
    assert any("was not quiet" in note for note in decide(found).notes)


def test_the_noise_is_shown_as_it_is_however_many_settings_there_are() -> None:
    found = measured(dict.fromkeys(("ll", "channels", "graphs"), (20.0, 27.0, 60.0)))

    def width(name: str, candidates: int) -> float:
        plan = replace(found.plan, candidates=found.plan.candidates[:candidates])
        (told,) = (e.comparison for e in decide(replace(found, plan=plan)).entries if e.candidate.name == name)
        assert told is not None
        return told.overall.high - told.overall.low

    assert width(CONTROL, 5) == width(CONTROL, 3)
    assert width("ll", 5) > width("ll", 3)


def test_crossover_is_measured_against_the_winner_not_against_nccl_as_it_comes() -> None:
    found = measured({"channels": (12.0, 15.0, 55.0), "ipc": (6.0, 20.0, 120.0)})
    verdict = decide(found)
    assert verdict.winner == CHANNELS
    assert verdict.crossovers == {"pcie_ipc": 1}
    assert decide(measured({"ipc": (6.0, 20.0, 120.0)})).crossovers == {"pcie_ipc": 8}
    made = profile(found, verdict, Topology(), {})
    assert made.crossovers["pcie_ipc"] == profiles.Crossover(1, 7168 * 2)


@pytest.mark.parametrize("status", ["wrong", "timed out", "crashed"])
def test_a_path_that_failed_once_gets_no_crossover(status: str) -> None:
    found = measured({"channels": (12.0, 15.0, 55.0), "ipc": (6.0, 20.0, 120.0)}, rounds=4)
    assert decide(found).crossovers == {"pcie_ipc": 1}
    found.runs[-1] = Run("ipc", 3, 0, status, "8 rows: the error is 30 times what rounding explains", 1.0)
    verdict = decide(found)
    assert verdict.entries[-1].comparison is not None  # there are figures of three good rounds
    assert verdict.crossovers == {}
    assert profile(found, verdict, Topology(), {}).crossovers == {}


def test_a_setting_that_failed_is_not_praised_either() -> None:
    found = measured({"mixing": (11.0, 19.0, 56.0)})
    assert decide(found).notes
    found.runs.append(Run("mixing", 3, 0, "timed out", "after 120 s", 120.0))
    assert decide(found).notes == []


def test_chance_alone_rarely_makes_a_winner() -> None:
    """Twenty settings that are all NCCL as it comes, in processes that differ by 2 %: any winner is a false one."""
    random = np.random.default_rng(11)
    names = [AS_IT_COMES, *(f"setting-{index}" for index in range(20))]
    candidates = tuple(Candidate(name) for name in names)
    plan = Plan(Job("nccl", 1, (), ROWS, 7168), candidates, 3)
    won, tables = 0, 60
    for _ in range(tables):
        found = Measured(plan)
        for index in range(3):
            for name in names:
                process = random.lognormal(0, 0.02)
                samples = {rows: [list(20 * process * random.lognormal(0, 0.01, 9))] for rows in ROWS}
                found.runs.append(Run(name, index, 0, "measured", "", 1.0, samples))
        won += decide(found).winner is not None
    assert won <= 4  # 1.5 are expected where the interval holds what it says; resampling three rounds gave 24


def test_a_small_gain_takes_more_rounds_than_a_large_one() -> None:
    random = np.random.default_rng(5)

    def winner(factor: float, rounds: int) -> str | None:
        plan = Plan(Job("nccl", 1, (), ROWS, 7168), tuple(map(Candidate, (AS_IT_COMES, *others, "good"))), rounds)
        found = Measured(plan)
        for index in range(rounds):
            for name in (AS_IT_COMES, *others, "good"):
                process = random.lognormal(0, 0.02) * (factor if name == "good" else 1)
                samples = {rows: [list(20 * process * random.lognormal(0, 0.01, 9))] for rows in ROWS}
                found.runs.append(Run(name, index, 0, "measured", "", 1.0, samples))
        won = decide(found).winner
        return won.name if won else None

    others = [f"setting-{index}" for index in range(19)]
    assert winner(0.4, 3) == "good"
    assert winner(0.8, 5) == "good"
    assert winner(0.97, 3) is None


def test_nothing_measured_is_no_verdict() -> None:
    found = measured({"channels": (12.0, 15.0, 55.0)})
    found.runs = [Run(AS_IT_COMES, 0, 0, "crashed", "rank 0: exit code 1", 1.0)]
    verdict = decide(found)
    assert verdict.winner is None
    assert "could not be measured (crashed: rank 0: exit code 1)" in verdict.why


def test_the_slowest_rank_counts() -> None:
    found = measured({})
    assert found.table(AS_IT_COMES)[1][0] == found.runs[0].samples[1][1]


def test_a_document_is_read_back_whole(tmp_path: Path) -> None:
    found = measured({"graphs": (11.0, 14.0, 56.0)})
    found.runs.append(Run("graphs", 3, 1, "timed out", "after 60 s", 60.0, {}, {}, {1: "declined"}))
    file = tmp_path / "results.json"
    file.write_text(json.dumps(found.document()))
    again, made_by = load(file)
    assert (again, made_by) == (found, {})
    packed = tmp_path / "results.json.gz"
    packed.write_bytes(gzip.compress(json.dumps({**found.document(), "provenance": {"a": 1}}).encode()))
    assert load(packed) == (found, {"a": 1})
    file.write_text(json.dumps({**found.document(), "format": 99}))
    with pytest.raises(ValueError, match="format 99, expected 1"):
        load(file)
    file.write_text("[")
    with pytest.raises(ValueError, match="not the results of `nccl tune`"):
        load(file)


def test_candidates_differ_and_only_set_what_nccl_reads() -> None:
    found = builtin("nccl")
    assert [candidate.name for candidate in found[:2]] == [AS_IT_COMES, CONTROL]
    assert not found[0].environment
    assert not found[1].environment
    seen = [(tuple(sorted(c.environment.items())), c.path) for c in found[1:]]
    assert len(set(seen)) == len(seen)
    assert all(name.startswith("NCCL_") for candidate in found for name in candidate.environment)


def test_picking_keeps_the_baseline_and_names_what_it_does_not_know() -> None:
    assert [c.name for c in pick(builtin("nccl"), ["story"])] == [AS_IT_COMES, CONTROL, "story"]
    assert len(pick(builtin("nccl"), [])) == len(builtin("nccl"))
    with pytest.raises(PatchError, match=r"unknown candidate: typo\n  known .*story"):
        pick(builtin("nccl"), ["typo"])
    with pytest.raises(PatchError, match="two candidates have one name: story"):
        pick([*builtin("nccl"), Candidate("story")], [])


def test_a_users_own_variable_rules_a_candidate_out() -> None:
    assert overruled(LL, {"NCCL_PROTO": "Simple"}) == "you have set NCCL_PROTO=Simple, and your own variables win"
    assert overruled(LL, {"NCCL_PROTO": "LL", "NCCL_P2P_DISABLE": "1"}) == ""


@pytest.mark.parametrize("text", ["{", "[1]", '[{"environment": {}}]', '[{"name": "a", "environment": []}]', "3"])
def test_a_bad_file_of_candidates_is_an_error_that_shows_the_form(tmp_path: Path, text: str) -> None:
    file = tmp_path / "candidates.json"
    file.write_text(text)
    with pytest.raises(PatchError, match=r'not a list of candidates(.|\n)*expected   \[\{"name"'):
        from_file(file)
    file.write_text('[{"name": "a", "environment": {"NCCL_NTHREADS": 256}}]')
    assert from_file(file) == [Candidate("a", {"NCCL_NTHREADS": "256"})]


RESULTS = Path(__file__).parents[2] / "benchmark" / "allreduce" / "results" / "2xh200-nccl2.30.7"


def test_recorded_results_still_give_their_verdict() -> None:
    off, made_by = load(RESULTS / "peer-access-off.json")
    assert made_by["versions"]["nccl"] == "2.30.7"
    verdict = decide(off)
    assert (verdict.winner, verdict.rounds) == (None, 2)
    found = {entry.candidate.name: entry.comparison for entry in verdict.entries}
    graphs, story = found["graphs-only-min-channels-16"], found["story"]
    assert graphs is not None
    assert story is not None
    assert graphs.overall.value == pytest.approx(0.51, abs=0.01)
    assert story.ratio[64].low > 1.6
    again, _ = load(RESULTS / "peer-access-off-2.json")
    assert decide(again).why.startswith("graphs-only-min-channels-16 takes 0.5")
    on, _ = load(RESULTS / "peer-access-on.json")
    assert decide(on).why.startswith("graphs-only takes 0.35 of the time")


def test_the_readme_quotes_the_recorded_results() -> None:
    text = (RESULTS.parents[1] / "README.md").read_text()
    for name in ("peer-access-off", "peer-access-off-2", "peer-access-on"):
        found, _ = load(RESULTS / f"{name}.json")
        comparisons = {e.candidate.name: e.comparison for e in decide(found).entries if e.comparison}
        best = comparisons["graphs-only" if name == "peer-access-on" else "graphs-only-min-channels-16"].overall
        assert f"{best.low:.2f} to {best.high:.2f}" in text
        if name == "peer-access-off-2":
            continue  # in words, not in a table
        rows = {"as-it-comes": "NCCL as it comes", "graphs-only": "communicator for graphs alone"}
        for candidate, words in rows.items():
            times = " | ".join(f"{median.value:.1f}" for median in comparisons[candidate].median.values())
            assert f"| {words} | {times} | " in text
