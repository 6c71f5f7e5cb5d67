"""benchmark.sliced_verify.run without an engine: what is asked in which order, what is told, and what fails it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmark.sliced_verify import inside, run

REPO = Path(__file__).resolve().parents[2]


class Fake(run.Served):
    """Answers a prompt with its own first tokens; where slices are on, a batch of 11 gets one token wrong."""

    def __init__(self, takes: int = 3) -> None:
        self.on, self.takes = True, takes
        self.asked: list[tuple[bool, int]] = []
        self.counted: dict[str, dict[str, int]] = {"graph": {"captured": 5}}

    def switch(self, on: bool, whatever: bool = False) -> int:
        self.on = on
        return 16

    def counts(self) -> dict[str, dict[str, int]]:
        return json.loads(json.dumps(self.counted))  # type: ignore[no-any-return]

    def greedy(self, prompts: run.Answers, tokens: int) -> run.Answers:
        self.asked.append((self.on, len(prompts)))
        path, why = ("graph", "captured") if len(prompts) <= 4 else ("graph", "sliced") if self.on else ("eager", "big")
        reasons = self.counted.setdefault(path, {})
        reasons[why] = reasons.get(why, 0) + tokens
        answers = [prompt[:tokens] for prompt in prompts]
        if self.on and len(prompts) == 11:
            answers[7][3] += 1
        return answers

    def cycles(self, prompts: run.Answers, tokens: int) -> dict[str, list[float]]:
        self.greedy(prompts, tokens)
        cycle = 10.0 if self.on else 50.0
        return {"verify": [cycle / 2] * self.takes, "cycle": [cycle] * self.takes}


def test_answers_are_compared_both_ways_and_with_groups() -> None:
    fake = Fake()
    five, eleven = run.served(fake, 4096, 6, (5, 11), lambda text: None)
    assert fake.asked[:6] == [(True, 5), (True, 5), (False, 5), (False, 5), (False, 4), (False, 1)]
    assert five["on = off"] == five["off = groups of 4"] == {"equal": 5, "of": 5, "part_at": []}
    assert five["counts on"] == {"graph/sliced": 12}
    assert five["counts off"] == {"eager/big": 12}
    wrong = {"equal": 10, "of": 11, "part_at": [3]}
    assert eleven["on = off"] == eleven["on = groups of 4"] == wrong
    assert eleven["on = on again"] == eleven["off = groups of 4"] == {"equal": 11, "of": 11, "part_at": []}
    assert fake.on


def test_ways_take_turns_and_the_first_round_does_not_count() -> None:
    fake = Fake()
    rows = run.cycles(fake, 4096, (4, 5), lambda text: None)
    assert [way for way, size in fake.asked if size == 5] == [False, True, True, False, False, True]
    assert [(row["batch_size"], row["slices"], row["cycles"], row["cycle"], row["verify p10-p90"]) for row in rows] == [
        (4, "off", 6, 50.0, [25.0, 25.0]), (4, "on", 6, 10.0, [5.0, 5.0]),
        (5, "off", 6, 50.0, [25.0, 25.0]), (5, "on", 6, 10.0, [5.0, 5.0]),
    ]  # fmt: skip
    assert rows[3]["samples"]["cycle"] == [10.0] * 6


def test_a_batch_that_never_stayed_at_its_size_is_an_error() -> None:
    with pytest.raises(ValueError, match="no whole cycle"):
        run.cycles(Fake(takes=0), 4096, (5,), lambda text: None)


def test_a_part_that_fails_is_kept_and_the_next_goes_on(tmp_path: Path) -> None:
    result = run.Result(tmp_path / "slices.json", ["a", "command"])

    def failing() -> Any:
        raise RuntimeError("out of luck")

    result.part("tiny.forward", failing)
    result.part("tiny.end", lambda: {"result": "applied"})
    kept = json.loads((tmp_path / "slices.json").read_text())
    assert result.failed
    assert "out of luck" in kept["tiny.forward"]["error"]
    assert kept["tiny.end"] == {"result": "applied"}
    assert kept["provenance"]["code_state"]["sglang_patches"]["id"]


def test_slices_are_switched_as_start_up_decided_or_whatever_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_patches.runtime.eagle_verify_cuda_graph import coverage, slice_policy, slice_timing

    monkeypatch.setattr(coverage, "MAX_ADDED_SIZE", coverage.MAX_ADDED_SIZE)
    monkeypatch.setattr(slice_policy, "set_decision", slice_policy.set_decision)
    runner = SimpleNamespace(max_bs=inside.CAPTURED)
    decision = slice_policy.Decision(8, "an eager pass is faster above 8", runner)
    monkeypatch.setattr(slice_timing, "decide", lambda worker: slice_policy.set_decision(decision))
    switch = inside.Switch()
    assert switch.slices(True, whatever=True) == 0  # on a CPU nothing is ever decided
    switch.install()
    try:
        slice_timing.decide("the worker")
        assert switch.worker == "the worker"
        told = {}
        for name, given in {"off": (False, True), "on": (True, False), "whatever": (True, True)}.items():
            told[name] = (switch.slices(*given), [size for size in (5, 8, 11, 16) if slice_policy.covers(runner, size)])
        assert told == {"off": (0, []), "on": (8, [5, 8]), "whatever": (16, [5, 8, 11, 16])}
        switch.decision = slice_policy.Decision(0, "not with LoRA")
        assert switch.slices(True, whatever=True) == 0
        monkeypatch.setattr(inside, "switch", switch)
        with pytest.raises(RuntimeError, match="not with LoRA"):
            inside.forward()
    finally:
        switch.slices(False)


def test_differences_of_two_passes() -> None:
    import torch

    logits, hidden = torch.tensor([[1.0, 2.0], [3.0, -4.0]]), torch.zeros(2, 3)
    other = torch.tensor([[2.5, 2.0], [3.0, -4.0]])
    same = {"logits": 0.0, "of": 4.0, "hidden": 0.0, "argmax_equal": 1.0, "finite": True}
    assert inside.difference((logits, hidden), (logits, hidden)) == same
    found = inside.difference((logits, hidden), (other, hidden + 0.5))
    assert found == {"logits": 1.5, "of": 4.0, "hidden": 0.5, "argmax_equal": 0.5, "finite": True}
    assert not inside.difference((logits, hidden), (other * float("inf"), hidden))["finite"]


@pytest.mark.parametrize(
    ("arguments", "patches", "said"),
    [(["--cpu"], "provenance", "eagle-verify-cuda-graph is off"), (["--cpu", "--only", "shard"], "", "needs a GPU")],
)
def test_what_cannot_run_is_said(tmp_path: Path, arguments: list[str], patches: str, said: str) -> None:
    line = [sys.executable, "-m", "benchmark.sliced_verify.run", "--out", str(tmp_path / "new/slices.json"), *arguments]
    environ = {**os.environ, **({"SGLANG_PATCHES": patches} if patches else {})}
    done = subprocess.run(line, cwd=REPO, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert not (tmp_path / "new").exists()
