"""`bench factorial` as a person runs it, against servers whose speed is planted."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_patches.bench import factorial, folder
from sglang_patches.bench.design import full, order
from sglang_patches.bench.model import Arm, Turn
from sglang_patches.errors import PatchError

REPO = Path(__file__).resolve().parents[2]
SLOW = "env:PLANTED=0.1"  # seconds between tokens, where the base has 0.03


def run(factors: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "sglang_patches.cli", "bench", "factorial", "--factors", factors,
        "--model", str(REPO / "test/models/tiny-kimi"), "--draft", "", "--prompts", "2", "--output-tokens", "12",
        "--warm-up", "0", *more,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


def test_the_factor_that_is_slow_is_found_and_the_other_is_not(fake: str, tmp_path: Path) -> None:
    out, script = tmp_path / "result", tmp_path / "planted"
    script.write_text(f'#!/bin/sh\nFAKE_TOKEN_S=${{PLANTED:-0.03}} exec "{fake.removeprefix("python:")}" "$@"\n')
    script.chmod(0o755)
    more = ["--base", f"python:{script}", "--out", str(out), "--rounds", "2", "--seed", "3"]
    done = run(f"{SLOW},env:NOTHING=1", *more)
    assert done.returncode == 0, done.stderr
    result = folder.load(out)
    served = [(at, f"{run % 2}{run // 2}") for at, runs in enumerate(order(full("ab"), 2, 3)) for run in runs]
    assert [(turn.block, turn.arm) for turn in result.turns] == served
    effects = {effect["name"]: effect for effect in result.analysis["effects"]["tokens_per_s"]["effects"]}
    assert effects[SLOW]["verdict"] == "SLOWER"
    assert 0.25 < effects[SLOW]["ratio"] < 0.6
    # Its verdict may be wrong one time in twenty, and a busy machine scatters.
    assert abs(math.log(effects["env:NOTHING=1"]["ratio"])) < abs(math.log(effects[SLOW]["ratio"])) / 3
    assert f"`{SLOW}` is SLOWER" in result.headline
    assert result.headline in done.stdout
    assert result.analysis["runs"]["10"] == {SLOW: True, "env:NOTHING=1": False}
    assert (out / "README.md").read_text()
    assert (out / "plot.png").exists() or "matplotlib is not installed" in done.stderr

    # More rounds go on with the turns that there are; other factors do not.
    done = run(f"{SLOW},env:NOTHING=1", *more[:-3], "3", "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert "going on after 8 turns" in done.stderr
    assert [turn.index for turn in folder.load(out).turns] == list(range(12))
    assert folder.load(out).analysis["looks"] == [2]
    assert "verdicts were told after 2 rounds before" in done.stdout
    done = run(f"{SLOW},env:OTHER=1", *more)
    assert done.returncode == 2
    assert "settings.factors" in done.stderr


def test_the_plan_and_mistakes_start_nothing(tmp_path: Path) -> None:
    done = run("clean-stop,env:A=1", "--plan", "--out", str(tmp_path / "result"))
    assert done.returncode == 0, done.stderr
    assert "full 2^2 design, 4 runs; 2 rounds: 8 server starts" in " ".join(done.stdout.split())
    for more, said in (
        (["--rounds", "1"], "--rounds 2"),
        (["--fraction", "2"], "cannot tell 2 factors apart"),
        (["--confidence", "95"], "confidence is 95"),
        (["--base", "oops"], "oops"),
    ):
        done = run("clean-stop,env:A=1", *more, "--out", str(tmp_path / "result"))
        assert done.returncode == 2
        assert said in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "result").exists()


def turns(figures: list[dict[str, float]]) -> list[Turn]:
    runs = [run for round_ in order(full("ab"), 2, 0) for run in round_]
    return [
        Turn(index=at, block=at // 4, arm=f"{run % 2}{run // 2}", ready_s=1, figures=figures[run], output_sha256="x",
             document=None)
        for at, run in enumerate(runs)
    ]  # fmt: skip


ARMS = [Arm(name=f"{run % 2}{run // 2}", spec="") for run in range(4)]


def concluded(figures: list[dict[str, float]], folder: Path) -> Any:
    return factorial.conclude(
        turns(figures), full(["a", "b"]), ARMS, None, folder, base="default", margin=0.01, confidence=0.95, seed=0
    )


def test_figures_that_a_turn_lacks_or_that_are_nought_are_left_out(tmp_path: Path) -> None:
    every: list[dict[str, float]] = [
        {"tokens_per_s": 90 * 0.8 ** (run // 2), "graph_share": 0.0, "ready": 3.0, "verify_ms": 20.0}
        for run in range(4)
    ]
    del every[1]["verify_ms"]
    found = concluded(every, tmp_path)
    assert list(found.analysis["effects"]) == ["tokens_per_s"]
    assert "`b` is SLOWER: 0.8 times (0.8 to 0.8)" in found.headline
    assert "`a` is" not in found.headline
    flat = concluded([{"tokens_per_s": 90.0}] * 4, tmp_path)
    assert "no effect of `a`, `b` is shown" in flat.headline
    with pytest.raises(PatchError, match="tokens_per_s was not measured in every turn"):
        concluded([{"verify_ms": 1.0}] * 4, tmp_path)
