"""EAGLE-3 on the ``torch_native`` attention backend: draft decode, draft extend and verify.

Upstream 0.5.23 offers speculation on a CPU only through ``intel_amx``, which needs AMX; its ``torch_native``
backend has no multi-step draft backend (``speculative/draft_utils.py``) and knows nothing of the verify tree mask
(``layers/attention/torch_native_backend.py``). This module adds both, for MHA/GQA and for MLA (absorbed: one latent
KV head, the value being the first ``v_head_dim`` columns of the key).

Every speculative forward gets one :class:`SpecPlan`, made once in ``init_forward_metadata`` and used by all layers:
which KV slots each query row reads, and which of them it may see. Keys are gathered in the order *new tokens first,
committed prefix after*, so that the mask of the new tokens is a dense ``n x n`` block whatever the prefix lengths of
the batch are, and only the ragged prefix needs padding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from sglang_patches import lane

if TYPE_CHECKING:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

STAMP = "torch_native"


@dataclass
class SpecPlan:
    """What the query rows of one speculative forward read.

    Attributes:
        slots: int64 ``[rows, n + P]``, KV-pool slots: the ``n`` new tokens of a row's request, then its committed
            prefix, padded to the longest prefix ``P`` of the batch (padding repeats a valid slot and is masked).
        visible: bool ``[rows, n, n + P]``, or None where every row sees every slot.
        n: query tokens per row.
    """

    slots: torch.Tensor
    visible: torch.Tensor | None
    n: int
    _bias: dict[tuple[int, int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def bias(self, kv_heads: int, group: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask ``[rows * kv_heads, group * n, n + P]``, made once per head layout and shared by all layers."""
        if self.visible is None:
            return None
        key = (kv_heads, group, dtype)
        if key not in self._bias:
            rows, n, total = self.visible.shape
            zero = torch.zeros((rows, 1, 1, n, total), dtype=dtype).masked_fill_(
                ~self.visible[:, None, None], float("-inf")
            )
            self._bias[key] = zero.expand(rows, kv_heads, group, n, total).reshape(rows * kv_heads, group * n, total)
        return self._bias[key]


def make_plan(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    new_slots: torch.Tensor,
    new_visible: torch.Tensor | None,
) -> SpecPlan:
    """Build the plan of one forward.

    Args:
        req_to_token: int32 ``[max_requests, context]``, the slot of each token of each request.
        req_pool_indices: int64 ``[rows]``, the row of ``req_to_token`` that each plan row belongs to.
        prefix_lens: int64 ``[rows]``, committed tokens before the new ones.
        new_slots: int64 ``[rows, n]``, slots of the new tokens.
        new_visible: bool ``[rows, n, n]`` (query, key) among the new tokens, or None for all-visible.
    """
    rows, n = new_slots.shape
    longest = int(prefix_lens.max())
    prefix = req_to_token[req_pool_indices, :longest].long()
    columns = torch.arange(longest)
    inside = columns < prefix_lens[:, None]
    ragged = not bool(inside.all())
    if ragged:
        # A slot beyond a request's prefix may hold anything (even another request's live KV): read slot 0, the
        # pool's own padding slot, instead, and hide it.
        prefix = prefix.masked_fill(~inside, 0)
    visible = None
    if new_visible is not None or ragged:
        among_new = torch.ones((rows, n, n), dtype=torch.bool) if new_visible is None else new_visible
        visible = torch.cat((among_new, inside[:, None, :].expand(rows, n, longest)), dim=2)
    return SpecPlan(slots=torch.cat((new_slots.long(), prefix), dim=1), visible=visible, n=n)


def plan_for(backend: TorchNativeAttnBackend, batch: ForwardBatch) -> SpecPlan | None:
    """The plan of a verify or draft-extend batch; None for every other forward, which upstream's own code runs."""
    mode = batch.forward_mode
    if mode.is_target_verify():
        spec = batch.spec_info
        n, prefix_lens = spec.draft_token_num, batch.seq_lens
        mask = lane.here().tree_mask(spec, prefix_lens)
    elif mode.is_draft_extend_v2():
        rows = batch.batch_size
        n = batch.input_ids.numel() // rows
        # Upstream has already added this forward's tokens to seq_lens (prepare_for_draft_extend).
        prefix_lens, mask = batch.seq_lens - n, None
    else:
        if lane.here().is_ragged_draft_extend(mode):
            # Upstream leaves those of the prefill there, which its GPU backends do not read.
            batch.extend_prefix_lens = batch.seq_lens - batch.extend_seq_lens
        return None
    prefix_lens = prefix_lens.long()
    if mask is None:
        mask = torch.ones((n, n), dtype=torch.bool).tril_().expand(prefix_lens.numel(), n, n)
    table = lane.here().request_pool(backend, batch).req_to_token
    new_slots = table[batch.req_pool_indices[:, None], prefix_lens[:, None] + torch.arange(n)]
    return make_plan(table, batch.req_pool_indices, prefix_lens, new_slots, mask if n > 1 else None)


