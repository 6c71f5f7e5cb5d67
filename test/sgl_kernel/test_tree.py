"""The draft tree and its greedy verification, against the linked nodes that the trees were made from."""

from __future__ import annotations

import random

import pytest
import torch
from draft_trees import Batch, batches, make_batch
from hypothesis import given, settings
from hypothesis import strategies as st

import sgl_kernel_cpu as ops

FULL_MASK, QLEN_ONLY, BITPACKING = 0, 1, 2


def expected_masks(batch: Batch) -> list[list[list[bool]]]:
    masks = []
    for tree in batch.trees:
        paths = [{ancestor.order for ancestor in node.path()} for node in tree]
        masks.append([[j in path for j in range(batch.drafts)] for path in paths])
    return masks


def build(batch: Batch, seq_lens: list[int], tree_mask: torch.Tensor, mode: int) -> dict[str, torch.Tensor]:
    shape = (len(seq_lens), batch.drafts)
    links = torch.full((3, *shape), -777)  # rows of one buffer, as SGLang allocates them
    out = {
        "positions": torch.full((shape[0] * shape[1],), -777),
        "index": links[0],
        "child": links[1],
        "sibling": links[2],
        "mask": tree_mask,
    }
    ops.build_tree_kernel_efficient_cpu(
        batch.parent_list,
        batch.selected_index,
        torch.tensor(seq_lens),
        tree_mask,
        out["positions"],
        out["index"],
        out["child"],
        out["sibling"],
        batch.topk,
        batch.steps,
        batch.drafts,
        mode,
    )
    return out


@given(batches(), st.data(), st.sampled_from([torch.bool, torch.uint8]))
@settings(max_examples=150, deadline=None)
def test_links_positions_and_short_mask(batch: Batch, data: st.DataObject, dtype: torch.dtype) -> None:
    bs, n = len(batch.trees), batch.drafts
    seq_lens = data.draw(st.lists(st.integers(0, 3000), min_size=bs, max_size=bs))
    spare = 7  # a buffer made for a larger batch
    mask = torch.ones(bs * n * n + spare, dtype=dtype)
    out = build(batch, seq_lens, mask, QLEN_ONLY)

    index, child, sibling = batch.links()
    assert torch.equal(out["index"], index)
    assert torch.equal(out["child"], child)
    assert torch.equal(out["sibling"], sibling)
    depths = [s + len(node.path()) - 1 for s, tree in zip(seq_lens, batch.trees, strict=True) for node in tree]
    assert out["positions"].tolist() == depths
    assert mask[: bs * n * n].reshape(bs, n, n).bool().tolist() == expected_masks(batch)
    assert mask[bs * n * n :].bool().all()


@given(batches(max_drafts=16), st.data())
@settings(max_examples=60, deadline=None)
def test_full_mask_leaves_the_prefix_alone(batch: Batch, data: st.DataObject) -> None:
    bs, n = len(batch.trees), batch.drafts
    seq_lens = data.draw(st.lists(st.integers(0, 40), min_size=bs, max_size=bs))
    size = sum(n * (s + n) for s in seq_lens) + 5
    mask = torch.rand(size, generator=torch.Generator().manual_seed(size)) < 0.5
    before = mask.clone()
    build(batch, seq_lens, mask, FULL_MASK)

    offset = 0
    for seq_len, expected in zip(seq_lens, expected_masks(batch), strict=True):
        end = offset + n * (seq_len + n)
        rows = mask[offset:end].reshape(n, seq_len + n)
        assert torch.equal(rows[:, :seq_len], before[offset:end].reshape(n, seq_len + n)[:, :seq_len])
        assert rows[:, seq_len:].tolist() == expected
        offset = end
    assert torch.equal(mask[offset:], before[offset:])


@given(batches(max_drafts=32))
@settings(max_examples=60, deadline=None)
def test_packed_mask(batch: Batch) -> None:
    bs, n = len(batch.trees), batch.drafts
    dtype = torch.uint8 if n <= 8 else torch.uint16 if n <= 16 else torch.uint32
    mask = torch.full((bs * n + 3,), 5, dtype=dtype)
    build(batch, [9] * bs, mask, BITPACKING)
    rows = [row for masks in expected_masks(batch) for row in masks]
    assert mask.tolist() == [*(sum(1 << j for j, bit in enumerate(row) if bit) for row in rows), 5, 5, 5]


