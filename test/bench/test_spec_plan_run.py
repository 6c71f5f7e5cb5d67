"""benchmark/spec_plan: arms share GPUs fairly, and ratios are taken within a round."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
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


# Of variables that a command is told with; upstream's import sets some in this process.
STEERING = ("SGL", "NCCL", "CUDA", "TRITON", "OMP", "FLASHINFER", "TORCH", "PYTORCH")


def test_the_result_has_the_whole_command_and_goes_on_with_the_same_token_mode_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[dict[str, str]] = []

    class Engine:
        def __init__(self, words: list[str], env: dict[str, str]) -> None:
            begun.append(env)
            measured = {"arm": words[-1], "batches": [{"batch_size": 4, "seconds": [1.0], "passes": [1]}]}
            Path(words[words.index("--one") - 1]).write_text(json.dumps(measured))

        def wait(self, _limit: float) -> int:
            return 0

    for name in [name for name in os.environ if name.startswith(STEERING)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SGLANG_PATCHES", "+draft-extend-split-kv")
    # Not the module's own Popen, with which torch's import looks for libraries.
    monkeypatch.setattr(run, "subprocess", SimpleNamespace(Popen=Engine, TimeoutExpired=subprocess.TimeoutExpired))
    monkeypatch.setattr(run.selection, "has_gpu", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(run.provenance, "code_state", lambda: {"id": "x"})
    out = tmp_path / "tokens.json"
    words = ["--out", str(out), "--arms", "none", "--rounds", "1", "--batch-sizes", "4"]
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    assert run.main() == 0
    told = json.loads(out.read_text())
    steered = ["env", "SGLANG_PATCHES=+draft-extend-split-kv"]
    assert told["command"] == [*steered, "python", "-m", "benchmark.spec_plan.run", *words]
    assert told["work"]["token_mode"] == begun[0]["SGLANG_SIMULATE_ACC_TOKEN_MODE"] == "real-draft-token"
    assert run.main() == 0
    assert len(begun) == 1, "what is measured is not measured again"
    # As results were before they noted it: their engines ran with upstream's default.
    del told["work"]["token_mode"]
    out.write_text(json.dumps(told))
    with pytest.raises(SystemExit, match="2"):
        run.main()


def test_it_says_what_is_missing(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "benchmark.spec_plan.run", "--out", str(tmp_path / "result" / "tokens.json")]
    refused = subprocess.run([*words, "--arms", "none,plan"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "plan needs --plan with a file" in refused.stderr
    if not run.selection.has_gpu():
        told = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (told.returncode, "no GPU here" in told.stderr) == (2, True)
    assert not (tmp_path / "result").exists()
