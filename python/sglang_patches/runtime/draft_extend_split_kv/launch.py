"""How the kernel of `kernels` is launched. Host side, no values are read; splits and workspace are `_split_kv.plan`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import triton

from sglang_patches.runtime._split_kv.plan import SplitAttention, Tiles
from sglang_patches.runtime.draft_extend_split_kv import kernels

# Chosen by `benchmark/extend_attention --sweep` on an H200, up to 32 rows; problems with more were not tried.
# Shared memory is what triton 3.8 takes for bfloat16, the most of up to 128 numbers a key or value, and of up to 256
# with half the cached tokens (`WIDE_MEMORY` where that would cost the others), on SM 80, 89, 90, 100 and 120. Resident
# are as many as an H200 has registers for.
ROWS_16 = Tiles(16, 64, warps=4, stages=3, resident=3, memory=42_240)
ROWS_32 = Tiles(32, 64, warps=4, stages=5, resident=2, memory=78_848)
ROWS_64 = Tiles(64, 64, warps=8, stages=3, resident=1, memory=99_104)
KNOWN = (ROWS_16, ROWS_32, ROWS_64)
NARROW = 128
WIDE_MEMORY = {32: 84_480}


def known(width: int) -> Sequence[Tiles]:
    """`KNOWN`; for heads wider than 128 numbers with half as many cached tokens at a time, so that they fit."""
    if width <= NARROW:
        return KNOWN
    return [
        replace(tile, block_n=tile.block_n // 2, memory=WIDE_MEMORY.get(tile.block_m, tile.memory)) for tile in KNOWN
    ]


class SplitExtend(SplitAttention):
    """Attention of a few new tokens a request, for one attention backend.

    Args:
        max_batch, max_tokens, heads, kv_heads, cores, device, override, tile, shared, more_tokens: as `SplitAttention`.
        key_width, width: DK and DV, numbers of a head's key and value, 1 to 256.
    """

    def __init__(
        self,
        max_batch: int,
        max_tokens: int,
        heads: int,
        kv_heads: int,
        key_width: int,
        width: int,
        *,
        cores: int,
        device: torch.device | str,
        override: int | None = None,
        tile: Tiles | None = None,
        shared: torch.Tensor | None = None,
        more_tokens: int = 0,
    ) -> None:
        self.heads, self.key_width, self.width = heads, key_width, width
        super().__init__(
            max_batch,
            max_tokens,
            heads,
            width,
            kv_heads=kv_heads,
            known=known(max(key_width, width)),
            cores=cores,
            device=device,
            override=override,
            tile=tile,
            shared=shared,
            more_tokens=more_tokens,
        )

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        *,
        scale: float,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Write the attention of ``batch * L`` new tokens, L of them a request, to ``out``.

        Token i of a request sees all its cached tokens and its new tokens 0 to i. The last dimension of every tensor is
        contiguous; the others need not be.

        Args:
            q: (batch * L, H, DK), bfloat16 or float16.
            k, v: (batch * L, KV heads, DK or DV), the new tokens' as computed, not divided by their scales.
            out: (batch * L, H, DV).
            k_cache, v_cache: (slots, KV heads, DK or DV), of q's dtype or fp8.
            kv_indptr: (batch + 1,), where a request's cached tokens begin in ``kv_indices``, from 0.
            kv_indices: slots; may be longer than ``kv_indptr[batch]``.
            scale: factor of the scores.
            k_scale, v_scale: what cached keys and values are to be multiplied with.

        Raises:
            ValueError: the workspace does not hold this batch (`fits`).
        """
        batch = kv_indptr.shape[0] - 1
        tokens, heads = q.shape[0] // batch, q.shape[1]
        made = self.launch(batch, tokens, heads, self.width)
        kernels.attend_splits[made.grid](
            q,
            k,
            v,
            k_cache,
            v_cache,
            made.partial,
            made.lse,
            kv_indptr,
            kv_indices,
            scale * math.log2(math.e),
            k_scale,
            v_scale,
            batch,
            made.grid[1],
            made.target,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            k_cache.stride(0),
            k_cache.stride(1),
            v_cache.stride(0),
            v_cache.stride(1),
            KV_HEADS=self.kv_heads,
            DK=self.key_width,
            BLOCK_DK=max(16, triton.next_power_of_2(self.key_width)),
            BLOCK_DV=max(16, triton.next_power_of_2(self.width)),
            BLOCK_M=made.tile.block_m,
            BLOCK_L=max(16, triton.next_power_of_2(tokens)),
            num_warps=made.tile.warps,
            num_stages=made.tile.stages,
            **made.shared,
        )
        self.merge(made, out, kv_indptr)
