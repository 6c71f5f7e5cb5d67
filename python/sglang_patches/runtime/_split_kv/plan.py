"""How split kernels are launched: block sizes, number of splits, workspace, merge. Host side, no values are read.

Everything here follows from shapes alone, so that a launch can be captured: a captured graph launches the same number
of programs for every length, and those that have no chunk end at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from sglang_patches.runtime._split_kv import kernels

# No more programs share a request: above it their results take longer to merge than a shorter chunk saves.
MAX_SPLITS = 128
# As many even in a large batch, so that one long request among short ones is split. An idle program costs about 10 ns.
MIN_SPLITS = 8
# Fewer cached tokens are not worth a program of their own.
MIN_CHUNK = 64
# Bytes above which fewer splits are launched, and above which the workspace is not made at all.
WORKSPACE_GOAL, WORKSPACE_LIMIT = 128 << 20, 256 << 20
MERGE_BLOCK_D, MERGE_BLOCK_S = 128, 16


@dataclass(frozen=True)
class Tiles:
    """Rows (new tokens times heads) and cached tokens that a program takes at a time.

    Attributes:
        block_m, block_n: powers of 2, 16 or more.
        stages: of triton's software pipeline.
        resident: programs that run at once on a multiprocessor, if its shared memory has room for them (`room`).
        memory: bytes of shared memory of a block.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    resident: int
    memory: int = 0


LEAST_SHARED_MEMORY = 101_376


def shared_memory(device: torch.device | str) -> int:
    """Bytes of shared memory that a block can have; of the smallest GPU where ``device`` is none."""
    if torch.device(device).type != "cuda":
        return LEAST_SHARED_MEMORY
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs know less of it
    return int(properties.shared_memory_per_block_optin)


def room(device: torch.device | str) -> int:
    """Bytes of shared memory of a multiprocessor; of an H200 where ``device`` is no GPU."""
    if torch.device(device).type != "cuda":
        return 233_472
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)


