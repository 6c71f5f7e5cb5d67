"""benchmark/spec_plan: arms share GPUs fairly, and ratios are taken within a round."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from io import BytesIO
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmark.spec_plan import run, summary, tables


def test_arms_change_gpus_every_round_and_none_runs_twice() -> None:
    groups = run.jobs(["none", "fixed", "plan"], rounds=2, gpus=2, done={("fixed", 0)})
    flat = [job for group in groups for job in group]
    assert sorted(flat) == [("fixed", 1, 0), ("none", 0, 0), ("none", 1, 1), ("plan", 0, 0), ("plan", 1, 1)]
    for group in groups:
        assert len({gpu for _, _, gpu in group}) == len(group)
        assert len({number for _, number, _ in group}) == 1
    assert all(len(group) == 1 for group in run.jobs(["none", "plan"], rounds=3, gpus=1, done=set()))
    (everything,) = run.jobs(["none", "plan"], rounds=2, gpus=1, done={("plan", 1)}, together=True)
    assert everything == [("none", 0, 0), ("plan", 0, 0), ("none", 1, 0)]
    assert run.jobs(["none"], rounds=1, gpus=1, done={("none", 0)}, together=True) == []


def engine(arm: str, number: int, timed: dict[float | None, tuple[float, int]], size: int = 4) -> dict[str, Any]:
    """An engine's record; `timed`: seconds and passes of one answer by accept length."""
    batches = [
        {"batch_size": size, "accept_length": length, "seconds": [seconds], "passes": [passes]}
        for length, (seconds, passes) in timed.items()
    ]
    return {"arm": arm, "round": number, "batches": batches, "answers": []}


NOTHING: dict[str, Any] = {
    "timed": "what follows the first token", "headline": "", "summary": [], "break_even": [], "answers": [],
    "partings": [],
}  # fmt: skip


def test_ratios_are_paired_by_round_and_have_an_interval() -> None:
    engines = [
        engine("none", 0, {None: (1.0, 10)}),
        engine("plan", 0, {2.5: (0.5, 4), 5.0: (0.25, 2)}),
        engine("plan", 1, {2.5: (1.6, 4), 5.0: (0.8, 2)}),
        engine("none", 1, {None: (2.0, 10)}),
    ]
    first, second = summary.speeds(engines, tokens=10)
    assert (first["batch_size"], first["accept_length"], second["accept_length"]) == (4, 2.5, 5.0)
    assert first["none"] == second["none"] == pytest.approx(40 / 1.5)
    assert (first["plan"], second["plan"]) == (pytest.approx(40 / 1.05), pytest.approx(40 / 0.525))
    compared = first["plan_over_none"]
    # Twice as fast in one round, 1.25 times in the other; Student's t with one degree of freedom reaches far.
    assert (compared["ratio"], compared["rounds"]) == (pytest.approx(2.5**0.5), 2)
    assert (compared["low"], compared["high"]) == (pytest.approx(0.07983, rel=1e-3), pytest.approx(31.316, rel=1e-3))
    assert compared["verdict"] == "AMBIGUOUS"
    assert tables.lines({**NOTHING, "summary": [first]}) == [
        "Tokens per second of what follows the first token:",
        "",
        "| batch | accept length | none, tok/s | plan, tok/s | plan / none (interval, rounds) |",
        "|---|---|---|---|---|",
        "| 4 | 2.5 | 27 | 38 | 1.581 (0.080 to 31.316, 2) AMBIGUOUS |",
    ]
    (alone,) = summary.speeds(engines[:1], 10)
    assert alone == {"batch_size": 4, "accept_length": None, "none": pytest.approx(40.0)}
    (row, _) = summary.speeds(engines[:2], 10)
    assert row["plan_over_none"]["high"] is None, "JSON has no infinity"
    assert tables.lines({**NOTHING, "summary": [row]})[-1] == "| 4 | 2.5 | 40 | 80 | 2.000 (one round) |"
    assert summary.of([], 10) == NOTHING
    (row, _) = summary.speeds(engines[:2], 10, "plan")
    assert (row["none_over_plan"]["ratio"], "plan_over_none" in row) == (pytest.approx(0.5), False)
    told = tables.lines({**NOTHING, "over": "plan", "summary": [row]})
    assert told[2] == "| batch | accept length | none, tok/s | plan, tok/s | none / plan (interval, rounds) |"
    assert told[-1] == "| 4 | 2.5 | 40 | 80 | 0.500 (one round) |"
    assert tables.lines(NOTHING) == []


