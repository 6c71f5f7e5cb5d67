"""benchmark/spec_plan on the bundled pair: two real engines, answers compared, acceptance pinned at two lengths."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmark.spec_plan import run

from .server import REPO

TOKENS = 48
COMMAND = [
    sys.executable, "-m", "benchmark.spec_plan.run", "--arms", "none,fixed", "--rounds", "1", "--answers", "2",
    "--model", "test/models/tiny-kimi", "--draft", "test/models/tiny-kimi-eagle3", "--batch-sizes", "1,2",
    "--context", "48", "--tokens", str(TOKENS), "--accept-lengths", "1.5,3.5",
]  # fmt: skip


def test_speculation_answers_as_none_does_and_commits_as_many_tokens_as_pinned(tmp_path: Path) -> None:
    out = tmp_path / "tokens.json"
    done = subprocess.run([*COMMAND, "--out", str(out)], cwd=REPO, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    told = json.loads(out.read_text())
    # Float32 on a CPU: equal, and logprobs as near as its rounding.
    (same,) = told["answers"]
    assert (same["arm"], same["equal"], same["answers"], same["differences"]) == ("fixed", 2, 2, [])
    assert same["noise_most"] < 1e-4
    none, fixed = told["engines"]
    for one in (none, fixed):
        assert [len(answer["tokens"]) for answer in one["answers"]] == [64, 64]
        assert all(
            best[0][0] == token for a in one["answers"] for token, best in zip(a["tokens"], a["best"], strict=True)
        )
    assert [(row["batch_size"], row["accept_length"], row["passes"]) for row in none["batches"]] == [
        (1, None, [TOKENS]), (2, None, [TOKENS])
    ]  # fmt: skip
    rows = {(row["batch_size"], row["accept_length"]): row for row in fixed["batches"]}
    assert sorted(rows) == [(1, 1.5), (1, 3.5), (2, 1.5), (2, 3.5)]
    for (_, length), row in rows.items():
        # 1.5 is 1 or 2 tokens a cycle, 3.5 is 3 or 4: by chance, and the prefill gives the first token.
        low, high = (TOKENS - 1) / (int(length) + 1), TOKENS / int(length) + 1
        assert low <= row["passes"][0] <= high, (length, row)
    for one in (none, fixed):
        for row in one["batches"]:
            (first,), (seconds,) = row["first_seconds"], row["seconds"]
            # A prefill takes about as long as one pass, and the answer has 14 passes or more.
            assert 0 < first < seconds / 2, row
    row = none["batches"][0]
    decoding = row["seconds"][0] - row["first_seconds"][0]
    assert told["summary"][0]["none"] == pytest.approx((TOKENS - 1) / decoding)
    assert told["timed"] == "what follows the first token"
    assert "Tokens per second of what follows the first token:" in done.stdout
    assert "| 1 | 3.5 |" in done.stdout
    assert done.stdout.count("fixed, tok/s") == 1


def test_engines_that_are_up_together_take_turns(tmp_path: Path) -> None:
    out = tmp_path / "tokens.json"
    words = [*COMMAND, "--out", str(out), "--together", "--repeats", "2", "--batch-sizes", "1"]
    words[words.index("--arms") + 1] = "fixed,fixed:-clean-stop"
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "spec_plan: 2 of 2 engines are up" in done.stdout
    told = json.loads(out.read_text())
    assert (told["over"], told["work"]["together"]) == ("fixed", True)
    assert [(one["arm"], one["patches"]) for one in told["engines"]] == [
        ("fixed", ""), ("fixed:-clean-stop", "-clean-stop")
    ]  # fmt: skip
    for row in told["summary"]:
        assert row["fixed:-clean-stop_over_fixed"]["rounds"] == 1
    rows = [row for one in told["engines"] for row in one["batches"]]
    assert [(len(row["first_seconds"]), len(row["seconds"])) for row in rows] == [(2, 2)] * 4
    # What it says when it is over is told by the same names that it is asked for with.
    assert "| fixed, tok/s | fixed:-clean-stop, tok/s | fixed:-clean-stop / fixed (interval, rounds) |" in done.stdout


def test_an_engine_that_dies_has_no_more_turns(tmp_path: Path) -> None:
    engines = []
    for number, turns in enumerate((3, 2)):
        replies, reply = os.pipe()
        turn = f"sys.stdin.readline(); os.write({reply}, b'.'); "
        code = f"import os, sys; {turn * turns}sys.exit({number})"
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, pass_fds=(reply,))
        os.close(reply)
        engines.append(run.Running(("fixed", number, 0), tmp_path / str(number), process, replies))
        engines[-1].part.touch()
        engines[-1].go()
    run._take_turns(engines, ["1"], repeats=1)
    assert [engine.failed() for engine in engines] == [False, True]


def test_turns_alternate_their_order() -> None:
    asked: list[str] = []

    class Engine:
        def __init__(self, name: str) -> None:
            self.name = name

        def go(self) -> None:
            asked.append(self.name)

        def replied(self) -> bool:
            return not (self.name == "b" and asked.count("b") == 3)

    run._take_turns([Engine("a"), Engine("b")], ["1", "2"], repeats=2)  # type: ignore[list-item]
    assert "".join(asked) == "ba" + "ab" + "ba" + "a" * 3, "b died in its third turn"