def fitted(tile: Tiles, memory: int) -> Tiles:
    """The same with no more resident programs than ``memory`` bytes hold; CUDA itself takes 1 KiB of each."""
    return replace(tile, resident=max(1, min(tile.resident, memory // (tile.memory + 1024))))


def tiles(rows: int, memory: int, known: Sequence[Tiles]) -> Tiles:
    """Of ``known``, smallest first: one whose blocks hold ``rows`` in ``memory`` bytes, or the largest that fits.

    Further blocks of rows find the cached tokens in the L2 cache.
    """
    needed = next((tile for tile in known if rows <= tile.block_m), known[-1])
    fits = [tile for tile in reversed(known) if tile.block_m <= needed.block_m and tile.memory <= memory]
    return fits[0] if fits else known[0]


def blocks(rows: int, tile: Tiles, kv_heads: int = 1) -> int:
    """Programs that one chunk of a request takes: blocks of rows, those of each KV head apart."""
    return kv_heads * math.ceil(rows // kv_heads / tile.block_m)


def splits(
    batch: int, rows: int, width: int, tile: Tiles, cores: int, override: int | None = None, kv_heads: int = 1
) -> int:
    """Programs launched for each request and block of rows.

    The batch is cut for as many programs as run at once; twice as many are launched, for batches of uneven lengths.

    Args:
        width: numbers of a value, DV.
        cores: multiprocessors of the GPU.
        override: so many, whatever the batch.
    """
    if override is not None:
        return override
    wanted = math.ceil(2 * cores * tile.resident / (batch * blocks(rows, tile, kv_heads)))
    affordable = WORKSPACE_GOAL // (batch * rows * (width + 1) * 4)
    return max(1, min(max(wanted, MIN_SPLITS), MAX_SPLITS, affordable))


@dataclass(frozen=True)
class Launch:
    """What a kernel of `SplitAttention` is launched with, for one batch.

    Attributes:
        grid: (blocks, splits, batch).
        target: programs that the batch is cut for, all requests together.
        partial, lse: where results and log-sum-exps go.
        shared: constants that the kernel and the merge must agree on.
    """

    tile: Tiles
    grid: tuple[int, int, int]
    target: int
    partial: torch.Tensor
    lse: torch.Tensor
    shared: dict[str, Any]


class SplitAttention:
    """Splits and workspace of one attention backend; keeps the workspace that its captured graphs point at.

    A patch's own class adds the call.

    Args:
        max_batch: requests that a batch can have.
        max_tokens: new tokens that a request can have.
        heads: query heads on this rank.
        width: DV, numbers of a value.
        kv_heads: KV heads on this rank, a divisor of ``heads``.
        known: block sizes to choose from, smallest first.
        cores: multiprocessors of the GPU.
        override: splits to launch, whatever the batch; 1 or more.
        tile: in place of those of ``known``, to measure.
        shared: a workspace that is used where it is large enough, of a backend that is never at work at the same time.
        more_tokens: new tokens of backends still to come, for which a new workspace is to have room too.
    """

    def __init__(
        self,
        max_batch: int,
        max_tokens: int,
        heads: int,
        width: int,
        *,
        known: Sequence[Tiles],
        cores: int,
        device: torch.device | str,
        kv_heads: int = 1,
        override: int | None = None,
        tile: Tiles | None = None,
        shared: torch.Tensor | None = None,
        more_tokens: int = 0,
    ) -> None:
        self.cores, self.override, self.tile, self.memory = cores, override, tile, shared_memory(device)
        self.known, self.kv_heads = tuple(known), kv_heads
        self.room = room(device)

        def wanted(tokens: int) -> int:
            needs = [self.numbers(batch, tokens * heads, width) for batch in range(1, max_batch + 1)]
            return max((need for need in needs if need * 4 <= WORKSPACE_LIMIT), default=0)

        if shared is not None and shared.numel() >= wanted(max_tokens):
            self.workspace = shared
            return
        # Allocated now and kept: a captured graph must find it at the same place.
        size = max(wanted(max_tokens), wanted(more_tokens) if more_tokens else 0)
        self.workspace = torch.empty(size, dtype=torch.float32, device=device)

    def plan(self, batch: int, rows: int, width: int) -> tuple[Tiles, int]:
        """Tiles and splits of a batch."""
        tile = fitted(self.tile or tiles(rows // self.kv_heads, self.memory, self.known), self.room)
        return tile, splits(batch, rows, width, tile, self.cores, self.override, self.kv_heads)

    def numbers(self, batch: int, rows: int, width: int) -> int:
        """Numbers of workspace that a batch takes: a row of values and a log-sum-exp for each split and row."""
        return batch * self.plan(batch, rows, width)[1] * rows * (width + 1)

    def fits(self, batch: int, rows: int, width: int) -> bool:
        return self.numbers(batch, rows, width) <= self.workspace.numel()

    def launch(self, batch: int, tokens: int, heads: int, width: int) -> Launch:
        """Of a batch with ``tokens`` new tokens a request.

        Raises:
            ValueError: the workspace does not hold this batch (`fits`).
        """
        rows = tokens * heads
        if not self.fits(batch, rows, width):
            raise ValueError(
                f"the workspace has {self.workspace.numel()} numbers, a batch of {batch} with {rows} rows needs "
                f"{self.numbers(batch, rows, width)}; ask `fits` first"
            )
        tile, count = self.plan(batch, rows, width)
        return Launch(
            tile,
            (blocks(rows, tile, self.kv_heads), count, batch),
            self.cores * tile.resident,
            self.workspace,
            self.workspace[batch * count * rows * width :],
            {"L": tokens, "H": heads, "DV": width, "BLOCK_N": tile.block_n, "MIN_CHUNK": max(MIN_CHUNK, tile.block_n)},
        )

    def merge(self, made: Launch, out: torch.Tensor, kv_indptr: torch.Tensor) -> None:
        """Put together what the kernel of ``made`` left, in ``out`` (batch * L, H, DV)."""
        row_blocks, count, batch = made.grid
        rows, width = made.shared["L"] * made.shared["H"], made.shared["DV"]
        kernels.merge_splits[(rows, math.ceil(width / MERGE_BLOCK_D), batch)](
            made.partial,
            made.lse,
            out,
            kv_indptr,
            batch,
            count,
            row_blocks,
            made.target,
            out.stride(0),
            out.stride(1),
            BLOCK_D=MERGE_BLOCK_D,
            BLOCK_S=MERGE_BLOCK_S,
            SPLITS_UP=triton.next_power_of_2(max(count, MAX_SPLITS)),
            num_warps=4,
            num_stages=2,
            **made.shared,
        )