def test_rounds_that_agree_tell_which_arm_is_faster() -> None:
    engines = [engine("none", number, {None: (2.0, 10)}) for number in range(2)]
    engines += [engine("fixed", number, {2.5: (1.0 + number / 1000, 4)}) for number in range(2)]
    engines += [engine("upstream-none", number, {None: (2.0 + number / 1000, 10)}) for number in range(2)]
    (row,) = summary.speeds(engines, 10)
    assert row["fixed_over_none"]["verdict"] == "FASTER"
    assert row["upstream-none_over_none"]["verdict"] == "SAME"


def test_the_headline_has_the_smallest_batch_and_the_least_gain() -> None:
    engines = [engine("upstream-none", 0, {None: (2.5, 10)}, 8)]
    for number, size in product((0, 1), (1, 8)):
        engines.append(engine("none", number, {None: (2.0, 10)}, size))
        engines.append(engine("fixed", number, {2.5: (1.0, 4), 3.0: (0.5 + size / 100, 3)}, size))
    assert summary.headline(summary.speeds(engines, 10)).split("; ") == [
        "fixed gives 2.000 (2 to 2) times the tokens/s of none at batch 1 and an accept length of 2.5"
        ", the least of 2 sizes",
        "fixed gives 3.922 (3.92 to 3.92) times the tokens/s of none at batch 1 and an accept length of 3"
        ", 3.448 at batch 8, the least of 2 sizes",
        "upstream-none gives 0.800 times the tokens/s of none at batch 8",
    ]


def test_where_it_breaks_even_is_never_extrapolated() -> None:
    def rows(*seconds: float) -> list[dict[str, Any]]:
        timed: dict[float | None, tuple[float, int]] = {
            length: (took, 1) for length, took in zip((1.5, 2.5, 3.5), seconds, strict=False)
        }
        return summary.speeds([engine("none", 0, {None: (1.0, 10)}), engine("fixed", 0, timed)], 10)

    # Ratios of 0.8 and 1.6: 1 lies a quarter of the way from 1.5 to 2.5.
    (between,) = summary.break_even(rows(1 / 0.8, 1 / 1.6, 1 / 2))
    assert between == {"batch_size": 4, "fixed": (pytest.approx(1.75), pytest.approx(1.75))}
    assert summary.break_even(rows(0.9, 0.8)) == [{"batch_size": 4, "fixed": (None, 1.5)}]
    assert summary.break_even(rows(1.3, 1.2)) == [{"batch_size": 4, "fixed": (2.5, None)}]
    assert summary.break_even(summary.speeds([engine("none", 0, {None: (1.0, 10)})], 10)) == []
    assert summary.break_even(rows(0.98, 1.01)) == [], "a gain that is none at a larger accept length is chance"
    planned = [engine("none", 0, {None: (1.0, 10)}), engine("plan", 0, {1.5: (0.9, 10)})]
    assert summary.break_even(summary.speeds(planned, 10)) == [], "a plan may draft nothing"
    for seconds, told in (((1 / 0.8, 1 / 1.6), "1.75"), ((0.9, 0.8), "below 1.5"), ((1.3, 1.2), "above 2.5")):
        result = {**NOTHING, "summary": rows(*seconds), "break_even": summary.break_even(rows(*seconds))}
        lines = tables.lines(result)
        assert lines[2].endswith("| fixed breaks even |")
        assert all(line.endswith(f"| {told} |") for line in lines[4:])