@pytest.mark.parametrize("drafts", range(2, 6))
def test_chain(drafts: int) -> None:
    """topk 1, also with fewer tokens kept than drafted, which takes the general path."""
    batch = make_batch(3, bs=2, topk=1, steps=4, drafts=drafts)
    mask = torch.zeros(2 * drafts * drafts, dtype=torch.bool)
    out = build(batch, [4, 11], mask, QLEN_ONLY)
    assert out["child"].tolist() == [[*range(1, drafts), -1]] * 2
    assert out["sibling"].tolist() == [[-1] * drafts] * 2
    assert out["positions"].tolist() == [*range(4, 4 + drafts), *range(11, 11 + drafts)]
    assert torch.equal(mask.reshape(2, drafts, drafts), torch.ones(2, drafts, drafts).tril().bool())


def test_token_without_a_selected_parent_is_left_out() -> None:
    """Token 5 hangs from token 1 of the first step, which is not selected; only NaN scores give that."""
    batch = make_batch(0, bs=1, topk=2, steps=2, drafts=3)
    batch.parent_list = torch.tensor([[-1, 0, 1]])
    batch.selected_index = torch.tensor([[0, 5]])
    mask = torch.zeros(9, dtype=torch.bool)
    out = build(batch, [10], mask, QLEN_ONLY)
    assert out["child"].tolist() == [[1, -1, -1]]
    assert out["sibling"].tolist() == [[-1, -1, -1]]
    assert out["positions"].tolist() == [10, 11, 11]
    assert mask.reshape(3, 3).tolist() == [[True, False, False], [True, True, False], [True, False, True]]


def test_refusals_name_the_mode() -> None:
    batch = make_batch(0, bs=1, topk=8, steps=2, drafts=40)
    with pytest.raises(ValueError, match="tree_mask_mode 3"):
        build(batch, [5], torch.zeros(1600, dtype=torch.bool), 3)
    with pytest.raises(ValueError, match=r"QLEN_ONLY_BITPACKING.*40"):
        build(batch, [5], torch.zeros(40, dtype=torch.uint32), BITPACKING)


@given(batches(max_drafts=24), st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 6))
@settings(max_examples=200, deadline=None)
def test_greedy_verification(batch: Batch, seed: int, vocab: int, width: int) -> None:
    """A small vocabulary makes matches likely; children of one node get distinct tokens, as top-k gives them."""
    rng = random.Random(seed)
    bs, n = len(batch.trees), batch.drafts
    vocab += max(len(node.children) for tree in batch.trees for node in tree)
    tokens = [[rng.randrange(vocab) for _ in range(n)] for _ in range(bs)]
    for b, tree in enumerate(batch.trees):
        for node in tree:
            for child, token in zip(node.children, rng.sample(range(vocab), len(node.children)), strict=True):
                tokens[b][child.order] = token
    target = [[rng.randrange(vocab) for _ in range(n)] for _ in range(bs)]

    predicts = [-5] * (bs * n)
    accept_index = [[-9] * width for _ in range(bs)]
    accepted = [0] * bs
    for b, tree in enumerate(batch.trees):
        node = tree[0]
        while True:
            predicts[b * n + node.order] = target[b][node.order]
            accept_index[b][accepted[b]] = b * n + node.order
            matches = [c for c in node.children if tokens[b][c.order] == target[b][node.order]]
            if not matches or accepted[b] == width - 1:
                break
            node = matches[0]
            accepted[b] += 1

    got_predicts = torch.full((bs * n,), -5, dtype=torch.int32)
    got_index = torch.full((bs, width), -9, dtype=torch.int32)
    got_num = torch.full((bs,), -3, dtype=torch.int32)
    links = batch.links()
    ops.verify_tree_greedy_cpu(
        predicts=got_predicts,
        accept_index=got_index,
        accept_token_num=got_num,
        candidates=torch.tensor(tokens),
        retrive_index=links[0],
        retrive_next_token=links[1],
        retrive_next_sibling=links[2],
        target_predict=torch.tensor(target),
    )
    assert got_predicts.tolist() == predicts
    assert got_index.tolist() == accept_index
    assert got_num.tolist() == accepted
