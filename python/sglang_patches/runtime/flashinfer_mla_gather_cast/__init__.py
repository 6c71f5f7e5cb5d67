"""Patch ``flashinfer-mla-gather-cast``: with an FP8 KV cache, cast the pages that a batch reads, not the whole pool.

Upstream's ``FlashInferMLAAttnBackend`` casts a layer's whole KV buffer to the query's type before each attention call
(0.5.23 ``layers/attention/flashinfer_mla_backend.py``, ``forward_extend`` and ``forward_decode``). Here each forward is
planned where upstream plans its wrapper (`plan`): the pages it reads are listed, and ``kv_indices`` is rewritten in
place to their rows in one static buffer. `attend`, called where upstream would cast, fills that buffer from the layer's
KV and calls the same wrapper. Attention reads the same values in the same order, so outputs are equal bit for bit.

For CUDA graphs: `plan` runs where upstream plans, outside the graph; all that a captured `attend` touches has an
address that stays. Which path a step takes is decided on the device, so that one graph serves both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_patches.runtime import _outcome
from sglang_patches.runtime.flashinfer_mla_gather_cast import crossover, pages
from sglang_patches.runtime.flashinfer_mla_gather_cast.pages import Pages, Shape

PATCH = "flashinfer-mla-gather-cast"
__all__ = ["attend", "plan", "prepare"]


@dataclass
class Shared:
    """What all backends over pools of one kind share. One forward runs at a time, so one buffer serves all layers,
    graphs and models (target and draft).

    Attributes:
        out: ``[rows, 1, dim]`` of the query's type, the static buffer.
        limit: pages; a step that reads more casts all.
        totals: int64 ``[3]`` on the device, see `pages.plan`.
        used: a forward was planned. A backend may be made and never asked: beside another for prefill or decode.
    """

    key: tuple[str, torch.dtype, Shape]
    shape: Shape
    out: torch.Tensor
    limit: int
    totals: torch.Tensor
    measured: crossover.Crossover
    used: bool = False


@dataclass
class Prepared:
    """One backend's part.

    Attributes:
        graph: the plan that all graphs of the backend read, as they all read its ``cuda_graph_kv_indices``. Eager
            forwards have one each: with an overlapped plan stream the next step is planned while one still runs.
    """

    shared: Shared
    graph: Pages | None = field(default=None)


_shared: dict[tuple[str, torch.dtype, Shape], Shared] = {}


def prepare(backend: Any, model_runner: Any) -> None:
    """In a backend's ``__init__``, once it knows its pool: decide, allocate, measure; told as outcome, ``applied`` with
    the first `plan`.

    Raises:
        ValueError: ``SGLANG_PATCHES_GATHER_CAST_LIMIT`` is no share. Any other failure leaves upstream's path.
    """
    backend.gather_cast = None
    pool, asked = backend.token_to_kv_pool, crossover.asked_share()
    try:
        result, why = _refusal(backend, model_runner)
        if result is None:
            shared = _share(pool, model_runner.dtype, asked)
            if (saved := shared.measured.saves_ms(pool.layer_num)) is None or saved > 0:
                backend.gather_cast = Prepared(shared)
                _shared[shared.key] = shared
                _tell(shared)
                return
            result, why = "not needed", f"at {pool.layer_num} layers a small batch would lose {-saved:.3f} ms a step"
    except torch.OutOfMemoryError as error:
        result, why = "failed", f"no memory for the static buffer; lower --mem-fraction-static ({error})"
        torch.cuda.empty_cache()
    except Exception as error:  # a kernel that does not compile on some GPU, say: serving goes before speed
        result, why = "failed", f"{type(error).__name__}: {error}"
    if not _shared:  # a draft that is left out does not hide that the target is not
        _outcome.record(PATCH, result, why)


def _refusal(backend: Any, model_runner: Any) -> tuple[Any, str]:
    """(None, "") where the patch applies, else the outcome: what was found and what it takes."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.runtime_context import get_parallel

    pool, dtype = backend.token_to_kv_pool, model_runner.dtype
    if type(backend).__name__ != "FlashInferMLAAttnBackend":
        return "not needed", f"attention backend {type(backend).__name__} does not cast the pool"
    if pool.dtype == dtype:
        return "not needed", f"the KV cache is {dtype} as the queries are: nothing is cast"
    if type(pool) is not MLATokenToKVPool:
        return "failed", f"KV pool is {type(pool).__name__}, only MLATokenToKVPool is known"
    if pool.dtype != torch.float8_e4m3fn:
        return "failed", f"the KV cache is {pool.dtype}, only torch.float8_e4m3fn is known"
    if get_parallel().dcp_enabled:
        return "failed", "decode context parallelism makes its own KV indices"
    if model_runner.server_args.enable_pdmux:
        return "failed", "--enable-pdmux runs two forwards at once, the static buffer serves one"
    if pool.layer_shard_enabled:
        return "failed", "the KV pool is sharded by layer"
    if torch.device(pool.device).type != "cpu":
        if dtype not in (torch.bfloat16, torch.float16):
            return "failed", f"queries are {dtype}, only bfloat16 and float16 are known"
        if not pages.every_byte_agrees(pool.kv_buffer[0].device, dtype):
            return "failed", f"this GPU's own cast to {dtype} differs from ours for some byte"
    return None, ""