def attend(plan: SpecPlan, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of all rows of a plan at once.

    Args:
        q: ``[rows * n, q_heads, qk_dim]``.
        keys: the layer's whole key buffer ``[slots, kv_heads, qk_dim]``.
        values: the layer's whole value buffer ``[slots, kv_heads, v_dim]``; where it is a view of ``keys`` (MLA's
            latent cache) only one gather is made.
        scale: softmax scale.

    Returns:
        ``[rows * n, q_heads, v_dim]``, dtype of ``q``. The softmax is taken in float32.
    """
    rows, total = plan.slots.shape
    n, kv_heads, q_heads = plan.n, keys.shape[1], q.shape[1]
    group = q_heads // kv_heads
    flat = plan.slots.view(-1)
    k = keys.index_select(0, flat).view(rows, total, kv_heads, -1)
    if values.data_ptr() == keys.data_ptr():
        v = k[..., : values.shape[-1]]
    else:
        v = values.index_select(0, flat).view(rows, total, kv_heads, -1)
    k, v = k.to(q.dtype), v.to(q.dtype)
    # Heads that share a KV head are stacked along the query axis: one matrix product per KV head.
    stacked = q.view(rows, n, kv_heads, group, -1).permute(0, 2, 3, 1, 4).reshape(rows * kv_heads, group * n, -1)
    k = k.permute(0, 2, 3, 1).reshape(rows * kv_heads, -1, total)
    v = v.permute(0, 2, 1, 3).reshape(rows * kv_heads, total, -1)
    bias = plan.bias(kv_heads, group, q.dtype)
    scores = torch.bmm(stacked, k).mul_(scale) if bias is None else torch.baddbmm(bias, stacked, k, alpha=scale)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    out = torch.bmm(weights, v).view(rows, kv_heads, group, n, -1)
    return out.permute(0, 3, 1, 2, 4).reshape(rows * n, q_heads, -1)


def _refuse_unsupported(layer: RadixAttention) -> None:
    """torch_native would ignore these silently, and speculation would then accept from a wrong distribution."""
    window = layer.sliding_window_size
    for name, value, wanted in (
        ("sliding_window_size", window if window is not None and window > -1 else None, "None"),
        ("logit_cap", layer.logit_cap or None, "0"),
        ("is_cross_attention", layer.is_cross_attention or None, "False"),
    ):
        if value is not None:
            raise NotImplementedError(
                f"cpu-eagle3: speculative attention on torch_native has no {name} (layer {layer.layer_id} has {value}, "
                f"supported: {wanted}). Serve this model on CPU without --speculative-algorithm, or on a GPU."
            )


def _run(
    backend: TorchNativeAttnBackend,
    plan: SpecPlan,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    layer: RadixAttention,
    batch: ForwardBatch,
    save_kv_cache: bool,
) -> torch.Tensor:
    _refuse_unsupported(layer)
    pool = lane.here().kv_pool(backend, batch)
    if save_kv_cache and k is not None and v is not None:
        pool.set_kv_buffer(layer, lane.here().kv_location(batch), k, v)
    out = attend(
        plan,
        q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
        pool.get_key_buffer(layer.layer_id),
        pool.get_value_buffer(layer.layer_id),
        layer.scaling,
    )
    return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)


def plans_speculation(init_forward_metadata: Callable[..., None]) -> Callable[..., None]:
    """Decorates ``TorchNativeAttnBackend.init_forward_metadata``: also make the plan of a speculative forward."""

    @functools.wraps(init_forward_metadata)
    def wrapper(self: Any, forward_batch: ForwardBatch) -> None:
        init_forward_metadata(self, forward_batch)
        self.spec_plan = plan_for(self, forward_batch)

    return wrapper


def runs_plan(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Decorates ``forward_extend`` and ``forward_decode``: where there is a plan, run it instead."""

    @functools.wraps(forward)
    def wrapper(
        self: Any,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        plan = getattr(self, "spec_plan", None)
        if plan is None:
            return forward(self, q, k, v, layer, forward_batch, save_kv_cache)
        return _run(self, plan, q, k, v, layer, forward_batch, save_kv_cache)

    return wrapper


class TorchNativeMultiStepDraftBackend:
    """One ``torch_native`` backend per draft decode step, planned together (upstream's container contract:
    ``attn_backends`` and ``init_forward_metadata``, as in ``IntelAMXMultiStepDraftBackend``).

    A request's draft slots lie behind its committed tokens, ``topk`` branches of ``num_steps`` slots each. At step
    ``i`` branch ``b`` reads the prefix and its own slots ``0..i``.
    """

    def __init__(self, runner: ModelRunner, topk: int, num_steps: int) -> None:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        if runner.page_size > 1 and topk > 1:
            raise ValueError(
                f"cpu-eagle3: tree drafts (speculative_eagle_topk={topk}) on torch_native need page_size 1, "
                f"got {runner.page_size}. Start with --page-size 1 or --speculative-eagle-topk 1."
            )
        self.topk = topk
        self.num_steps = num_steps
        self.attn_backends: list[Any] = [TorchNativeAttnBackend(runner) for _ in range(num_steps - 1)]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan every step of one draft phase; ``forward_batch.seq_lens`` counts committed tokens only."""
        topk, num_steps = self.topk, self.num_steps
        table = lane.here().request_pool(self.attn_backends[0], forward_batch).req_to_token
        prefix_lens = forward_batch.seq_lens.long()
        offsets = torch.arange(topk * num_steps)
        new_slots = table[forward_batch.req_pool_indices[:, None], prefix_lens[:, None] + offsets].long()
        rows = new_slots.view(-1, num_steps)
        requests = forward_batch.req_pool_indices.repeat_interleave(topk)
        whole = make_plan(table, requests, prefix_lens.repeat_interleave(topk), rows, None)
        for step, backend in enumerate(self.attn_backends):
            # One query per branch and step; its "new" keys are the branch's own slots 0..step.
            slots = torch.cat((whole.slots[:, : step + 1], whole.slots[:, num_steps:]), dim=1)
            visible = None
            if whole.visible is not None:
                row = whole.visible[:, :1]
                visible = torch.cat((row[:, :, : step + 1], row[:, :, num_steps:]), dim=2)
            backend.spec_plan = SpecPlan(slots=slots.contiguous(), visible=visible, n=1)


def verifies_on_cpu(verify: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates ``verify_tree_greedy_func`` of upstream releases (0.5.9) that know of GPUs only."""

    @functools.wraps(verify)
    def wrapper(*, predicts: torch.Tensor, topk: int = -1, **tensors: torch.Tensor) -> Any:
        if not predicts.is_cpu:
            return verify(predicts=predicts, topk=topk, **tensors)
        from sgl_kernel import verify_tree_greedy_cpu  # type: ignore[attr-defined]

        verify_tree_greedy_cpu(predicts=predicts, **tensors)
        return predicts, tensors["accept_index"], tensors["accept_token_num"]

    return wrapper


def waits_for_no_gpu(method: Callable[..., None]) -> Callable[..., None]:
    """Decorates a method of a draft model that upstream (0.5.9) ends with ``torch.cuda.synchronize()``."""

    @functools.wraps(method)
    def wrapper(self: torch.nn.Module, *args: Any) -> None:
        if any(not parameter.is_cpu for parameter in self.parameters()):
            method(self, *args)
            return
        wait = torch.cuda.synchronize
        torch.cuda.synchronize = lambda *_: None
        try:
            method(self, *args)
        finally:
            torch.cuda.synchronize = wait

    return wrapper


def create_decode_backend(factory: DraftBackendFactory) -> Any:
    """Entry of ``DraftBackendFactory.create_decode_backend``'s map: a container, stamped as the lane has it."""
    made = TorchNativeMultiStepDraftBackend(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)
    return lane.here().draft_backend(STAMP, made)


def create_draft_extend_backend(factory: DraftBackendFactory) -> Any:
    """Entry of ``DraftBackendFactory.create_draft_extend_backend``'s map: a backend, stamped as the lane has it."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return lane.here().draft_backend(STAMP, TorchNativeAttnBackend(factory.draft_model_runner))