def test_a_rate_of_partings_counts_tokens_up_to_the_first_difference() -> None:
    def answers(arm: str, *tokens: list[int]) -> dict[str, Any]:
        return {"arm": arm, "round": 0, "batches": [], "answers": [{"tokens": one} for one in tokens]}

    engines = [
        answers("none", [1, 2, 3, 4], [5, 6, 7, 8]),
        answers("fixed", [1, 9, 3, 4], [5, 6, 7, 8]),
        answers("fixed", [1, 9, 3, 4], [5, 6, 7, 0]),
        {**answers("plan"), "answers": []},
    ]
    with_none, among = summary.partings(engines)
    assert with_none == {
        "arms": ("fixed", "none"), "pairs": 2, "answers": 4, "equal": 1, "tokens": 2 + 4 + 2 + 4, "per_thousand": 250.0,
    }  # fmt: skip
    assert (among["arms"], among["equal"], among["tokens"], among["per_thousand"]) == (("fixed", "fixed"), 1, 8, 125.0)
    assert tables.lines({**NOTHING, "partings": [with_none]})[-1] == "| fixed and none | 2 | 1 of 4 | 12 | 250 |"


def test_results_are_put_together_with_rounds_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = {"layers": 61, "weights": "int4", "pair": None, "context": 8, "tokens": 10}
    best = [[(1, -1.0), (2, -1.0)]]
    one, other = ({"tokens": [token], "logprob": [-1.0], "best": best} for token in (1, 2))
    results: list[dict[str, Any]] = [
        {"work": work, "engines": [{**engine("none", 0, {None: (1.0, 1)}), "answers": [one]}]},
        {"work": {**work, "tokens": 20}, "engines": [{**engine("none", 0, {None: (2.0, 1)}), "answers": [other]}]},
    ]
    assert [told["round"] for told in summary.together(results)] == [0, 1]
    with pytest.raises(ValueError, match="other models or prompts"):
        summary.together([results[0], {**results[1], "work": {**work, "layers": 12}}])
    (second,) = results[1]["engines"]
    drawn = [{**second, "values_drawn": 853}]
    with pytest.raises(ValueError, match="'all_drawn': "):
        summary.together([results[0], {**results[1], "engines": drawn}])
    longer = [{**second, "answers": [{**other, "tokens": [2, 3]}]}]
    with pytest.raises(ValueError, match=r"other numbers or lengths: \[\(1,\), \(2,\)\]"):
        summary.together([results[0], {**results[1], "engines": longer}])
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, result in zip(files, results, strict=True):
        file.write_text(json.dumps(result))
    monkeypatch.setattr(sys, "argv", ["summary.py", *map(str, files)])
    assert summary.main() == 0
    told = capsys.readouterr().out
    assert "| none | 1 | 0 | 0 | 1 | 2 | 0.000 |" in told
    assert "| none and none | 1 | 0 of 1 | 1 | 1000 |" in told
    assert "tok/s" not in told, "answers of different lengths take different times"
    monkeypatch.setattr(sys, "argv", ["summary.py", str(files[0])])
    assert summary.main() == 0
    assert "| 4 | - | 40 |" in capsys.readouterr().out
    earlier = {name: value for name, value in work.items() if name != "pair"}
    files[0].write_text(json.dumps({**results[0], "work": earlier}))
    assert summary.main() == 2
    assert f"{files[0]}: of an earlier benchmark.spec_plan.run, without `pair`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("written", "told"), [(None, "No such file"), ("{", "Expecting"), ('{"arms": []}', "no `work` and `engines`")]
)
def test_a_file_that_is_no_result_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    written: str | None,
    told: str,
) -> None:
    file = tmp_path / "a.json"
    if written is not None:
        file.write_text(written)
    monkeypatch.setattr(sys, "argv", ["summary.py", str(file)])
    assert summary.main() == 2
    error = capsys.readouterr().err
    assert error.startswith(f"summary: {file}: ")
    assert told in error


def answering(arm: str, *answers: tuple[list[int], list[float], list[list[tuple[int, float]]]]) -> dict[str, Any]:
    told = [{"tokens": tokens, "logprob": nats, "best": best} for tokens, nats, best in answers]
    return {"arm": arm, "round": 0, "batches": [], "answers": told}