def _share(pool: Any, dtype: torch.dtype, asked: float | None) -> Shared:
    buffer = pool.kv_buffer[0]
    rows, _, dim = buffer.shape
    shape = Shape(rows, dim, pool.page_size if rows % pool.page_size == 0 else 1)
    key = (str(buffer.device), dtype, shape)
    if key in _shared:
        return _shared[key]
    # Zeros: rows that were never gathered are finite, should a kernel multiply one that it masks.
    out = torch.zeros((rows, 1, dim), dtype=dtype, device=buffer.device)
    if asked is not None:
        measured = crossover.Crossover("set", asked)
    elif buffer.device.type == "cuda":
        measured = crossover.measure(buffer.view(pool.dtype), out, shape)
    else:
        measured = crossover.Crossover("default", 1.0)
    totals = torch.zeros(3, dtype=torch.int64, device=buffer.device)
    return Shared(key, shape, out, math.floor(measured.share * shape.pages), totals, measured)


def _tell(shared: Shared) -> None:
    shape = shared.shape
    used = any(other.used for other in _shared.values())
    how = f"up to {shared.limit} of {shape.pages} pages are gathered, beyond that the whole pool is cast"
    _outcome.record(
        PATCH,
        "applied" if used else "not needed",
        how if used else f"no forward has reached this attention backend yet; then {how}",
        pool_rows=shape.rows,
        page_rows=shape.page,
        buffer_mib=round(shared.out.nbytes / 2**20, 1),
        plan_mib=round(4 * shape.pages / 2**20, 1),
        crossover=shared.measured.figures(),
    )
    _outcome.live_figures(PATCH, _figures)


def _figures() -> dict[str, Any]:
    """Counters of this process; reading them waits for the device."""
    told = [shared.totals.tolist() for shared in _shared.values()] or [[0, 0, 0]]
    plans, whole, marked = (sum(column) for column in zip(*told, strict=True))
    return {"plans": plans, "whole_pool_plans": whole, "pages_read": marked}


def plan(backend: Any, wrapper: Any, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, again: bool = False) -> None:
    """Before upstream plans `wrapper`: list what it reads, and rewrite ``kv_indices`` in place.

    Args:
        kv_indptr: int32 ``[requests + 1]`` on the device; its last entry is how many indices are used.
        kv_indices: int32, the pool's token slots; on a graph's replay the buffer that the graph reads.
        again: upstream will plan this wrapper once more for the same step, from indices it has yet to write (the first
            of the two plans of a decode capture): leave these alone.
    """
    prepared: Prepared | None = backend.gather_cast
    wrapper.gather_cast_pages = None
    if prepared is None or again:
        return
    shared = prepared.shared
    if not shared.used:
        shared.used = True
        _tell(shared)
    if not wrapper._use_cuda_graph:
        into = Pages.empty(shared.shape, shared.out.device)
    else:
        if prepared.graph is None:
            prepared.graph = Pages.empty(shared.shape, shared.out.device)
        into = prepared.graph
        if kv_indices.data_ptr() == wrapper._kv_indices_buf.data_ptr():
            # The graph reads its whole buffer, however short the view of it is that the host's lengths gave.
            kv_indices = wrapper._kv_indices_buf
    pages.plan(kv_indices, kv_indptr[-1:], shared.shape, shared.limit, into, shared.totals)
    wrapper.gather_cast_pages = into


def attend(backend: Any, wrapper: Any, layer: Any, q: torch.Tensor, q_rope: torch.Tensor | None) -> torch.Tensor | None:
    """Where upstream would cast the layer's whole buffer: gather and cast, then attend; None where nothing is planned.

    Args:
        q: ``[tokens, heads, v_head_dim]`` with ``q_rope`` ``[tokens, heads, head_dim - v_head_dim]``, or, where that is
            None, both as one tensor of ``head_dim`` a head.

    Returns:
        ``[tokens, heads * v_head_dim]``, as upstream's methods do.
    """
    planned: Pages | None = getattr(wrapper, "gather_cast_pages", None)
    if planned is None:
        return None
    shared = backend.gather_cast.shared
    # Through upstream's door, which waits for a layer that HiCache is still loading.
    source = backend.token_to_kv_pool.get_key_buffer(layer.layer_id)
    if source.shape[0] != shared.shape.rows:
        raise RuntimeError(
            f"{PATCH}: layer {layer.layer_id} has {source.shape[0]} rows of KV, planned were {shared.shape.rows}. "
            f"Start with SGLANG_PATCHES=-{PATCH}, and tell us."
        )
    if q_rope is None:
        both = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        q, q_rope = both[:, :, : layer.v_head_dim], both[:, :, layer.v_head_dim :]
    pages.cast(source, planned, shared.shape, shared.out)
    latent, rope = shared.out[:, :, : layer.v_head_dim], shared.out[:, :, layer.v_head_dim :]
    attended: torch.Tensor = wrapper.run(q, q_rope, latent, rope, out=q.new_empty(q.shape))
    return attended.view(-1, layer.tp_q_head_num * layer.v_head_dim)
