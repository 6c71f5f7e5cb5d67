"""The Triton kernels of patch ``flashinfer-mla-gather-cast``; `pages` has what each means, in PyTorch.

Fixed grids: every count is read from device memory, so that a launch neither waits for the host nor changes between the
capture of a CUDA graph and its replay. They also run on a CPU with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import triton
import triton.language as tl

# One binary a kernel: batch and pool change these, and a compilation while serving would take longer than many steps.
_sizes = ("room", "rows", "limit", "n_pages")
_unaligned = ("slots", "used")


@triton.jit(do_not_specialize=_sizes, do_not_specialize_on_alignment=_unaligned)
def mark_kernel(slots, used, room, rows, marks, PAGE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """``marks[page] = 1`` for the page of each of the first ``used[0]`` slots. Writers of one page write the same.

    ``room`` and ``rows`` bound what is touched should upstream hand over a wrong length or slot: upstream would read
    outside its buffers, this would write there.
    """
    n = tl.minimum(tl.load(used), room)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < n
        slot = tl.load(slots + at, mask=inside, other=0)
        tl.store(marks + slot // PAGE, 1, mask=inside & (slot >= 0) & (slot < rows))


@triton.jit(do_not_specialize=_sizes, do_not_specialize_on_alignment=_unaligned)
def list_kernel(marks, ranks, limit, n_pages, pages, count, totals, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The marked pages in ascending order, or all of them where more than ``limit`` are marked; counted in ``totals``.

    ``ranks`` is the inclusive running sum of ``marks``: page p, if marked, comes at ``ranks[p] - 1``.
    """
    marked = tl.load(ranks + n_pages - 1)
    whole = marked > limit
    if tl.program_id(0) == 0:
        tl.store(count, tl.where(whole, n_pages, marked))
        tl.atomic_add(totals, 1)
        tl.atomic_add(totals + 1, whole.to(tl.int32).to(tl.int64))
        tl.atomic_add(totals + 2, marked.to(tl.int64))
    for start in range(tl.program_id(0) * BLOCK, n_pages, tl.num_programs(0) * BLOCK):
        page = start + tl.arange(0, BLOCK)
        inside = page < n_pages
        mark = tl.load(marks + page, mask=inside, other=0)
        rank = tl.load(ranks + page, mask=inside, other=1)
        tl.store(pages + tl.where(whole, page, rank - 1), page, mask=inside & (whole | (mark > 0)))


@triton.jit(do_not_specialize=_sizes, do_not_specialize_on_alignment=_unaligned)
def remap_kernel(slots, used, room, rows, ranks, limit, n_pages, PAGE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each of the first ``used[0]`` slots becomes its row in the gathered buffer, in place."""
    n = tl.minimum(tl.load(used), room)
    whole = tl.load(ranks + n_pages - 1) > limit
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < n
        slot = tl.load(slots + at, mask=inside, other=0)
        inside = inside & (slot >= 0) & (slot < rows)
        rank = tl.load(ranks + slot // PAGE, mask=inside, other=1)
        tl.store(slots + at, tl.where(whole, slot, (rank - 1) * PAGE + slot % PAGE), mask=inside)


@triton.jit
def cast_kernel(  # type: ignore[no-untyped-def]
    source,
    pages,
    count,
    out,
    nan,
    negative_nan,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    BFLOAT: tl.constexpr,
):
    """The bytes (float8_e4m3fn) of ``count[0]`` pages, cast to bfloat16 or float16 bits, one page after the other.

    A page is ``PIECES`` pieces of ``WIDTH`` contiguous elements; a program takes ``PER_BLOCK`` pieces at a time. The
    conversion is integer arithmetic, so that it is the same on every GPU (hardware float8 begins with SM89); what a NaN
    becomes differs between implementations and is therefore an argument.
    """
    total = tl.load(count) * PIECES
    column = tl.arange(0, WIDTH)
    for start in range(tl.program_id(0) * PER_BLOCK, total, tl.num_programs(0) * PER_BLOCK):
        piece = start + tl.arange(0, PER_BLOCK)
        inside = piece < total
        page = tl.load(pages + piece // PIECES, mask=inside, other=0)
        base = tl.multiple_of((page.to(tl.int64) * PIECES + piece % PIECES) * WIDTH, WIDTH)
        mask = inside[:, None] & (column < WIDTH)[None, :]
        byte = tl.load(source + base[:, None] + column[None, :], mask=mask, other=0).to(tl.int32)
        sign, magnitude = byte >> 7, byte & 0x7F
        exponent, mantissa = magnitude >> 3, magnitude & 7
        normal = ((exponent + 120) << 23) | (mantissa << 20)
        # Subnormal float8 values are multiples of 2**-9 and normal in float32.
        subnormal = (mantissa.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
        bits = tl.where(exponent == 0, subnormal, normal) | (sign << 31)
        value = bits.to(tl.float32, bitcast=True)
        # Exact in both: 4 significant bits, magnitudes from 2**-9 to 448.
        if BFLOAT:
            cast = value.to(tl.bfloat16).to(tl.int16, bitcast=True)
        else:
            cast = value.to(tl.float16).to(tl.int16, bitcast=True)
        cast = tl.where(magnitude == 0x7F, tl.where(sign == 1, negative_nan, nan).to(tl.int16), cast)
        to = tl.multiple_of(piece.to(tl.int64) * WIDTH, WIDTH)
        tl.store(out + to[:, None] + column[None, :], cast, mask=mask)
