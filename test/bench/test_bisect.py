"""`bench bisect` as a person runs it, against servers that are slow by plan."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from sglang_patches.bench import folder
from sglang_patches.bench.app import app

from .conftest import killed_after

REPO = Path(__file__).resolve().parents[2]
HARMLESS = "env:ONE=1,env:TWO=2,env:THREE=3"


def command(out: Path, good: str, bad: str, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "sglang_patches.cli", "bench", "bisect", "--good", good, "--bad", bad, "--out", str(out),
        "--model", str(REPO / "test/models/tiny-kimi"), "--draft", "", "--prompts", "2", "--output-tokens", "12",
        "--warm-up", "0", "--metric", "tpot_ms_p50", "--threshold", "50%", *more,
    ]  # fmt: skip


def run(*arguments: Any) -> Result:
    """The command in this process, which has imported by then what takes seconds."""
    return CliRunner().invoke(app, command(*arguments)[4:])


def test_cause_is_found_also_by_a_run_that_was_killed(fake: str, tmp_path: Path) -> None:
    """One variable of four makes tokens come 5 times slower; the run is killed at its first step and goes on."""
    out = tmp_path / "result"
    good, bad = f"{fake},env:FAKE_TOKEN_S=0.02", f"{fake},{HARMLESS},env:FAKE_TOKEN_S=0.1"
    words = command(out, good, bad)
    killed_after(5, words, out)
    kept = (out / "turns.jsonl").read_text()
    assert not (out / "result.json").exists()

    done = subprocess.run(words, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "going on after" in done.stderr
    assert (out / "turns.jsonl").read_text().startswith(kept)
    result = folder.load(out)
    assert result.kind == "bisect"
    (suspect,) = result.analysis["suspects"]
    assert suspect["changes"] == ["env:FAKE_TOKEN_S=0.1"]
    assert suspect["minimal"]
    assert suspect["only_one"]
    assert 2 < suspect["ratio"] < 6  # 5, and nearer to 1 by what a busy machine adds to both
    assert result.headline.startswith("env:FAKE_TOKEN_S=0.1: tpot_ms_p50 ")
    assert result.headline in " ".join(done.stdout.split("\n"))
    # Each step's evidence: its turns, their samples and logs, and an arm that can be served again.
    arms = {arm.name: arm for arm in result.arms}
    for step in result.analysis["steps"]:
        assert step["measured"] or step["step"] == 0
        assert step["arm"] in arms
        for index in step["measured"]:
            assert (out / result.turns[index].log).is_file()
    assert all(fake in arm.spec for arm in arms.values())
    measured = [index for step in result.analysis["steps"] for index in step["measured"]]
    assert measured == list(range(len(result.turns)))
    assert len(list(folder.samples(out))) == 2 * len(result.turns)

    again = run(out, good, bad)
    assert again.exit_code == 0
    assert folder.load(out).analysis == result.analysis
    assert (out / "turns.jsonl").read_text().startswith(kept)
    assert len((out / "turns.jsonl").read_text().splitlines()) == len(result.turns)


def test_nothing_to_find(fake: str, tmp_path: Path) -> None:
    """Only harmless changes: exit code 1, with the figures."""
    out = tmp_path / "result"
    done = run(out, f"{fake},env:FAKE_TOKEN_S=0.02", f"{fake},env:FAKE_TOKEN_S=0.02,{HARMLESS}")
    assert done.exit_code == 1, done.stderr
    assert re.search(r"no regression to find: tpot_ms_p50 \d", done.stdout.replace("\n", ""))
    result = folder.load(out)
    assert result.analysis["found"] is False
    assert {turn.arm for turn in result.turns} == {"good", "bad"}


def test_bad_that_cannot_be_served(fake: str, tmp_path: Path) -> None:
    out = tmp_path / "result"
    done = run(out, fake, f"{fake},env:FAKE_DIE=start", "--rounds", "1")
    assert done.exit_code == 2
    assert "turn 1 (arm bad" in done.stderr
    assert "the planted mistake" in done.stderr
    assert "kept       1 turns" in done.stderr