def test_a_first_difference_is_held_against_the_noise_before_it() -> None:
    close, apart = [(7, -1.0), (8, -1.015)], [(7, -1.0), (8, -1.5)]
    best = [[(5, -2.0), (6, -3.0)], close]
    none = answering("none", ([5, 7], [-2.0, -1.0], best), ([5, 7], [-2.0, -1.0], [best[0], apart]))
    same = answering("none", *[(a["tokens"], a["logprob"], a["best"]) for a in none["answers"]])
    other = answering("fixed", ([5, 8], [-2.01, -0.9], best), ([5, 8], [-1.992, -0.9], best))
    third = answering("fixed", ([5, 9], [-2.0, -0.9], best), ([5, 7], [-2.0, -1.0], best))
    again, differing, beyond = summary.sameness([none, same, other, third])
    assert (again["equal"], again["noise_most"], again["differences"]) == (2, 0, [])
    assert (differing["equal"], differing["answers"]) == (0, 2)
    # Logprobs after the first difference are of other texts.
    assert differing["noise_most"] == pytest.approx(0.01)
    assert differing["noise_median"] == pytest.approx(0.009)
    one, two = differing["differences"]
    assert one == {
        "answer": 0, "position": 1, "none": 7, "other": 8, "gap": pytest.approx(0.015), "explained": True
    }  # fmt: skip
    assert (two["gap"], two["explained"]) == (pytest.approx(0.5), False)
    assert [(told["gap"], told["explained"]) for told in beyond["differences"]] == [(None, False)]
    lines = tables.lines({**NOTHING, "answers": [differing, beyond]})
    assert "| fixed | 0 | 0 of 2 | 0.009 | 0.01 | 1 of 2 |" in lines
    assert "| fixed | 0 | 0 | 1 | 7 | 8 | 0.015 |" in lines
    assert lines[-1] == "| fixed | 0 | 0 | 1 | 7 | 9 | not among the best |"
    shorter = tables.lines({**NOTHING, "answers": [differing]}, differences=False)
    assert len(shorter) == 3
    assert summary.sameness([other]) == []


def test_an_arm_of_upstream_has_no_patches_and_a_gpu_is_named_to_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PATCHES", "+oea-topk")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    ours, theirs = run.environment("fixed", "3"), run.environment("upstream-fixed", "3")
    assert (ours["SGLANG_PATCHES"], theirs["SGLANG_PATCHES"]) == ("+oea-topk", "none")
    assert ours["CUDA_VISIBLE_DEVICES"] == theirs["CUDA_VISIBLE_DEVICES"] == "3"
    assert "PYTHONDONTWRITEBYTECODE" not in ours
    assert run.environment("none", None)["SGLANG_USE_CPU_ENGINE"] == "1"
    changed = run.environment("fixed:-clean-stop:+oea-topk", "3")
    assert changed["SGLANG_PATCHES"] == "-clean-stop,+oea-topk"
    for name in ("other", "fixed-clean-stop", "upstream-fixed:-clean-stop"):
        with pytest.raises(ValueError, match=f"'{name}': not one of none, fixed, "):
            run.environment(name, "3")


def test_arms_with_patches_changed_are_told_after_the_arm_that_they_change() -> None:
    less, more = "fixed:-clean-stop", "fixed:+oea-topk"
    engines = [engine(arm, 0, {2.5: (1.0 + at, 4)}) for at, arm in enumerate((less, "fixed", more))]
    engines += [engine("upstream-none", 0, {None: (2.0, 10)})]
    told = summary.of(engines, 10, "fixed")
    assert list(told["summary"][0]) == [
        "batch_size", "accept_length", less, "fixed", more, "upstream-none",
        f"{less}_over_fixed", f"{more}_over_fixed", "upstream-none_over_fixed",
    ]  # fmt: skip
    assert [part.partition(" gives ")[0] for part in told["headline"].split("; ")] == [less, more, "upstream-none"]
    assert "2.000 times the tokens/s of fixed at batch 4 and an accept length of 2.5" in told["headline"]
    assert told["break_even"] == []
    assert tables.lines({**NOTHING, **told})[2].count("tok/s") == 4


# Of variables that a command is told with; upstream's import sets some in this process.
STEERING = ("SGL", "NCCL", "CUDA", "TRITON", "OMP", "FLASHINFER", "TORCH", "PYTORCH")


def test_a_disk_that_is_full_leaves_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "tokens.json"
    result: dict[str, Any] = {"over": "none", "engines": [engine("none", 0, {None: (1.0, 10)})]}
    run._write(out, result, 10)
    before = out.read_text()
    assert len(json.loads(before)["engines"]) == 1

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    result["engines"].append(engine("plan", 0, {2.5: (0.5, 4)}))
    with pytest.raises(OSError, match=f"No space left on device: '{out}'"):
        run._write(out, result, 10)
    assert [(file, file.read_text()) for file in tmp_path.iterdir()] == [(out, before)]


