"""Which pages of the KV pool a batch reads, where they lie in the gathered buffer, and the gather that casts them.

Deduplicated, without a sort: pages are marked in an array as long as the pool, a running sum of the marks is at once
the order of the marked pages and each page's place in it. A plan costs, once a step for all layers, two passes over the
batch's slots and a few over one int32 a page of the pool; no host synchronisation, the same shapes whatever the batch.
It bounds what is gathered by the pool, however often radix sharing repeats a page, which a gather in the order of
``kv_indices`` does not: 48 requests on one 8,000-token prefix read 384,000 tokens of 8,000 slots.

On a CPU the same in PyTorch, which is also what the kernels are tested against.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = 1024
# Elements a program casts at a time.
TILE = 4096


@dataclass(frozen=True)
class Shape:
    """How one layer's KV buffer is cut.

    Attributes:
        rows: token slots, the pool's padding page included.
        dim: elements a row (576 for Kimi-K2.5: 512 latent, 64 RoPE).
        page: rows a page.
    """

    rows: int
    dim: int
    page: int

    @property
    def pages(self) -> int:
        return self.rows // self.page


@dataclass(frozen=True)
class Pages:
    """The plan of one forward: what every layer gathers.

    Attributes:
        order: int32 ``[shape.pages]``; the first ``count`` are the pages to gather, in the order they are laid down.
        count: int32 ``[1]``.
    """

    order: torch.Tensor
    count: torch.Tensor

    @classmethod
    def empty(cls, shape: Shape, device: torch.device | str) -> Pages:
        """Buffers for one plan; 4 bytes a page of the pool."""
        return cls(
            torch.empty(shape.pages, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )


def plan(slots: torch.Tensor, used: torch.Tensor, shape: Shape, limit: int, into: Pages, totals: torch.Tensor) -> None:
    """List the pages of the first ``used`` slots in ``into``; in place, make these slots rows of what `cast` lays down.

    Args:
        slots: int32 ``[>= used]``, token slots of the pool, as a paged wrapper plans over them; the tail may be stale.
        used: int32 ``[1]`` on the same device (the last entry of ``kv_indptr``).
        limit: pages; where the batch reads more, all pages are listed in their own order and the slots stay.
        totals: int64 ``[3]``: plans, plans over ``limit``, pages marked; added to.
    """
    marks = torch.zeros(shape.pages, dtype=torch.int32, device=slots.device)
    if _reference(slots):
        _plan_reference(slots[: int(used)], marks, shape, limit, into, totals)
        return
    from sglang_patches.runtime.flashinfer_mla_gather_cast import kernels

    grid = (_programs(slots.device, max(slots.numel(), 1), BLOCK),)
    over_pages = (_programs(slots.device, shape.pages, BLOCK),)
    kernels.mark_kernel[grid](slots, used, slots.numel(), shape.rows, marks, PAGE=shape.page, BLOCK=BLOCK)
    ranks = torch.cumsum(marks, 0, dtype=torch.int32)
    kernels.list_kernel[over_pages](marks, ranks, limit, shape.pages, into.order, into.count, totals, BLOCK=BLOCK)
    kernels.remap_kernel[grid](
        slots, used, slots.numel(), shape.rows, ranks, limit, shape.pages, PAGE=shape.page, BLOCK=BLOCK
    )


def _plan_reference(
    slots: torch.Tensor, marks: torch.Tensor, shape: Shape, limit: int, into: Pages, totals: torch.Tensor
) -> None:
    marks[slots.long() // shape.page] = 1
    ranks = torch.cumsum(marks, 0, dtype=torch.int32)
    marked = int(ranks[-1])
    whole = marked > limit
    totals += torch.tensor([1, int(whole), marked])
    if whole:
        into.order.copy_(torch.arange(shape.pages))
        into.count.fill_(shape.pages)
        return
    into.order[:marked] = marks.nonzero().flatten().int()
    into.count.fill_(marked)
    slots.copy_((ranks[slots.long() // shape.page] - 1) * shape.page + slots % shape.page)


def cast(source: torch.Tensor, pages: Pages, shape: Shape, out: torch.Tensor) -> None:
    """Lay down the planned pages in ``out``, as ``source.to(out.dtype)`` has them, bit for bit.

    Args:
        source: float8_e4m3fn ``[rows, 1, dim]``, contiguous: one layer's KV buffer.
        out: ``[rows, 1, dim]``; the first ``count * page`` rows are written. On a GPU bfloat16 or float16.
    """
    if _reference(source):
        n = int(pages.count)
        wanted = source.view(torch.uint8).view(shape.pages, -1)[pages.order[:n].long()].view(source.dtype)
        out.view(shape.pages, -1)[:n] = wanted.to(out.dtype)
        return
    from sglang_patches.runtime.flashinfer_mla_gather_cast import kernels

    nan, negative_nan = nan_bits(out.dtype)
    # The largest power of two that divides a row, so that a piece stays within one page and is loaded in wide words.
    width = min(shape.dim & -shape.dim, 128)
    pieces = shape.page * shape.dim // width
    per_block = TILE // width
    kernels.cast_kernel[(_programs(source.device, shape.pages * pieces, per_block),)](
        source.view(torch.uint8),
        pages.order,
        pages.count,
        out.view(torch.int16),
        nan,
        negative_nan,
        PIECES=pieces,
        WIDTH=width,
        PER_BLOCK=per_block,
        BFLOAT=out.dtype == torch.bfloat16,
        num_warps=8,
    )


_nans: dict[torch.dtype, tuple[int, int]] = {}
_processors: dict[torch.device, int] = {}
# Tests switch this to have the kernels run by Triton's interpreter.
reference_on_cpu = True


def _reference(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and reference_on_cpu


def nan_bits(dtype: torch.dtype, device: str = "cpu") -> tuple[int, int]:
    """The 16 bits, signed, that ``.to(dtype)`` makes of float8_e4m3fn's two NaNs on ``device`` when first asked."""
    if dtype not in _nans:
        both = torch.tensor([0x7F, 0xFF], dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        first, second = both.to(dtype).view(torch.int16).tolist()
        _nans[dtype] = (first, second)
    return _nans[dtype]


def _programs(device: torch.device, work: int, per_program: int) -> int:
    """A grid that fills the device and does not depend on the batch: programs stride over what there is."""
    if device not in _processors:
        _processors[device] = (
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        )
    return max(1, min(-(-work // per_program), 8 * _processors[device]))


def every_byte_agrees(device: torch.device | str, dtype: torch.dtype, cast: Callable[..., None] = cast) -> bool:
    """Whether `cast` gives what upstream's ``.to(dtype)`` gives on this device, for each of a byte's 256 values."""
    nan_bits(dtype, str(device))
    shape = Shape(rows=8, dim=64, page=2)
    source = torch.arange(512, device=device).to(torch.uint8).view(torch.float8_e4m3fn).view(8, 1, 64)
    order = Pages(
        torch.tensor([3, 1, 0, 2], dtype=torch.int32, device=device),
        torch.tensor([4], dtype=torch.int32, device=device),
    )
    out = torch.empty(source.shape, dtype=dtype, device=device)
    cast(source, order, shape, out)
    wanted = source.view(torch.uint8).view(4, -1)[order.order.long()].view(source.dtype).to(dtype).view(8, 1, 64)
    return torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))
