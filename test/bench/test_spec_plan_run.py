"""benchmark/spec_plan: arms share GPUs fairly, and ratios are taken within a round."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark.spec_plan import run


def test_arms_change_gpus_every_round_and_none_runs_twice() -> None:
    groups = run.jobs(["none", "fixed", "plan"], rounds=2, gpus=2, done={("fixed", 0)})
    flat = [job for group in groups for job in group]
    assert sorted(flat) == [("fixed", 1, 0), ("none", 0, 0), ("none", 1, 1), ("plan", 0, 0), ("plan", 1, 1)]
    for group in groups:
        assert len({gpu for _, _, gpu in group}) == len(group)
        assert len({number for _, number, _ in group}) == 1
    assert all(len(group) == 1 for group in run.jobs(["none", "plan"], rounds=3, gpus=1, done=set()))


def engine(arm: str, number: int, seconds: list[float]) -> dict[str, Any]:
    return {"arm": arm, "round": number, "batches": [{"batch_size": 4, "seconds": seconds, "passes": [1]}]}


def test_ratios_are_of_one_round_and_the_least_is_told() -> None:
    engines = [
        engine("none", 0, [1.0, 1.0]),
        engine("plan", 0, [0.5, 0.5]),
        engine("plan", 1, [1.6, 1.6]),
        engine("none", 1, [2.0, 2.0]),
    ]
    (row,) = run.summary(engines, tokens=10)
    assert row["none"] == pytest.approx((40 + 20) / 2)
    assert row["plan"] == pytest.approx((80 + 25) / 2)
    assert row["plan_over_none"] == pytest.approx(1.75)
    assert row["plan_least"] == pytest.approx(1.25)
    assert run.table([row]) == [
        "| batch | none, tok/s | plan, tok/s | plan / none (least round) |",
        "|---|---|---|---|",
        "| 4 | 30 | 52 | 1.750 (1.250) |",
    ]
    assert run.summary([], 10) == []


def test_it_says_what_is_missing(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "benchmark.spec_plan.run", "--out", str(tmp_path / "result" / "tokens.json")]
    refused = subprocess.run([*words, "--arms", "none,plan"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "plan needs --plan with a file" in refused.stderr
    if not run.selection.has_gpu():
        told = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (told.returncode, "no GPU here" in told.stderr) == (2, True)
    assert not (tmp_path / "result").exists()
