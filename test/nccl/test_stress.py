"""benchmark.allreduce.stress without a GPU: its plan, its sums, what it finds wrong, and counts of the run kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmark.allreduce import machines, steps, stress

from sglang_patches.document import schema
from sglang_patches.runtime.pcie_nccl_allreduce.guard import Guard

REPO = Path(__file__).parents[2]
RESULTS = REPO / "benchmark/allreduce/results/2xh200-stress"
CPU = torch.device("cpu")


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "benchmark.allreduce.stress", "--backend", "gloo", "--hidden", "16", *arguments]
    mine = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    return subprocess.run(
        line, capture_output=True, text=True, timeout=150, cwd=REPO, env={**mine, "OMP_NUM_THREADS": "1"}
    )


@pytest.mark.parametrize("name", ["default-profile", "unguarded"])
def test_the_plan_is_the_one_that_the_committed_results_were_made_with(name: str) -> None:
    assert Counter(step.kind for step in steps.plan(result(name)["steps"], seed=1)) == result(name)["work"]


@pytest.mark.parametrize("world", range(2, stress.MOST_RANKS + 1))
def test_sums_and_means_are_exact_and_no_step_has_the_sum_of_the_one_before(world: int) -> None:
    patterns = steps.Patterns(24, world, CPU)
    for step in range(40):
        parts = torch.stack([patterns.part(64, step, rank) for rank in range(world)]).double()
        total = patterns.total(64, step)
        assert torch.equal(total.double(), parts.sum(0))
        assert torch.equal(total.clone().div_(world).double(), parts.sum(0) / world)
        assert not torch.equal(total, patterns.total(64, step + 1))
        assert not torch.equal(parts[0], parts[1])


@pytest.mark.parametrize("wrong", [None, *range(24)])
def test_one_wrong_all_reduce_anywhere_in_a_chain_is_seen_at_its_end(wrong: int | None) -> None:
    patterns, chain = steps.Patterns(8, 2, CPU), machines.Captured((4, 8), CPU)
    called: list[torch.Tensor] = []

    def all_reduce(tensor: torch.Tensor) -> None:  # rank 0's side of two ranks in step
        tensor.copy_(patterns.total(4, 3) if not called else tensor * 2)
        if len(called) == wrong:
            tensor[2, 5] += 1
        called.append(tensor)

    chain.source.copy_(patterns.part(4, 3, 0))
    chain.body(all_reduce, 24, 2)
    assert torch.equal(chain.buffer, patterns.total(4, 3) / 2) == (wrong is None)


def test_two_ranks_find_every_sum_right(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = command("--steps", "60", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("0 wrong sums\n")
    found, kinds = json.loads(out.read_text()), Counter(step.kind for step in steps.plan(60, 1))
    del kinds["cancel"]
    assert [(rank["checked"], rank["wrong"]) for rank in found["ranks"]] == [(kinds, {})] * 2
    assert found["finished"]
    assert found["provenance"]["set_by"]["NCCL_NVLS_ENABLE"] == "upstream"
    assert schema.parse(found, "result.json").code.release == "0.5.23"
    assert set(found["provenance"]["sources_sha256"]) == {"stress.py", "steps.py", "machines.py", "guard.py"}


def test_three_ranks_all_find_a_planted_wrong_sum_in_a_graph_and_fail(tmp_path: Path) -> None:
    out, kinds = tmp_path / "result.json", [step.kind for step in steps.plan(20, 1)]
    at = kinds.index("verify")
    done = command("--ranks", "3", "--steps", "20", "--break", str(at), "--out", str(out))
    assert done.returncode == 1, done.stderr
    assert done.stdout.endswith("3 wrong sums\n")
    assert [rank["wrong"] for rank in json.loads(out.read_text())["ranks"]] == [{"verify": 1}] * 3


def test_ranks_that_do_not_finish_are_ended_and_that_is_a_failure(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = command("--timeout", "0.5", "--out", str(out))
    assert done.returncode == 1
    assert "did not finish within 0.5 s" in done.stdout
    found = json.loads(out.read_text())
    assert (found["finished"], found["ranks"]) == (False, None)


def test_too_few_gpus_are_told_with_the_number_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(stress.CannotRun, match=r"2 ranks need as many GPUs(.|\n)*seen       1\n.*at least 2"):
        stress.possible(stress.parse([]))


@pytest.mark.parametrize("wrong", [["--ranks", "1"], ["--ranks", "9"], ["--break", "8000"], ["--break", "-1"]])
def test_options_out_of_range_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        stress.parse(wrong)


def test_the_guard_counts_what_the_committed_run_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    main, side = (SimpleNamespace(cuda_stream=handle, wait_stream=lambda other: None) for handle in (1, 2))
    now = SimpleNamespace(stream=main)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: now.stream)
    following = Guard(object())
    for _ in machines.TIMED_ROWS:
        following.before_call()  # the warm-up before its capture
        for _ in range(machines.WARMUPS + machines.REPLAYS):
            following.before_replay()
    for rows in (steps.ROWS[kind] for kind in steps.CALLS):
        for _ in rows:
            following.before_call()
    before = following.figures()
    for step in steps.plan(8000, 1):
        now.stream = side if step.kind == "side" else main
        if step.kind == "eager":
            following.before_call()
        elif step.kind in steps.CALLS:
            following.before_replay()
    told = result("default-profile")["guard_figures"]
    # The run was made before the guard counted hooks that fail.
    assert following.figures() | {"graphs": 0} == told | {"graphs": 0, "hooks_failed": 0}
    # In the steps alone, as the README tells.
    assert sum(following.figures().values()) - sum(before.values()) == 569
    assert told["graphs"] == sum(len(steps.ROWS[kind]) for kind in steps.CALLS)


def test_the_run_of_this_file_on_two_gpus_checked_every_planned_step_on_both_ranks() -> None:
    kept = REPO / "benchmark/allreduce/results/2xh200-stress-2"
    whole, broken = (json.loads((kept / f"{name}.json").read_text()) for name in ("default-profile", "broken"))
    kinds = Counter(step.kind for step in steps.plan(8000, 1))
    del kinds["cancel"]
    assert [(rank["checked"], rank["wrong"]) for rank in whole["ranks"]] == [(kinds, {})] * 2
    # The same plan, so the same counts as the run that the test above recounts.
    told = result("default-profile")["guard_figures"]
    held = ("eager_calls_held", "replays_held", "replays_ordered")
    assert broken["wrong"] == 2
    assert [rank["guard"]["hooks_failed"] for rank in whole["ranks"]] == [0, 0]
    assert sum(whole["ranks"][0]["guard"][name] for name in held) == sum(told[name] for name in held) - 14
