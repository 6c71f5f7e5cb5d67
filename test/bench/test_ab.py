"""`bench ab` as a person runs it, against servers that are slow by plan."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from sglang_patches.bench import ab, arms, folder
from sglang_patches.bench.model import HIGHER_IS_BETTER, Turn
from sglang_patches.errors import PatchError
from sglang_patches.series import Series

from .conftest import killed_after

REPO = Path(__file__).resolve().parents[2]


def command(out: Path, a: str, b: str, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "sglang_patches.cli", "bench", "ab", "--a", a, "--b", b, "--out", str(out),
        "--model", str(REPO / "test/models/tiny-kimi"), "--draft", "", "--prompts", "2", "--output-tokens", "12",
        "--warm-up", "0", *more,
    ]  # fmt: skip


def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=900)


def test_a_planted_slow_down_is_found_also_by_a_run_that_was_killed_between_turns(fake: str, tmp_path: Path) -> None:
    out = tmp_path / "result"
    fast, slow = f"{fake},env:FAKE_TOKEN_S=0.02", f"{fake},env:FAKE_TOKEN_S=0.08"
    words = command(out, fast, slow, "--rounds", "3")
    killed_after(2, words, out)
    kept = (out / "turns.jsonl").read_text()
    assert not (out / "result.json").exists()

    done = run(out, fast, slow, "--rounds", "3")
    assert done.returncode == 0, done.stderr
    assert "going on after 2 turns of an earlier run" in done.stderr
    assert (out / "turns.jsonl").read_text().startswith(kept)
    result = folder.load(out)
    assert [(turn.block, turn.arm) for turn in result.turns] == [
        (0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b"),
    ]  # fmt: skip
    found = result.analysis["comparisons"]["tokens_per_s"]
    assert found["verdict"] == "SLOWER"
    assert 0.2 < found["ratio"] < 0.7  # 0.25, and nearer to 1 by what a busy machine adds to both
    assert result.analysis["comparisons"]["tpot_ms_p50"]["verdict"] == "SLOWER"
    assert "is SLOWER than" in result.headline
    assert result.headline in done.stdout.replace("\n", "")
    assert len((out / "samples.jsonl").read_text().splitlines()) == 6 * 2
    assert (out / "README.md").read_text()
    assert result.document is not None
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())]

    # Finished: the same again starts no server.
    logs = sorted((log.name, log.stat().st_mtime_ns) for log in (out / "logs").iterdir())
    again = run(out, fast, slow, "--rounds", "3")
    assert again.returncode == 0
    assert folder.load(out).analysis == result.analysis
    assert sorted((log.name, log.stat().st_mtime_ns) for log in (out / "logs").iterdir()) == logs


def test_other_tokens_are_refused_after_the_first_round_and_kept(fake: str, tmp_path: Path) -> None:
    out = tmp_path / "result"
    done = run(out, fake, f"{fake},env:FAKE_SALT=1", "--rounds", "4")
    assert done.returncode == 2
    assert "first of prompt 0" in done.stderr
    assert "--allow outputs" in done.stderr
    assert len((out / "turns.jsonl").read_text().splitlines()) == 2
    done = run(out, fake, f"{fake},env:FAKE_SALT=1", "--rounds", "1", "--allow", "outputs")
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "result.json").read_text())["allowed"][0].startswith("outputs: ")
    assert "AMBIGUOUS" in done.stdout


def test_a_server_that_does_not_start_ends_the_run_with_what_it_said(fake: str, tmp_path: Path) -> None:
    done = run(tmp_path / "result", fake, f"{fake},env:FAKE_DIE=start")
    assert done.returncode == 2
    assert "turn 1 (arm b" in done.stderr
    assert "ValueError: the planted mistake" in done.stderr
    assert "1 turns in" in done.stderr


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--prompts", "99"], "1 to 23"),
        (["--", "--port", "3"], "free port"),
        (["--b", "oops"], "oops"),
        (["--margin", "1"], "margin is 1.0"),
        (["--margin", "nan"], "margin is nan"),
        (["--model", "./no-such-model", "--prompt-tokens", "8", "--vocabulary", "999"], "no such folder"),
        (["--draft", "./no-such-draft"], "no such folder"),
    ],
)
def test_mistakes_start_nothing(tmp_path: Path, more: list[str], said: str) -> None:
    done = run(tmp_path / "result", "default", "default", *more)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "result").exists()


def turn(index: int, block: int, name: str, **figures: float) -> Turn:
    return Turn(
        index=index, block=block, arm=name, ready_s=1, figures=figures, output_sha256="x", document=None
    )  # fmt: skip


def test_figures_that_cannot_be_compared_are_left_out() -> None:
    turns = [
        turn(0, 0, "a", tokens_per_s=100, verify_ms=10, graph_share=0.0),
        turn(1, 0, "b", tokens_per_s=90, graph_share=0.0),
        turn(2, 1, "b", tokens_per_s=90, verify_ms=11, graph_share=0.0),
        turn(3, 1, "a", tokens_per_s=100, verify_ms=10, graph_share=0.0),
        turn(4, 2, "a", tokens_per_s=1),
    ]
    found = ab.compare(turns, ["a", "b"], margin=0.01, seed=0)
    assert set(found) == {"tokens_per_s"}
    assert found["tokens_per_s"].ratio == pytest.approx(0.9)
    assert found["tokens_per_s"].rounds == 2


def test_only_the_primary_figure_has_an_interval_of_its_own() -> None:
    turns = [
        turn(2 * block + at, block, name, **dict.fromkeys(HIGHER_IS_BETTER, 1.0 + 0.01 * ((block * 7 + at * 3) % 5)))
        for block in range(4)
        for at, name in enumerate("ab")
    ]
    found = ab.compare(turns, ["a", "b"], margin=0.01, seed=0)
    assert set(found) == set(HIGHER_IS_BETTER)
    assert found["tokens_per_s"].comparisons == 1
    assert found["verify_ms"].comparisons == len(HIGHER_IS_BETTER) - 1
    assert found["verify_ms"].high > found["tokens_per_s"].high


def test_every_look_at_more_rounds_is_told(tmp_path: Path, series: Series) -> None:
    pair = [arms.parse("a", "default", series), arms.parse("b", "none", series)]

    def concluded(rounds: int) -> list[str]:
        turns = [
            turn(2 * block + at, block, name, tokens_per_s=100 + block + at)
            for block in range(rounds)
            for at, name in enumerate("ab")
        ]
        result = ab.conclude(turns, pair, None, tmp_path, margin=0.01, seed=0)
        folder.write(tmp_path, result)
        return [note for note in result.analysis["notes"] if "verdicts were told" in note]

    assert concluded(2) == concluded(2) == []
    assert "after 2 rounds before" in concluded(4)[0]
    assert "after 2, 4 rounds before" in concluded(6)[0]
    assert "together 3 times" in concluded(6)[0]


def test_a_selection_with_brackets_is_shown_as_it_is(series: Series) -> None:
    pair = [arms.parse("a", "default", series), arms.parse("b", "arg:--x=[/b]", series)]
    turns = [turn(0, 0, "a", tokens_per_s=100), turn(1, 0, "b", tokens_per_s=50)]
    result = ab.conclude(turns, pair, None, Path("x"), margin=0.01, seed=0)
    screen = Console(width=160, record=True, file=io.StringIO())
    screen.print(ab.table(result))
    assert "B = arg:--x=[/b]" in screen.export_text()


@pytest.mark.parametrize(
    ("b", "words"), [(0.8, "is SLOWER than"), (1.25, "is FASTER than"), (1.0, "are the SAME within 1 %")]
)
def test_the_headline_says_which_is_which(b: float, words: str, series: Series) -> None:
    turns = [
        turn(2 * block + at, block, name, tokens_per_s=rate * (1 + 0.0005 * block))
        for block in range(4)
        for at, (name, rate) in enumerate((("a", 100), ("b", 100 * b)))
    ]
    pair = [arms.parse("a", "default", series), arms.parse("b", "none", series)]
    told = ab.headline(ab.compare(turns, ["a", "b"], 0.01, 0), pair, None)
    assert words in told
    assert "4 rounds" in told
    with pytest.raises(PatchError, match="nothing to say"):
        ab.headline({}, pair, None)


@pytest.mark.parametrize(
    ("rounds", "words"),
    [
        (
            [1.0],
            "AMBIGUOUS, B (none) against A (default) is not decided: 0.9 times the tokens per second in one round, ",
        ),
        ([1.0, 1.5], "; even differences of 1000 % would mostly go unseen"),
        ([1.0, 1.001], "; differences below 0.82 % would mostly go unseen"),
    ],
)
def test_a_headline_of_few_rounds_owns_up_without_infinities(rounds: list[float], words: str, series: Series) -> None:
    turns = [
        turn(2 * block + at, block, name, tokens_per_s=rate)
        for block, more in enumerate(rounds)
        for at, (name, rate) in enumerate((("a", 100), ("b", 90 * more)))
    ]
    pair = [arms.parse("a", "default", series), arms.parse("b", "none", series)]
    told = ab.headline(ab.compare(turns, ["a", "b"], 0.01, 0), pair, None)
    assert words in told
    assert "inf" not in told
    assert "1 rounds" not in told
