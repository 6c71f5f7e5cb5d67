"""How the kernel of `kernels` is launched. Host side, no values are read; splits and workspace are `_split_kv.plan`."""

from __future__ import annotations

import math

import torch
import triton

from sglang_patches.runtime._split_kv.plan import LEAST_SHARED_MEMORY, SplitAttention, Tiles
from sglang_patches.runtime._split_kv.plan import tiles as fitting
from sglang_patches.runtime.mla_verify_split_kv import kernels

# The fastest of those that `benchmark/verify_attention --sweep` tried on an H200. Shared memory is what triton 3.8
# takes for 512 + 64 numbers in bfloat16, the most of SM 80, 90, 100 and 120; SM 86, 89 and 120 have least to give.
ROWS_16 = Tiles(16, 32, warps=4, stages=3, resident=2, memory=56_832)
ROWS_32 = Tiles(32, 64, warps=8, stages=3, resident=1, memory=115_712)
ROWS_64 = Tiles(64, 32, warps=8, stages=3, resident=1, memory=214_064)
KNOWN = (ROWS_16, ROWS_32, ROWS_64)


def tiles(rows: int, memory: int = LEAST_SHARED_MEMORY) -> Tiles:
    """Tiles for ``rows`` = draft tokens times heads and ``memory`` bytes of shared memory a block."""
    return fitting(rows, memory, KNOWN)


class SplitVerify(SplitAttention):
    """Verify attention for one attention backend.

    Args:
        max_batch, max_tokens, heads, cores, device, override, tile, shared, more_tokens: as `SplitAttention`.
        width: DV, the rank of the latent, 1 to 512.
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
        super().__init__(
            max_batch,
            max_tokens,
            heads,
            width,
            known=KNOWN,
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
        rope = q.shape[2] - width
        made = self.launch(batch, tokens, heads, width)
        kernels.attend_splits[made.grid](
            q,
            k_extend,
            cache,
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
            k_extend.stride(0),
            cache.stride(0),
            PE=rope,
            BLOCK_DV=max(16, triton.next_power_of_2(width)),
            BLOCK_PE=max(16, triton.next_power_of_2(rope)),
            BLOCK_M=made.tile.block_m,
            BLOCK_L=max(16, triton.next_power_of_2(tokens)),
            num_warps=made.tile.warps,
            num_stages=made.tile.stages,
            **made.shared,
        )
        self.merge(made, out, kv_indptr)
