"""KV slots and tokens moved between the request table and flat arrays, against plain loops."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sgl_kernel_cpu as ops

INTS = st.sampled_from([torch.int32, torch.int64])


@dataclass
class Case:
    table: torch.Tensor
    rows: list[int]
    starts: list[int]
    ends: list[int]
    locs: torch.Tensor
    dtype: torch.dtype

    def spans(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = torch.tensor(self.rows)
        return rows, torch.tensor(self.starts, dtype=self.dtype), torch.tensor(self.ends, dtype=self.dtype)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Requests in arbitrary rows with ragged, possibly empty spans, and spare room at the end of the flat array."""
    bs, width, dtype = draw(st.integers(1, 8)), draw(st.integers(1, 40)), draw(INTS)
    rng = random.Random(draw(st.integers(0, 2**32)))
    rows = rng.sample(range(12), bs)
    spans = [sorted((rng.randint(0, width), rng.randint(0, width))) for _ in range(bs)]
    total = sum(e - s for s, e in spans)
    table = torch.arange(12 * width, dtype=torch.int32).reshape(12, width) + 10_000
    locs = torch.arange(total + rng.randint(0, 3), dtype=torch.int64) + 500
    return Case(table, rows, [s for s, _ in spans], [e for _, e in spans], locs, dtype)


@given(cases())
@settings(max_examples=150, deadline=None)
def test_assign_req_to_token_pool(case: Case) -> None:
    expected, locs = case.table.tolist(), iter(case.locs.tolist())
    for row, start, end in zip(case.rows, case.starts, case.ends, strict=True):
        for column in range(start, end):
            expected[row][column] = next(locs)
    before = case.locs.clone()
    ops.assign_req_to_token_pool_cpu(*_table_args(case))
    assert case.table.tolist() == expected
    assert torch.equal(case.locs, before)


@given(cases())
@settings(max_examples=150, deadline=None)
def test_assign_extend_cache_locs(case: Case) -> None:
    expected = [
        int(case.table[row, column])
        for row, start, end in zip(case.rows, case.starts, case.ends, strict=True)
        for column in range(start, end)
    ]
    expected += case.locs.tolist()[len(expected) :]
    before = case.table.clone()
    ops.assign_extend_cache_locs_cpu(*_table_args(case))
    assert case.locs.tolist() == expected
    assert torch.equal(case.table, before)


def _table_args(
    case: Case,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    rows, start, end = case.spans()
    return rows, case.table, start, end, case.locs, case.table.shape[1]


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 5), INTS, st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_assign_draft_cache_locs(bs: int, topk: int, steps: int, dtype: torch.dtype, seed: int) -> None:
    rng = random.Random(seed)
    width = 20 + topk * steps
    table = torch.arange(12 * width, dtype=torch.int32).reshape(12, width) + 10_000
    rows, lens = rng.sample(range(12), bs), [rng.randint(0, 20) for _ in range(bs)]
    out = torch.full((bs * topk * steps,), -7)
    ops.assign_draft_cache_locs_contiguous_cpu(
        torch.tensor(rows), table, torch.tensor(lens, dtype=dtype), out, width, topk, steps
    )
    expected = [int(table[row, n + i]) for row, n in zip(rows, lens, strict=True) for i in range(topk * steps)]
    assert out.tolist() == expected


@pytest.mark.parametrize(
    ("start", "end", "room"), [([0, 5], [3, 4], 9), ([0, 0], [3, 9], 20), ([-1, 0], [2, 1], 9), ([0, 0], [3, 3], 5)]
)
@pytest.mark.parametrize("op", [ops.assign_req_to_token_pool_cpu, ops.assign_extend_cache_locs_cpu])
def test_spans_outside_are_refused(op: object, start: list[int], end: list[int], room: int) -> None:
    table = torch.zeros(4, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"spans columns \["):
        op(torch.tensor([0, 1]), table, torch.tensor(start), torch.tensor(end), torch.zeros(room).long(), 8)  # type: ignore[operator]


