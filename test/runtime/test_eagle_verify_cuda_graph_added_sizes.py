"""eagle-verify-cuda-graph: which sizes a budget adds, what they are estimated to take, and how capturing them goes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_coverage import forget
from hypothesis import given
from hypothesis import strategies as st

from sglang_patches.bench import shard
from sglang_patches.runtime.eagle_verify_cuda_graph import counting, coverage, slice_policy
from sglang_patches.runtime.eagle_verify_cuda_graph import sizes as added_sizes


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)


@given(largest=st.integers(1, 300), target=st.integers(1, 600), alignment=st.sampled_from([1, 2, 4, 8]))
def test_added_sizes_reach_the_target_and_pad_by_a_quarter_at_most(largest: int, target: int, alignment: int) -> None:
    sizes = added_sizes.sizes_up_to(largest, target, alignment, every=False)
    if largest >= target:
        assert sizes == []
        return
    assert target <= sizes[-1] < target + alignment
    for last, size in zip([largest, *sizes], sizes, strict=False):
        assert size % alignment == 0
        assert last < size <= max(last * 1.25, last + 2) + alignment


def test_without_padding_every_size_needs_a_graph() -> None:
    assert added_sizes.sizes_up_to(4, 9, 1, every=True) == [5, 6, 7, 8, 9]


RESULTS = sorted(Path("benchmark/results/verify_step").glob("*.json"))


@pytest.mark.parametrize("result", RESULTS, ids=lambda path: path.stem)
def test_the_estimate_covers_what_was_measured_and_not_twice_that(result: Path) -> None:
    run = json.loads(result.read_text())
    options, told = run["options"], run["outcome_after_every_size"]
    estimated = added_sizes.cost(
        told["added_sizes"],
        options["cuda_graph_max_bs_decode"],
        shard.LAYERS,
        options["speculative_num_draft_tokens"],
        shard.target()["vocab_size"],
    )
    assert told["added_mib"] <= estimated <= 2 * told["added_mib"]


def test_there_is_a_measurement_to_hold_the_estimate_against() -> None:
    assert RESULTS


def test_each_size_costs_its_layers_and_each_request_its_logits() -> None:
    # 4 tokens x 163840 logits x 4 bytes, twice, are 5 MiB a request; with 2 MiB for its graph 7.
    assert added_sizes.cost([8, 14], 4, layers=10, tokens=4, vocabulary=163840) == 2 * 10 * 3.5 + 10 * 7
    assert added_sizes.cost([], 4, layers=10, tokens=4, vocabulary=163840) == 0


def test_less_memory_buys_coarser_sizes_before_it_leaves_some_out() -> None:
    choices = [[6, 8, 10, 12], [6, 9, 12], [8, 12]]
    assert added_sizes.affordable(choices, 4, len) == [6, 8, 10, 12]
    assert added_sizes.affordable(choices, 3, len) == [6, 9, 12]
    assert added_sizes.affordable(choices, 2, len) == [8, 12]
    assert added_sizes.affordable(choices, 1, len) == [8]
    assert added_sizes.affordable(choices, 0, len) == []


class Runner:
    """Stands where a graph runner does; capturing needs a GPU."""

    def __init__(self, free: list[int], fails: int = 0) -> None:
        self.device_module = SimpleNamespace(mem_get_info=lambda: (free.pop(0), 0))
        self.captured: list[int] = []
        self.capture_bs = [4, 6, 8]
        self.max_bs = 8
        self.fails = fails

    @coverage.capture_added
    def capture_one_shape(self, size: int, forward: Any, stream_idx: int | None = None) -> None:
        if size == self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 9 TiB")
        self.captured.append(size)


def test_only_added_sizes_are_measured() -> None:
    coverage._state.plan = coverage.Plan(limit=8, added=(8,))
    runner = Runner([100 << 20, 90 << 20, 90 << 20, 50 << 20])
    for size in (8, 4):
        runner.capture_one_shape(size, None, stream_idx=None)
    assert runner.captured == [8, 4]
    assert coverage._state.plan.mib == 10
    assert coverage._state.plan.seconds > 0


def test_an_added_size_that_cannot_be_captured_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_policy, "several_ranks", lambda: False)
    coverage._state.plan = coverage.Plan(limit=8, added=(6, 8))
    runner = Runner([1 << 30] * 9, fails=8)
    for size in (8, 6, 4):
        runner.capture_one_shape(size, None)
    assert (runner.captured, runner.capture_bs, runner.max_bs) == ([6, 4], [4, 6], 6)
    assert coverage._state.plan.left_out == "capturing size 8 failed: CUDA out of memory."
    assert counting.passes.failures == {"capture": 1}


@pytest.mark.parametrize(("ranks", "fails"), [(2, 8), (1, 4)])
def test_other_failures_to_capture_stay_upstreams(monkeypatch: pytest.MonkeyPatch, ranks: int, fails: int) -> None:
    """Of an added size on several ranks, and of a size that upstream captures itself."""
    monkeypatch.setattr(slice_policy, "several_ranks", lambda: ranks > 1)
    coverage._state.plan = coverage.Plan(limit=8, added=(6, 8))
    with pytest.raises(torch.OutOfMemoryError):
        Runner([1 << 30] * 9, fails=fails).capture_one_shape(fails, None)
