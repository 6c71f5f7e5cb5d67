"""eagle-verify-cuda-graph: a verify in slices gives what it gives whole.

`sliced_verify.py` verifies with the real target on the CPU. What needs a GPU, replaying captured graphs, is left to the
run on one.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from verify_slices import LENGTHS, WIDTH, output, stand_in, verify_batch

from sglang_patches.runtime.eagle_verify_cuda_graph import slice_timing, slices

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("slices") / "found.pt"
    command = [sys.executable, str(HERE / "sliced_verify.py"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(("kind", "parts"), [("chain", [3, 3, 1]), ("tree", [2, 2, 1])])
def test_slices_give_what_the_whole_batch_gives(found: Any, kind: str, parts: list[int]) -> None:
    whole, sliced = found[kind, "whole"], found[kind, "sliced"]
    assert sliced["executed"] == parts
    assert whole["executed"] == []
    for name in ("logits", "hidden", "kv"):
        assert whole[name].abs().max() > 1
        assert (sliced[name] - whole[name]).abs().max() < 1e-5 * whole[name].abs().max(), name
    assert torch.equal(sliced["logits"].argmax(-1), whole["logits"].argmax(-1))
    assert sliced["counts"] == {("verify", "graph", "sliced"): 1}
    assert sliced["failures"] == {}


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_a_slice_that_fails_leaves_the_batch_to_upstream(found: Any, kind: str) -> None:
    whole, failing, later = (found[kind, name] for name in ("whole", "failing", "after a failure"))
    assert len(failing["executed"]) == 2  # one slice had written its KV
    for name in ("logits", "hidden", "kv"):
        assert torch.equal(failing[name], whole[name])
    assert failing["counts"] == {("verify", "eager", "batch_too_large"): 1}
    assert failing["failures"] == {"slice": 1}
    told = failing["decided"]["slices"]
    assert told["up_to"] == 0
    assert "RuntimeError: this replay fails" in told["why"]
    # Switched off from then on: upstream's path alone, which `note_verify` counts.
    assert (later["executed"], later["counts"], later["failures"]) == ([], {}, {})


def test_both_ways_are_measured_over_upstreams_own_forward(found: Any) -> None:
    told, executed, failures = found["measured"]
    told = told["slices"]
    assert failures == {}
    assert [timing["batch_size"] for timing in told["measured"]] == [3, 4, 5]
    assert all(timing["eager_ms"] > 0 and timing["sliced_ms"] > 0 for timing in told["measured"])
    once = slice_timing.WARM_UP + slice_timing.COUNTED
    assert executed == [2, 1] * once + [2, 2] * once + [2, 2, 1] * once
    # Two or three eager passes in place of replays take longer than one.
    assert (told["up_to"], told["why"]) == (0, "an eager pass is faster")


@pytest.mark.parametrize("host", [True, False])
def test_the_full_mask_is_cut_at_the_lengths(host: bool) -> None:
    # Cells of request i have the value i; the buffer is longer than the cells, as upstream's may be.
    cells = [torch.full((WIDTH * (length + WIDTH),), i, dtype=torch.uint8) for i, length in enumerate(LENGTHS)]
    batch = verify_batch(torch.cat([*cells, torch.full((50,), 99, dtype=torch.uint8)]), host)
    parts = list(slices.cut(batch, stand_in(), 2))
    for part, requests in zip(parts, ([0, 1], [2, 3], [4]), strict=True):
        assert torch.equal(part.spec_info.custom_mask, torch.cat([cells[i] for i in requests]))
        assert part.seq_lens_sum == (sum(LENGTHS[i] for i in requests) if host else None)


@pytest.mark.parametrize(
    ("layout", "cells"),
    [(TreeMaskMode.QLEN_ONLY, WIDTH * WIDTH), (TreeMaskMode.QLEN_ONLY_BITPACKING, WIDTH)],
)
def test_masks_of_the_drafts_alone_are_cut_by_requests(layout: TreeMaskMode, cells: int) -> None:
    mask = torch.arange(len(LENGTHS) * cells)
    parts = list(slices.cut(verify_batch(mask), stand_in(layout), 3))
    assert [part.spec_info.custom_mask.tolist() for part in parts] == [
        list(range(3 * cells)),
        list(range(3 * cells, 5 * cells)),
    ]


def test_every_row_goes_to_one_slice_in_order_and_the_batch_stays_as_it_was() -> None:
    batch = verify_batch(out_cache_loc_virtual=torch.arange(len(LENGTHS) * WIDTH) + 5000)
    before = {name: getattr(batch, name) for name in vars(batch)}
    info_before = dict(vars(batch.spec_info))
    parts = list(slices.cut(batch, stand_in(), 2))
    assert [part.batch_size for part in parts] == [2, 2, 1]
    for name in ("input_ids", "positions", "req_pool_indices", "seq_lens", "seq_lens_cpu"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name)), name
    for name in ("draft_token", "positions", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling"):
        joined = torch.cat([getattr(part.spec_info, name) for part in parts])
        assert torch.equal(joined, getattr(batch.spec_info, name)), name
    assert [rid for part in parts for rid in part.rids] == batch.rids
    assert [part.global_num_token_non_padded_cpu for part in parts] == [8, 8, 4]
    # Each slice plans its own slots, from the ids that the scheduler allocated.
    assert torch.equal(torch.cat([part.kv_loc_plan for part in parts]), batch.out_cache_loc_virtual)
    assert all(getattr(batch, name) is value for name, value in before.items())
    assert all(getattr(batch.spec_info, name) is value for name, value in info_before.items())


@pytest.mark.parametrize(
    "changes",
    [
        {"mrope_positions": torch.zeros(3, 20)},
        {"replace_embeds": torch.zeros(1)},
        {"mamba_track_indices": torch.zeros(5)},
        {"attn_tp_sequence_sharded": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_field_that_is_not_known_refuses_slices(changes: dict[str, Any]) -> None:
    with pytest.raises(slices.CannotSlice, match=next(iter(changes))):
        list(slices.cut(verify_batch(**changes), stand_in(), 2))


def test_other_verify_inputs_are_refused() -> None:
    batch = verify_batch()
    batch.spec_info = SimpleNamespace(draft_token_num=4)
    with pytest.raises(slices.CannotSlice, match="SimpleNamespace"):
        list(slices.cut(batch, stand_in(), 2))


def test_outputs_are_copied_because_the_next_replay_overwrites_them() -> None:
    joined = slices.Joined(3)
    buffer = output(2, 1.0)
    joined.add(buffer, 2)
    for name in ("next_token_logits", "hidden_states"):
        getattr(buffer, name).fill_(7.0)
    joined.add(output(1, 2.0), 1)
    assert joined.output().next_token_logits[:, 0].tolist() == [1, 1, 2]
    assert joined.output().hidden_states[:, 0].tolist() == [1, 1, 2]


@pytest.mark.parametrize(
    ("outputs", "why"),
    [
        ([output(3, 1.0)], "a slice of 2 rows gave next_token_logits=(3, 3)"),
        ([output(2, 1.0, customized_info={})], "customized_info=dict"),
        ([output(2, 1.0, last_hidden_states=torch.zeros(2, 1)), output(2, 1.0)], "differ in whether they have last"),
        ([output(2, 1.0), output(2, 1.0, last_hidden_states=torch.zeros(2, 1))], "differ in whether they have last"),
    ],
)
def test_what_cannot_be_joined_is_refused(outputs: list[Any], why: str) -> None:
    joined = slices.Joined(4)
    for part in outputs[:-1]:
        joined.add(part, 2)
    with pytest.raises(slices.CannotSlice) as error:
        joined.add(outputs[-1], 2)
    assert why in str(error.value)


def test_missing_rows_are_refused() -> None:
    joined = slices.Joined(4)
    joined.add(output(2, 1.0), 2)
    with pytest.raises(slices.CannotSlice, match="gave 2 of 4 rows"):
        joined.output()


def test_upstreams_forward_asks_for_slices_before_it_goes_eager() -> None:
    source = inspect.getsource(ModelRunner._forward_raw)
    assert source.index("execute(") < source.index("replay_slices(self, forward_batch)")
    assert source.index("replay_slices(self, forward_batch)") < source.index("_prepare_eager_forward_batch(")
