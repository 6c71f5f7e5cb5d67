"""cpu-eagle3: the plan and the attention of speculative forwards against loops over single tokens."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_patches.runtime import cpu_eagle3

POOL, CONTEXT = 257, 96


def reference(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: list[list[int]], scale: float
) -> torch.Tensor:
    """Softmax attention of each query row over the slots it may see, one row and head at a time, in float64."""
    rows, heads, _ = q.shape
    out = torch.zeros(rows, heads, values.shape[-1], dtype=torch.float64)
    for row in range(rows):
        for head in range(heads):
            kv = head // (heads // keys.shape[1])
            scores = torch.stack([q[row, head].double() @ keys[s, kv].double() * scale for s in seen[row]])
            weights = torch.softmax(scores, 0)
            out[row, head] = sum(w * values[s, kv].double() for w, s in zip(weights, seen[row], strict=True))
    return out


def buffers(kv_heads: int, qk: int, v: int, mla: bool, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    keys = torch.randn(POOL, kv_heads, qk, generator=gen)
    keys[0] = 1e4  # the pool's padding slot: a row that is read by mistake shows
    return keys, keys[..., :v] if mla else torch.randn(POOL, kv_heads, v, generator=gen)


def tables(lengths: list[int], extra: int, seed: int) -> torch.Tensor:
    """A request table whose rows hold distinct random slots up to length + extra, and poison beyond."""
    gen = torch.Generator().manual_seed(seed)
    slots = torch.randperm(POOL - 1, generator=gen) + 1
    table = torch.full((len(lengths) + 1, CONTEXT), POOL - 1, dtype=torch.int32)
    start = 0
    for row, length in enumerate(lengths):
        table[row, : length + extra] = slots[start : start + length + extra].int()
        start += length + extra
    return table


heads = st.sampled_from([(1, 6, 28, 20, True), (2, 4, 16, 16, False), (1, 1, 8, 8, False), (3, 3, 12, 7, False)])
lengths = st.lists(st.integers(1, 40), min_size=1, max_size=4)


def backend(table: torch.Tensor) -> Any:
    return SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table))


@settings(max_examples=40, deadline=None)
@given(heads=heads, lengths=lengths, n=st.integers(1, 8), tree=st.booleans(), seed=st.integers(0, 2**16))
def test_verify_sees_prefix_and_ancestors(
    heads: tuple[int, int, int, int, bool], lengths: list[int], n: int, tree: bool, seed: int
) -> None:
    kv_heads, q_heads, qk, v, mla = heads
    table = tables(lengths, n, seed)
    gen = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(lengths), generator=gen)
    seq_lens = torch.tensor(lengths)[order]
    masks = torch.rand(len(lengths), n, n, generator=gen) < 0.5
    masks |= torch.eye(n, dtype=torch.bool)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        seq_lens=seq_lens,
        req_pool_indices=order,
        spec_info=SimpleNamespace(draft_token_num=n, tree_topk=4 if tree else 1, custom_mask=masks.flatten()),
    )
    plan = cpu_eagle3.plan_for(backend(table), batch)
    assert plan is not None
    keys, values = buffers(kv_heads, qk, v, mla, seed)
    q = torch.randn(len(lengths) * n, q_heads, qk, generator=gen)
    got = cpu_eagle3.attend(plan, q, keys, values, 1 / math.sqrt(qk))
    seen = []
    for b, request in enumerate(order.tolist()):
        length = int(seq_lens[b])
        for i in range(n):
            allowed = [j for j in range(n) if (bool(masks[b, i, j]) if tree else j <= i)]
            seen.append(table[request, :length].tolist() + [int(table[request, length + j]) for j in allowed])
    torch.testing.assert_close(got.double(), reference(q, keys, values, seen, 1 / math.sqrt(qk)), rtol=1e-4, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(heads=heads, lengths=lengths, n=st.integers(1, 6), seed=st.integers(0, 2**16))
def test_draft_extend_is_causal(heads: tuple[int, int, int, int, bool], lengths: list[int], n: int, seed: int) -> None:
    kv_heads, q_heads, qk, v, mla = heads
    table = tables(lengths, n, seed)
    requests = torch.arange(len(lengths))
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DRAFT_EXTEND_V2,
        batch_size=len(lengths),
        input_ids=torch.zeros(len(lengths) * n, dtype=torch.long),
        seq_lens=torch.tensor(lengths) + n,
        req_pool_indices=requests,
    )
    plan = cpu_eagle3.plan_for(backend(table), batch)
    assert plan is not None
    keys, values = buffers(kv_heads, qk, v, mla, seed)
    q = torch.randn(len(lengths) * n, q_heads, qk)
    got = cpu_eagle3.attend(plan, q, keys, values, 0.3)
    seen = [table[b, : lengths[b] + i + 1].tolist() for b in range(len(lengths)) for i in range(n)]
    torch.testing.assert_close(got.double(), reference(q, keys, values, seen, 0.3), rtol=1e-4, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(lengths=lengths, topk=st.integers(1, 4), steps=st.integers(2, 5), seed=st.integers(0, 2**16))
def test_draft_decode_reads_its_own_branch(lengths: list[int], topk: int, steps: int, seed: int) -> None:
    table = tables(lengths, topk * steps, seed)
    container = object.__new__(cpu_eagle3.TorchNativeMultiStepDraftBackend)
    container.topk, container.num_steps = topk, steps
    container.attn_backends = [backend(table) for _ in range(steps - 1)]
    container.init_forward_metadata(
        SimpleNamespace(seq_lens=torch.tensor(lengths), req_pool_indices=torch.arange(len(lengths)))  # type: ignore[arg-type]
    )
    keys, values = buffers(2, 16, 16, False, seed)
    for step, planned in enumerate(container.attn_backends):
        q = torch.randn(len(lengths) * topk, 4, 16)
        got = cpu_eagle3.attend(planned.spec_plan, q, keys, values, 0.25)
        seen = [
            table[b, : lengths[b]].tolist()
            + table[b, lengths[b] + k * steps : lengths[b] + k * steps + step + 1].tolist()
            for b in range(len(lengths))
            for k in range(topk)
        ]
        torch.testing.assert_close(got.double(), reference(q, keys, values, seen, 0.25), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.IDLE])
def test_other_forwards_are_upstreams(mode: ForwardMode) -> None:
    assert cpu_eagle3.plan_for(SimpleNamespace(), SimpleNamespace(forward_mode=mode)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"), [("sliding_window_size", 128), ("logit_cap", 30.0), ("is_cross_attention", True)]
)
def test_refuses_what_torch_native_would_ignore(field: str, value: object) -> None:
    layer = SimpleNamespace(layer_id=3, sliding_window_size=-1, logit_cap=0.0, is_cross_attention=False)
    setattr(layer, field, value)
    with pytest.raises(NotImplementedError, match=rf"{field} \(layer 3 has {value}"):
        cpu_eagle3._refuse_unsupported(layer)  # type: ignore[arg-type]


def test_tree_drafts_need_page_size_one() -> None:
    with pytest.raises(ValueError, match=r"page_size 1, got 16"):
        cpu_eagle3.TorchNativeMultiStepDraftBackend(SimpleNamespace(page_size=16), topk=4, num_steps=3)  # type: ignore[arg-type]