@given(st.integers(1, 8), st.integers(1, 6), st.booleans(), INTS, st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_fill_bonus_tokens(bs: int, stride: int, flat: bool, dtype: torch.dtype, seed: int) -> None:
    rng = random.Random(seed)
    tokens = [[rng.randrange(1000) for _ in range(stride)] for _ in range(bs)]
    lens = [rng.randint(1, stride) for _ in range(bs)]
    accepted = torch.tensor(tokens, dtype=torch.int32)
    bonus = torch.full((bs + 1,), -7, dtype=torch.int32)
    ops.fill_bonus_tokens_cpu(
        accepted.flatten() if flat else accepted, torch.tensor(lens, dtype=dtype), bonus[:bs], stride
    )
    assert bonus.tolist() == [*(row[n - 1] for row, n in zip(tokens, lens, strict=True)), -7]


@pytest.mark.parametrize("bad", [0, 4])
def test_fill_bonus_tokens_refuses_impossible_lengths(bad: int) -> None:
    with pytest.raises(ValueError, match="accept_lens"):
        ops.fill_bonus_tokens_cpu(torch.zeros(2, 3).int(), torch.tensor([1, bad]), torch.zeros(2).int(), 3)


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 12), INTS, st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_fill_accept_out_cache_loc(bs: int, width: int, drafts: int, dtype: torch.dtype, seed: int) -> None:
    rng = random.Random(seed)
    locs = rng.sample(range(10_000), bs * drafts)
    index = [[b * drafts + rng.randrange(drafts) for _ in range(width)] for b in range(bs)]
    for row in index:
        kept = rng.randint(1, width)
        row[kept:] = [-1] * (width - kept)
    out = torch.full((bs * width,), -7)
    ops.fill_accept_out_cache_loc_cpu(torch.tensor(index, dtype=dtype), torch.tensor(locs), out)
    expected = [locs[i] for row in index for i in row if i != -1]
    assert out.tolist() == expected + [-7] * (bs * width - len(expected))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.booleans(), INTS, st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_rotate_input_ids(lens: list[int], select: bool, dtype: torch.dtype, seed: int) -> None:
    rng = random.Random(seed)
    starts, total = [], 0
    for n in lens:
        starts.append(total)
        total += n + rng.randint(0, 2)  # gaps, as in padded batches
    ids = [rng.randrange(1000) for _ in range(total)]
    fresh = [rng.randrange(1000, 2000) for _ in lens]
    places = [s + (rng.randrange(n) if n else 0) for s, n in zip(starts, lens, strict=True)]

    expected = list(ids)
    for i, (start, n) in enumerate(zip(starts, lens, strict=True)):
        if n:
            for k in range(start, start + n - 1):
                expected[k] = ids[k + 1]
            expected[places[i] if select else start + n - 1] = fresh[i]

    got = torch.tensor(ids, dtype=dtype)
    ops.rotate_input_ids_cpu(
        got,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lens, dtype=torch.int32),
        torch.tensor(fresh).reshape(-1, 1) if seed % 2 else torch.tensor(fresh),
        torch.tensor(places) if select else None,
    )
    assert got.tolist() == expected


@given(
    st.integers(0, 12),
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 9), st.sampled_from([torch.float32, torch.bfloat16, torch.uint8])),
        min_size=1,
        max_size=4,
    ),
    INTS,
    st.integers(0, 2**32),
)
@settings(max_examples=100, deadline=None)
def test_copy_all_layer_kv_cache(
    n: int, layouts: list[tuple[int, int, torch.dtype]], dtype: torch.dtype, seed: int
) -> None:
    """Buffers of different widths and types; targets overlap the sources."""
    rng = random.Random(seed)
    gen = torch.Generator().manual_seed(seed)
    buffers = [(torch.rand(16, heads, dim, generator=gen) * 200).to(kind) for heads, dim, kind in layouts]
    src, tgt = [rng.randrange(16) for _ in range(n)], rng.sample(range(16), n)
    expected = []
    for buffer in buffers:
        rows = list(buffer.clone())
        for s, t in zip(src, tgt, strict=True):
            rows[t] = buffer[s].clone()
        expected.append(torch.stack(rows))
    ops.copy_all_layer_kv_cache_cpu(
        torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64),
        torch.tensor([b.stride(0) * b.itemsize for b in buffers]),
        torch.tensor(tgt, dtype=dtype),
        torch.tensor(src, dtype=dtype),
    )
    for got, want in zip(buffers, expected, strict=True):
        assert torch.equal(got, want)


def test_copy_refuses_what_would_write_elsewhere() -> None:
    buffer = torch.zeros(4, 2)
    args = torch.tensor([buffer.data_ptr()], dtype=torch.uint64), torch.tensor([8])
    with pytest.raises(ValueError, match="negative row"):
        ops.copy_all_layer_kv_cache_cpu(*args, torch.tensor([-1]), torch.tensor([0]))
    with pytest.raises(ValueError, match="2 source rows for 1 target"):
        ops.copy_all_layer_kv_cache_cpu(*args, torch.tensor([1]), torch.tensor([0, 2]))