def test_the_result_has_the_whole_command_and_goes_on_with_what_measured_the_same_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[str] = []

    class Engine:
        """Waits for its line, as the real one does, and measures."""

        returncode = 1  # of one that fails

        def __init__(self, words: list[str], env: dict[str, str], stdin: int, pass_fds: tuple[int, ...]) -> None:
            assert (stdin, pass_fds) == (subprocess.PIPE, ())
            begun.append(words[-1])
            self.words, self.stdin = words, BytesIO()

        def wait(self, _limit: float) -> int:
            assert self.stdin.getvalue() == b"go\n"
            measured = engine(self.words[-1], 0, {None: (1.0, 1)})
            measured["batches"][0]["first_seconds"] = [0.5]
            Path(self.words[self.words.index("--one") - 1]).write_text(json.dumps(measured))
            return 0

        def poll(self) -> int:
            return 0

    for name in [name for name in os.environ if name.startswith(STEERING)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SGLANG_PATCHES", "+draft-extend-split-kv")
    # Not the module's own Popen, with which torch's import looks for libraries.
    fake = SimpleNamespace(Popen=Engine, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(run, "subprocess", fake)
    monkeypatch.setattr(run.selection, "has_gpu", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(run.provenance, "code_state", lambda: {"id": "x"})
    out = tmp_path / "tokens.json"
    words = ["--out", str(out), "--arms", "none,upstream-none", "--rounds", "1", "--batch-sizes", "4"]
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    assert run.main() == 0
    told = json.loads(out.read_text())
    steered = ["env", "SGLANG_PATCHES=+draft-extend-split-kv"]
    assert told["command"] == [*steered, "python", "-m", "benchmark.spec_plan.run", *words]
    assert told["work"]["token_mode"] == "real-draft-token"
    assert begun == [one["arm"] for one in told["engines"]] == ["none", "upstream-none"]
    assert run.main() == 0
    assert len(begun) == 2, "what is measured is not measured again"
    told["when"] = "2026-01-02T03:04:05+00:00"
    out.write_text(json.dumps(told))
    with monkeypatch.context() as failing:
        failing.setattr(Engine, "wait", lambda _engine, _limit: 1)
        failing.setattr(sys, "argv", ["run.py", *words, "--rounds", "2"])
        assert run.main() == 1
    assert json.loads(out.read_text()) == told | {"command": [*told["command"], "--rounds", "2"]}
    # As results were before they noted it: their engines ran with upstream's default.
    del told["work"]["token_mode"]
    out.write_text(json.dumps(told))
    with pytest.raises(SystemExit, match="2"):
        run.main()
    # As results were before an answer of one token was timed: rates of whole ones are not put beside others.
    told["work"]["token_mode"] = "real-draft-token"
    for one in told["engines"]:
        del one["batches"][0]["first_seconds"]
    out.write_text(json.dumps(told))
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        run.main()
    assert f"--out {out}: has no `first_seconds`" in capsys.readouterr().err


def test_it_says_what_is_missing(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "benchmark.spec_plan.run", "--out", str(tmp_path / "result" / "tokens.json")]
    refused = subprocess.run([*words, "--arms", "none,plan"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "--arms plan: needs --plan with a file" in refused.stderr
    unknown = subprocess.run([*words, "--arms", "none:-no-such-patch"], capture_output=True, text=True, check=False)
    assert (unknown.returncode, "--arms: unknown patch: no-such-patch" in unknown.stderr) == (2, True)
    single = subprocess.run([*words, "--tokens", "1"], capture_output=True, text=True, check=False)
    assert (single.returncode, "--tokens 1: at least 2" in single.stderr) == (2, True)
    half = subprocess.run([*words, "--model", "x"], capture_output=True, text=True, check=False)
    assert (half.returncode, "give both" in half.stderr) == (2, True)
    if not run.selection.has_gpu():
        told = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (told.returncode, "no GPU here" in told.stderr) == (2, True)
        assert "or give --model and --draft" in told.stderr
    assert not (tmp_path / "result").exists()
