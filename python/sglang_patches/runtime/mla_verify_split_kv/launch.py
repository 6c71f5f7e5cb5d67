"""How the kernels of `kernels` are launched: block sizes, number of splits, workspace. Host side, no values are read.

Everything here follows from shapes alone, so that a launch can be captured: a captured graph launches the same number
of programs for every length, and those that have no chunk end at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from sglang_patches.runtime.mla_verify_split_kv import kernels

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
    """Rows (draft tokens times heads) and cached tokens that a program takes at a time.

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


# The fastest of those that `benchmark/verify_attention --sweep` tried on an H200. Shared memory is what triton 3.8
# takes for 512 + 64 numbers in bfloat16, the most of SM 80, 90, 100 and 120; SM 86, 89 and 120 have least to give.
ROWS_16 = Tiles(16, 32, warps=4, stages=3, resident=2, memory=56_832)
ROWS_32 = Tiles(32, 64, warps=8, stages=3, resident=1, memory=115_712)
ROWS_64 = Tiles(64, 32, warps=8, stages=3, resident=1, memory=214_064)
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


def tiles(rows: int, memory: int = LEAST_SHARED_MEMORY) -> Tiles:
    """Tiles for ``rows`` = draft tokens times heads and ``memory`` bytes of shared memory a block.

    Further blocks of rows find the cached tokens in the L2 cache.
    """
    needed = next((tile for tile in (ROWS_16, ROWS_32, ROWS_64) if rows <= tile.block_m), ROWS_64)
    fits = [tile for tile in (ROWS_64, ROWS_32, ROWS_16) if tile.block_m <= needed.block_m and tile.memory <= memory]
    return fits[0] if fits else ROWS_16


def splits(batch: int, rows: int, width: int, tile: Tiles, cores: int, override: int | None = None) -> int:
    """Programs launched for each request and block of rows.

    The batch is cut for as many programs as run at once; twice as many are launched, for batches of uneven lengths.

    Args:
        width: numbers of a value, DV.
        cores: multiprocessors of the GPU.
        override: so many, whatever the batch.
    """
    if override is not None:
        return override
    wanted = math.ceil(2 * cores * tile.resident / (batch * math.ceil(rows / tile.block_m)))
    affordable = WORKSPACE_GOAL // (batch * rows * (width + 1) * 4)
    return max(1, min(max(wanted, MIN_SPLITS), MAX_SPLITS, affordable))


class SplitVerify:
    """Verify attention for one attention backend; keeps the workspace that its captured graphs point at.

    Args:
        max_batch: requests that a batch can have.
        max_tokens: draft tokens that a request can have.
        heads: query heads on this rank.
        width: DV, the rank of the latent, 1 to 512.
        cores: multiprocessors of the GPU.
        override: splits to launch, whatever the batch; 1 or more.
        tile: in place of `tiles`, to measure.
        shared: a workspace that is used where it is large enough, see `workspaces`.
        more_tokens: draft tokens of backends still to come, for which a new workspace is to have room too.
    """

    def __init__(
        self,
        max_batch: int,
        max_tokens: int,
        heads: int,
        width: int,
        *,
        cores: int,
        device: torch.device | str,
        override: int | None = None,
        tile: Tiles | None = None,
        shared: torch.Tensor | None = None,
        more_tokens: int = 0,
    ) -> None:
        self.cores, self.override, self.tile, self.memory = cores, override, tile, shared_memory(device)
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
        tile = fitted(self.tile or tiles(rows, self.memory), self.room)
        return tile, splits(batch, rows, width, tile, self.cores, self.override)

    def numbers(self, batch: int, rows: int, width: int) -> int:
        """Numbers of workspace that a batch takes: a row of values and a log-sum-exp for each split and row."""
        return batch * self.plan(batch, rows, width)[1] * rows * (width + 1)

    def fits(self, batch: int, rows: int, width: int) -> bool:
        return self.numbers(batch, rows, width) <= self.workspace.numel()

    def __call__(
        self,
        q: torch.Tensor,
        k_extend: torch.Tensor,
        out: torch.Tensor,
        cache: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        *,
        width: int,
        scale: float,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Write the attention of ``batch * L`` draft tokens, L of them a request in a chain, to ``out``.

        Token i of a request sees all its cached tokens and its draft tokens 0 to i.

        Args:
            q: (batch * L, H, DV + PE), bfloat16 or float16.
            k_extend: (batch * L, 1, DV + PE), the draft tokens' latent rows as computed, not divided by ``k_scale``.
            out: (batch * L, H, DV).
            cache: (slots, 1, DV + PE), of q's dtype or fp8; the first DV numbers are the value.
            kv_indptr: (batch + 1,), where a request's cached tokens begin in ``kv_indices``, from 0.
            kv_indices: slots; may be longer than ``kv_indptr[batch]``.
            width: DV.
            scale: factor of the scores.
            k_scale, v_scale: what cached keys and values are to be multiplied with.

        Raises:
            ValueError: the workspace does not hold this batch (`fits`).
        """
        batch = kv_indptr.shape[0] - 1
        tokens, heads = q.shape[0] // batch, q.shape[1]
        rows, rope = tokens * heads, q.shape[2] - width
        if not self.fits(batch, rows, width):
            raise ValueError(
                f"the workspace has {self.workspace.numel()} numbers, a batch of {batch} with {rows} rows needs "
                f"{self.numbers(batch, rows, width)}; ask `fits` first"
            )
        tile, count = self.plan(batch, rows, width)
        row_blocks = math.ceil(rows / tile.block_m)
        target = self.cores * tile.resident
        partial = self.workspace
        lse = self.workspace[batch * count * rows * width :]
        shared: dict[str, Any] = {
            "L": tokens,
            "H": heads,
            "DV": width,
            "BLOCK_N": tile.block_n,
            "MIN_CHUNK": max(MIN_CHUNK, tile.block_n),
        }
        kernels.attend_splits[(row_blocks, count, batch)](
            q,
            k_extend,
            cache,
            partial,
            lse,
            kv_indptr,
            kv_indices,
            scale * math.log2(math.e),
            k_scale,
            v_scale,
            batch,
            count,
            target,
            q.stride(0),
            q.stride(1),
            k_extend.stride(0),
            cache.stride(0),
            PE=rope,
            BLOCK_DV=max(16, triton.next_power_of_2(width)),
            BLOCK_PE=max(16, triton.next_power_of_2(rope)),
            BLOCK_M=tile.block_m,
            BLOCK_L=max(16, triton.next_power_of_2(tokens)),
            num_warps=tile.warps,
            num_stages=tile.stages,
            **shared,
        )
        kernels.merge_splits[(rows, math.ceil(width / MERGE_BLOCK_D), batch)](
            partial,
            lse,
            out,
            kv_indptr,
            batch,
            count,
            row_blocks,
            target,
            out.stride(0),
            out.stride(1),
            BLOCK_D=MERGE_BLOCK_D,
            BLOCK_S=MERGE_BLOCK_S,
            SPLITS_UP=triton.next_power_of_2(max(count, MAX_SPLITS)),
            num_warps=4,
            num_stages=2,
            **shared,
        )
