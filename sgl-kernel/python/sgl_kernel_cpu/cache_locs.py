"""Moves KV slot numbers and tokens between the request table and the flat arrays of a batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch


def _spans(
    name: str, rows: torch.Tensor, start: torch.Tensor, end: torch.Tensor, pool_len: int, capacity: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (table row, first column, end column, offset in the flat array, end in the flat array) per request."""
    offset = 0
    for row, s, e in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        stop = offset + e - s
        if not 0 <= s <= e <= pool_len or stop > capacity:
            raise ValueError(
                f"{name}: request in row {row} spans columns [{s}, {e}) of a table {pool_len} wide and positions "
                f"[{offset}, {stop}) of a flat array of {capacity}; expected 0 <= start <= end within both"
            )
        yield row, s, e, offset, stop
        offset = stop


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write newly allocated KV slots into the request table, in place.

    ``req_to_token[req_pool_indices[i], start_offset[i]:end_offset[i]]`` takes the next ``end - start`` values of
    ``out_cache_loc``; requests follow each other in it without gaps. Other entries stay.

    Args:
        req_pool_indices: [bs] integer; row of each request.
        req_to_token: [requests, pool_len] int32, changed.
        start_offset, end_offset: [bs] integer, in tokens.
        out_cache_loc: [at least sum(end - start)] integer; KV slots.
        pool_len: columns of ``req_to_token``.

    Raises:
        ValueError: a span outside the table or beyond ``out_cache_loc``.
    """
    table, locs = req_to_token.numpy(), out_cache_loc.numpy()
    spans = _spans("assign_req_to_token_pool_cpu", req_pool_indices, start_offset, end_offset, pool_len, len(locs))
    for row, s, e, o, p in spans:
        table[row, s:e] = locs[o:p]


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Read KV slots from the request table: the inverse of `assign_req_to_token_pool_cpu`.

    ``out_cache_loc`` (at least ``sum(end - start)`` long, changed) receives each request's columns ``[start, end)``,
    packed in order; what lies beyond them stays. Other arguments and errors as there.
    """
    table, locs = req_to_token.numpy(), out_cache_loc.numpy()
    spans = _spans("assign_extend_cache_locs_cpu", req_pool_indices, start_offset, end_offset, pool_len, len(locs))
    for row, s, e, o, p in spans:
        locs[o:p] = table[row, s:e]


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the KV slots that the draft writes: ``topk * num_steps`` per request, from column ``seq_lens[i]`` on.

    Args:
        req_pool_indices: [bs] integer; row of each request.
        req_to_token: [requests, pool_len] int32.
        seq_lens: [bs] integer, in tokens.
        out_cache_loc: [bs * topk * num_steps] integer, changed.
        pool_len: columns of ``req_to_token``.

    Raises:
        ValueError: a span outside the table or beyond ``out_cache_loc``.
    """
    table, locs = req_to_token.numpy(), out_cache_loc.numpy()
    end = seq_lens + topk * num_steps
    name = "assign_draft_cache_locs_contiguous_cpu"
    for row, s, e, o, p in _spans(name, req_pool_indices, seq_lens, end, pool_len, len(locs)):
        locs[o:p] = table[row, s:e]


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """Pick each request's last accepted token, the one the target model adds by itself.

    Args:
        accept_tokens: [bs, accept_stride] or flat, integer.
        accept_lens: [bs] integer, 1 to accept_stride; accepted tokens including the bonus token.
        bonus_tokens: [bs] integer, changed: ``accept_tokens[i, accept_lens[i] - 1]``.
        accept_stride: tokens per request in ``accept_tokens``.

    Raises:
        ValueError: an accept length outside 1..accept_stride.
    """
    tokens, lens, bonus = accept_tokens.reshape(-1).tolist(), accept_lens.tolist(), bonus_tokens.numpy()
    if lens and not 1 <= min(lens) <= max(lens) <= accept_stride:
        raise ValueError(f"fill_bonus_tokens_cpu: accept_lens {lens}, expected 1 to {accept_stride}")
    bonus[:] = [tokens[i * accept_stride + n - 1] for i, n in enumerate(lens)]


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Pack the KV slots of the accepted tokens to the front, in order.

    Args:
        accept_index: any shape, integer; flat indices into ``out_cache_loc``, -1 where nothing was accepted.
        out_cache_loc: [bs * draft tokens] integer; KV slots of the verified tokens.
        accept_out_cache_loc: [accept_index.numel()] integer; its first entries are changed, the rest stays.
    """
    index = accept_index.numpy().reshape(-1)
    accepted = index[index >= 0]
    accept_out_cache_loc.numpy()[: accepted.size] = out_cache_loc.numpy()[accepted]


def rotate_input_ids_cpu(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None = None,
) -> None:
    """Shift every request's tokens one place left and append its next token, in place.

    Args:
        input_ids: [tokens] integer, changed; the requests' segments.
        extend_start_loc: [bs] integer; where each segment starts.
        extend_seq_lens: [bs] integer; its length in tokens. An empty one is left alone.
        topk_index: [bs] or [bs, 1] integer; the token to append.
        select_index: [bs] integer; where in ``input_ids`` to put it. Default: the segment's last place. If given,
            that last place keeps its token unless it is the one selected.
    """
    ids = input_ids.numpy()
    starts, lens, tokens = extend_start_loc.tolist(), extend_seq_lens.tolist(), topk_index.reshape(-1).tolist()
    places = [s + n - 1 for s, n in zip(starts, lens, strict=True)] if select_index is None else select_index.tolist()
    for start, length, token, place in zip(starts, lens, tokens, places, strict=True):
        if length > 0:
            last = start + length - 1
            ids[start:last] = ids[start + 1 : last + 1]
            ids[place] = np.asarray(token, dtype=ids.dtype)
