"""check and tune end to end, in real processes over gloo: what goes well, and all-reduces that do not."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_patches.document import schema
from sglang_patches.nccl.group import Group, Job
from sglang_patches.nccl.paths import path_class

HERE = Path(__file__).parent
LONG = 150.0  # seconds no test reaches unless something is broken


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [more.pop("FIRST", ""), str(HERE), os.environ.get("PYTHONPATH", "")]))
    mine = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    return {**mine, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def command(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "sglang_patches.cli", "nccl", *arguments]
    return subprocess.run(line, capture_output=True, text=True, env=environment(**more), timeout=LONG)


def group(tmp_path: Path, *paths: str) -> Group:
    job = Job("gloo", 2, paths, rows=(1, 2), hidden=16, calls=2, replays=3, warmups=1)
    return Group(job, tmp_path / "group", environment(FAULTS_CHILD=str(tmp_path / "child")))


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def gone(pids: list[int], seconds: float = 15) -> bool:
    end = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pids)


def test_a_rank_that_hangs_is_timed_out_and_killed_and_what_was_measured_is_kept(tmp_path: Path) -> None:
    made = group(tmp_path, "nccl_faults:Hangs")
    made.prepare(LONG)
    pids = [process.pid for process in made._processes]
    assert len(alive(pids)) == 2
    outcome = made.run(8)
    assert outcome.status == "timed out"
    assert "after 8 s (rank 0: sizes done: nccl_faults:Hangs 1, rank 1: sizes done:" in outcome.reason
    assert list(outcome.samples("nccl_faults:Hangs")) == [1]
    assert not alive(pids)


def test_a_rank_that_crashes_ends_the_group_at_once(tmp_path: Path) -> None:
    made = group(tmp_path, "nccl_faults:Crashes")
    made.prepare(LONG)
    started = time.monotonic()
    outcome = made.run(LONG)
    assert time.monotonic() - started < LONG / 2
    assert outcome.status == "crashed"
    assert outcome.reason == f"rank 1: killed by signal {int(signal.SIGSEGV)}: about to fall"
    assert outcome.samples("nccl_faults:Crashes") == {}


@pytest.mark.parametrize(("fault", "status"), [("HangsCompiling", "timed out"), ("CrashesCompiling", "crashed")])
def test_what_a_rank_started_ends_with_it(tmp_path: Path, fault: str, status: str) -> None:
    made = group(tmp_path, f"nccl_faults:{fault}")
    made.prepare(LONG)
    outcome = made.run(8)
    child = int((tmp_path / "child").read_text())
    ended = gone([child])
    if not ended:
        os.kill(child, signal.SIGKILL)
    assert outcome.status == status
    assert ended
    made.end()  # again, as `tune` does: no process is left that it could hit


def test_a_rank_that_cannot_be_ended_is_told_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_patches.nccl.group._PATIENCE", 0.5)
    made = group(tmp_path, "nccl_faults:Hangs")
    made.prepare(LONG)
    pids = [process.pid for process in made._processes]
    # Signals do not reach a process that waits inside a driver; here they do not because nobody sends them.
    monkeypatch.setattr("sglang_patches.nccl.group.os.killpg", lambda *_: None)
    started = time.monotonic()
    outcome = made.run(4)
    made.end()
    assert time.monotonic() - started < 10
    monkeypatch.undo()
    for pid in alive(pids):
        os.kill(pid, signal.SIGKILL)
    assert outcome.status == "timed out"
    for rank, pid in enumerate(pids):
        assert outcome.reason.count(f"rank {rank} (process {pid}) cannot be ended") == 1
    assert gone(pids)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("tune")
    faults = ("Raises", "SumsWrongly", "LeavesOneOut", "OnlyOnRankZero")
    file = folder / "candidates.json"
    file.write_text(json.dumps([{"name": name, "path": f"nccl_faults:{name}"} for name in faults]))
    return (
        folder / "out",
        command(
            "tune", "--tp", "2", "--backend", "gloo", "--hidden", "16", "--rows", "2,1", "--rounds", "3",
            "--replays", "3", "--calls", "2", "--out", str(folder / "out"), "--candidates", str(file),
            "--only", ",".join(faults), SGLANG_PATCHES_PROFILES=str(folder / "installed"),
        ),
    )  # fmt: skip


def test_tune_measures_what_runs_and_records_what_does_not(tuned: tuple[Path, Any]) -> None:
    out, done = tuned
    assert done.returncode == 0, done.stderr
    results = json.loads((out / "results.json").read_text())
    ended: dict[str, list[tuple[str, str]]] = {}
    for run in results["runs"]:
        ended.setdefault(run["candidate"], []).append((run["status"], run["reason"]))
    assert ended["as-it-comes"] == ended["as-it-comes-again"] == [("measured", "")] * 3
    ((status, reason),) = ended["Raises"]
    assert (status, reason[:20]) == ("crashed", "rank 0: exit code 1:")
    assert reason.endswith("RuntimeError: no such communicator")
    ((status, reason),) = ended["SumsWrongly"]
    assert status == "wrong"
    assert reason.startswith("nccl_faults:SumsWrongly, 1 rows, rank 1: the error is ")
    ((status, reason),) = ended["LeavesOneOut"]
    assert (status, reason.split(": ")[1]) == ("wrong", "the error is inf times what rounding explains")
    assert ended["OnlyOnRankZero"] == [("cannot run", "no peer access from rank 1")]
    for name in ("Raises", "SumsWrongly", "LeavesOneOut", "OnlyOnRankZero"):
        assert f"{name}: {ended[name][0][0]}: " in done.stdout.replace("\n", " ")


def test_tune_keeps_raw_samples_and_says_what_made_them(tuned: tuple[Path, Any]) -> None:
    out, done = tuned
    results = json.loads((out / "results.json").read_text())
    for run in results["runs"]:
        if run["status"] == "measured":
            assert {rows: [len(series) for series in ranks] for rows, ranks in run["samples"].items()} == {
                "1": [3, 3],
                "2": [3, 3],
            }
    # Interleaved: round after round, each with every candidate that has not failed, in the order it says.
    runs = [(run["round"], run["order"]) for run in results["runs"]]
    sizes = [sum(1 for index, _ in runs if index == number) for number in range(3)]
    assert runs == [(number, order) for number in range(3) for order in range(sizes[number])]
    assert sizes == [6, 2, 2]
    for number in (1, 2):
        names = sorted(run["candidate"] for run in results["runs"] if run["round"] == number)
        assert names == ["as-it-comes", "as-it-comes-again"]
    made_by = results["provenance"]
    assert made_by["versions"]["torch"] == results["versions"]["torch"]
    document = schema.parse(results, "results.json")
    assert document.code.release == "0.5.23"
    assert "libtorch_cpu.so" in {library.name for library in document.processes[0].libraries}
    assert len(made_by["nccl_package_sha256"]) == 64
    assert made_by["set_by"]["NCCL_CUMEM_ENABLE"] == "upstream"
    assert results["plan"]["job"]["rows"] == [1, 2]
    (profile,) = (file for file in out.glob("*.json") if file.name != "results.json")
    written = json.loads(profile.read_text())
    assert written["name"] == "tuned-as-it-comes"
    assert "NCCL as it comes is kept" in written["provenance"]["verdict"]
    assert written["provenance"]["patch_set_id"] == document.code.id
    assert schema.find(written) is None
    assert not (out.parent / "installed").exists()
    assert "s left" in done.stderr
    again = command("report", str(out / "results.json"))
    assert again.returncode == 0, again.stderr
    assert again.stdout in done.stdout


def test_ctrl_c_keeps_what_was_measured_and_leaves_no_process(tmp_path: Path) -> None:
    out = tmp_path / "out"
    line = [sys.executable, "-m", "sglang_patches.nccl", "tune", "--tp", "2", "--backend", "gloo", "--hidden", "16"]
    line += ["--rounds", "99", "--replays", "3", "--calls", "2", "--rows", "1", "--out", str(out)]
    process = subprocess.Popen(
        line,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job, as which tests may run, ignores SIGINT, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    pids = wait_for_a_result(process, out)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=LONG)
    assert process.returncode == 130, errors
    assert "interrupted: no profile was written" in output
    assert "Traceback" not in errors
    results = json.loads((out / "results.json").read_text())
    assert results["interrupted"] == "Ctrl-C"
    assert results["runs"][0]["status"] == "measured"
    assert schema.parse(results, "results.json").code.id
    assert [file.name for file in out.glob("*.json")] == ["results.json"]
    assert gone(pids)


def test_ranks_do_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from test_processes import group;"
        "g = group(pathlib.Path(sys.argv[1]), 'nccl_faults:Hangs');"
        "g.prepare(100); print(*[p.pid for p in g._processes], flush=True); g.run(600)"
    )
    line = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.Popen(line, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(alive(pids)) == 2
    process.kill()
    process.wait()
    process.stdout.close()
    ended = gone(pids)
    for pid in alive(pids):
        os.kill(pid, signal.SIGKILL)
    assert ended


def wait_for_a_result(process: subprocess.Popen[str], out: Path) -> list[int]:
    """Wait until one run is on disk and another one has processes; returns their pids."""
    end = time.monotonic() + LONG
    while time.monotonic() < end and process.poll() is None:
        if (out / "results.json").exists():
            pids = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
            if len(pids) >= 2:
                return pids
        time.sleep(0.05)
    raise AssertionError(f"no result after {LONG} s, or it ended: {process.poll()}")


def test_check_passes_where_every_process_sees_what_is_set() -> None:
    done = command("check", "--tp", "2", "--backend", "gloo", "--hidden", "16", "--json", NCCL_PROTO="LL")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["ok"]
    (row,) = (row for row in told["variables"] if row["name"] == "NCCL_PROTO")
    assert (row["wanted"], row["by"], row["seen"], row["verdict"]) == ("LL", "you", "LL", "not told")
    assert told["all_reduce"]["status"] == "measured"
    assert told["facts"]["versions"]["torch"]
    assert told["provenance"]["versions"]["torch"] == told["facts"]["versions"]["torch"]
    assert schema.parse(told, "nccl check").environment["NCCL_PROTO"] == "LL"


def test_check_finds_what_start_up_code_of_python_changes(tmp_path: Path) -> None:
    # What the story's engineers tried to set variables with; here it sets them for rank processes alone.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if any(word.endswith('job.json') for word in sys.orig_argv):\n"
        "    os.environ['NCCL_PROTO'] = 'Simple'\n"
    )
    done = command(
        "check", "--tp", "2", "--backend", "gloo", "--hidden", "16", FIRST=str(tmp_path), NCCL_PROTO="LL"
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "NCCL_PROTO: set to LL, but rank 0, os.environ: Simple" in done.stdout
    for word in ("Set", "Seen by process", "Taken by NCCL", "not taken"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["check", "--tp", "2"], "--tp 2: this host shows no GPU"),
        (["tune", "--tp", "2"], "--tp 2: this host shows no GPU"),
        (["tune", "--tp", "2", "--backend", "gloo", "--rows", "1,x"], "--rows '1,x'"),
        (["tune", "--tp", "2", "--backend", "gloo", "--rows", "0,1"], "--rows '0,1'"),
        (["tune", "--tp", "2", "--backend", "gloo", "--only", "typo"], "unknown candidate: typo"),
        (["tune", "--tp", "2", "--backend", "gloo", "--candidates", "/none.json"], "/none.json: not a list"),
        (["report", "/none.json"], "/none.json: not the results of `nccl tune`"),
    ],
)  # fmt: skip
def test_user_errors(arguments: list[str], problem: str, tmp_path: Path) -> None:
    if "--rows" not in arguments and arguments[0] != "report" and "gloo" not in arguments:
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            pass
        else:
            pytest.skip("this host has a GPU")
    done = command(*arguments)
    assert done.returncode == 2
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("typo", "no all-reduce path 'typo'"),
        ("gone:X", "path 'gone:X' does not import: No module named 'gone'"),
        ("json:gone", "path 'json:gone' does not import"),
        ("json:dumps", "no all-reduce path 'json:dumps'"),
    ],
)
def test_a_path_that_does_not_exist_is_named(path: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        path_class(path)


def test_a_candidate_whose_path_does_not_exist_is_a_user_error(tmp_path: Path) -> None:
    file = tmp_path / "candidates.json"
    file.write_text(json.dumps([{"name": "a", "path": "typo"}]))
    done = command("tune", "--tp", "2", "--backend", "gloo", "--candidates", str(file))
    assert done.returncode == 2
    assert done.stderr.startswith("sglang-patches: no all-reduce path 'typo'\n  known      nccl, ")


def test_help_tells_the_commands_and_their_exit_codes() -> None:
    done = command("--help")
    assert done.returncode == 0
    assert {"check", "tune", "report"} <= set(done.stdout.split())
    assert "Exit code" in command("check", "--help").stdout
