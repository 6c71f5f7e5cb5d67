"""Cuts a target-verify batch into slices that captured graphs can take, and joins what they give.

In a verify no request reads what another one writes, so slices of a batch give what the batch gives, row for row. Each
slice is a batch of its own for upstream's graph runner: views of the tensors, its part of the tree mask, its own plan
of the KV slots. The batch itself is never written to, and a verify writes KV only at its own ``out_cache_loc``: where
slicing fails half way, upstream's eager pass over the whole batch writes the same slots again and nothing is lost.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch

# Of upstream's `ForwardBatch` (0.5.23): a row, or an entry of a list, per token and per request.
_PER_TOKEN = ("input_ids", "positions", "mm_token_modalities")
_PER_REQUEST = (
    *("req_pool_indices", "req_pool_indices_cpu", "seq_lens", "seq_lens_cpu", "orig_seq_lens", "lora_ids", "rids"),
    *("rids_int", "bootstrap_room_ids_int"),
)
# The same for every slice.
_SHARED = (
    *("forward_mode", "global_forward_mode", "spec_algorithm", "capture_hidden_mode", "contains_last_prefill_chunk"),
    *("return_logprob", "return_hidden_states_before_norm", "max_seq_len_host", "max_seq_len_override"),
    *("can_run_decode_cuda_graph", "can_run_dp_draft_cuda_graph", "can_run_dp_prefill_cuda_graph"),
    *("dp_prefill_cuda_graph_max_prefix_len", "is_prefill_only", "is_extend_in_batch"),
)
# Read after the forward only, from the schedule batch (sampling, grammar, log probabilities), or in a prefill.
_LEFT_OUT = (
    *("sampling_info", "mm_inputs", "top_logprobs_nums", "token_ids_logprobs", "next_token_logits_buffer"),
    *("extend_input_logprob_token_ids_gpu", "watermark_prompt_tail_ids", "watermark_context_hash_history"),
)
# Set for each slice by `_slice`, `_spec_slice` or the plan of its KV slots.
_MADE = (
    *("batch_size", "seq_lens_sum", "spec_info", "out_cache_loc", "out_cache_loc_virtual", "out_cache_loc_is_physical"),
    *("kv_loc_plan", "kv_loc_cols", "global_num_token_non_padded", "global_num_token_non_padded_cpu"),
)
_KNOWN = frozenset((*_PER_TOKEN, *_PER_REQUEST, *_SHARED, *_LEFT_OUT, *_MADE))


class CannotSlice(RuntimeError):
    """A batch carries something that this module does not know how to cut, or a graph gave something it cannot join."""


def cut(batch: Any, model_runner: Any, largest: int) -> Iterator[Any]:
    """The slices of a target-verify ``ForwardBatch``, of `largest` requests each, the last one of what is left.

    Args:
        batch: an ``EagleVerifyInput`` is its ``spec_info``. Left as it is.
        model_runner: the target's; gives the layout of the tree mask and the plan of the KV slots.

    Raises:
        CannotSlice: it carries something `unknown`.
    """
    if found := unknown(batch):
        raise CannotSlice(f"a verify batch has {found}, which is not known to be sliceable")
    width = int(batch.spec_info.draft_token_num)
    edges = [*range(0, batch.batch_size, largest), batch.batch_size]
    masks = _mask_edges(batch, model_runner, width, edges)
    for index, (first, last) in enumerate(pairwise(edges)):
        spec_info = _spec_slice(batch.spec_info, first, last, width, masks[index : index + 2])
        yield _slice(batch, model_runner, spec_info, first, last, width)


def unknown(batch: Any) -> str:
    """What this verify batch carries that this module does not know how to cut; empty for nothing."""
    if type(batch.spec_info).__name__ != "EagleVerifyInput":
        return f"spec_info={type(batch.spec_info).__name__}"
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if field.name in _KNOWN or value is None or value is False or value is field.default:
            continue
        if isinstance(value, int) and value == field.default:
            continue
        return f"{field.name}={type(value).__name__}"
    return ""


def _slice(batch: Any, model_runner: Any, spec_info: Any, first: int, last: int, width: int) -> Any:
    part = copy.copy(batch)
    for name in _PER_TOKEN:
        _set_rows(part, batch, name, first * width, last * width)
    for name in _PER_REQUEST:
        _set_rows(part, batch, name, first, last)
    for name in _LEFT_OUT:
        setattr(part, name, None)
    tokens = (last - first) * width
    part.batch_size = last - first
    part.spec_info = spec_info
    part.seq_lens_sum = None if part.seq_lens_cpu is None else int(part.seq_lens_cpu.sum())
    part.global_num_token_non_padded_cpu = tokens
    if batch.global_num_token_non_padded is not None:
        part.global_num_token_non_padded = torch.full_like(batch.global_num_token_non_padded, tokens)
    # As upstream's `ForwardBatch.init_new` gives a forward that is alone its KV slots: from ids as they were allocated.
    allocated = batch.out_cache_loc if batch.out_cache_loc_virtual is None else batch.out_cache_loc_virtual
    part.out_cache_loc = allocated[first * width : last * width]
    translator = model_runner.kv_index_translator
    translator.own_plan(part).bind(part, translator)
    return part


def _spec_slice(spec_info: Any, first: int, last: int, width: int, mask: list[int]) -> Any:
    part = copy.copy(spec_info)
    for name in ("draft_token", "positions"):
        _set_rows(part, spec_info, name, first * width, last * width)
    for name in ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling", "retrieve_cum_len", "draft_probs"):
        _set_rows(part, spec_info, name, first, last)
    _set_rows(part, spec_info, "seq_lens_cpu", first, last)
    if spec_info.custom_mask is not None:
        part.custom_mask = spec_info.custom_mask[mask[0] : mask[1]]
    if part.seq_lens_cpu is not None:
        part.seq_lens_sum = int(part.seq_lens_cpu.sum())
    part.prepared_out_cache_loc = part.prepared_mrope_positions = part.kv_loc_plan = None
    return part


def _set_rows(part: Any, whole: Any, name: str, first: int, last: int) -> None:
    value = getattr(whole, name)
    # Tests and warm-ups leave tensors empty that only sampling reads.
    if value is not None and len(value):
        setattr(part, name, value[first:last])


def mask_layout(model_runner: Any) -> Any:
    """``TreeMaskMode`` in which the drafts' tree reaches this target's attention backend."""
    from sglang.srt.speculative.eagle_utils import default_tree_mask_mode

    mask = model_runner.attn_backend.verify_mask
    return default_tree_mask_mode() if mask is None else mask.mode


def _mask_edges(batch: Any, model_runner: Any, width: int, edges: list[int]) -> list[int]:
    """Where the tree mask, one row of cells, is cut; the layouts are those of upstream's `build_tree_kernel_efficient`.

    Waits for the GPU where the layout depends on the lengths and the batch has them on the GPU only.
    """
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    layout = mask_layout(model_runner)
    if layout == TreeMaskMode.QLEN_ONLY:
        return [edge * width * width for edge in edges]
    if layout == TreeMaskMode.QLEN_ONLY_BITPACKING:
        return [edge * width for edge in edges]
    lengths = (batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu).tolist()
    return [width * (sum(lengths[:edge]) + edge * width) for edge in edges]


class Joined:
    """Rows of the slices' outputs, copied one behind the other: a graph's next replay overwrites its outputs."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._filled = 0
        self._output: Any = None

    def add(self, output: Any, rows: int) -> None:
        """Copy one slice's ``LogitsProcessorOutput``, whose tensors have `rows` rows.

        Raises:
            CannotSlice: it has anything but tensors of that many rows, or not those that the first one had.
        """
        tensors = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
        tensors = {name: value for name, value in tensors.items() if value is not None}
        for name, value in tensors.items():
            if not isinstance(value, torch.Tensor) or value.ndim == 0 or value.shape[0] != rows:
                shown = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise CannotSlice(f"a slice of {rows} rows gave {name}={shown}")
        if self._output is None:
            whole = {name: value.new_empty((self._rows, *value.shape[1:])) for name, value in tensors.items()}
            self._output = dataclasses.replace(output, **whole)
        for field in dataclasses.fields(output):
            target = getattr(self._output, field.name)
            if (target is None) != (field.name not in tensors):
                raise CannotSlice(f"slices differ in whether they have {field.name}")
            if target is not None:
                target[self._filled : self._filled + rows] = tensors[field.name]
        self._filled += rows

    def output(self) -> Any:
        """The ``LogitsProcessorOutput`` of the whole batch."""
        if self._filled != self._rows:
            raise CannotSlice(f"slices gave {self._filled} of {self._rows} rows")
        return self._output


def replay(batch: Any, model_runner: Any, runner: Any, between: Callable[[], None] | None = None) -> Any:
    """Verify `batch` slice by slice; returns the ``LogitsProcessorOutput`` of the whole.

    Args:
        runner: the target's ``DecodeCudaGraphRunner``.
        between: called before every slice but the first.

    Raises:
        CannotSlice: also where the runner has no graph for a slice.
    """
    width = int(batch.spec_info.draft_token_num)
    joined = Joined(batch.batch_size * width)
    for number, part in enumerate(list(cut(batch, model_runner, runner.max_bs))):
        if not runner.can_run_graph(part):
            raise CannotSlice(f"there is no graph for a slice of {part.batch_size} requests")
        if number and between is not None:
            between()
        joined.add(runner.execute(part), part.batch_size * width)
    return joined.output()
