"""Upstream's fused-MoE kernel on random experts: one call of one matrix product, and what it must give.

A call goes through upstream's own ``invoke_fused_moe_kernel``, with the configuration in the argument where upstream's
``override_config`` would end up: what is launched is upstream's kernel, compiled as a server compiles it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from sglang_patches.tune.moe import routing
from sglang_patches.tune.moe.geometry import GEMMS, Gemm, Geometry
from sglang_patches.tune.moe.routing import Work
from sglang_patches.tune.moe.space import Config

_CHECKED_ROWS = 512


@cache
def _invoke() -> Callable[..., None]:
    from sglang.kernels.ops.moe.fused_moe_triton_kernels import invoke_fused_moe_kernel

    return invoke_fused_moe_kernel  # type: ignore[no-any-return]


def upstream_align() -> Callable[..., routing.Aligned]:
    """Upstream's ``moe_align_block_size`` where it has a kernel for this machine, else ours."""
    if not torch.cuda.is_available():
        return routing.align
    from sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size import moe_align_block_size

    return moe_align_block_size  # type: ignore[no-any-return]


class Experts:
    """Random experts of several layers, and the buffers of a call.

    Args:
        layers: so many layers' weights lie in memory apart, so that no cache holds what the next call reads.
        held: of each layer only so many experts, for processes that only compile.
    """

    def __init__(
        self, geometry: Geometry, device: torch.device, layers: int = 1, seed: int = 1, held: int | None = None
    ) -> None:
        self.geometry, self.device, self.layers, self.seed, self.held = geometry, device, layers, seed, held
        # Triton's interpreter multiplies bfloat16 wrongly, so a trial on a CPU has float16 in its place.
        half = geometry.dtype == "float16" or device.type == "cpu"
        self.compute = torch.float16 if half else torch.bfloat16
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self.weights: dict[Gemm, list[tuple[torch.Tensor, torch.Tensor | None]]] = {
            gemm: [self._matrices(gemm) for _ in range(layers)] for gemm in GEMMS
        }
        # A process that only compiles needs the sizes alone, and upstream's function is compiled at its first call.
        self._align = routing.align if held else upstream_align()
        # What a captured graph reads must not go away while it may be replayed: all of these only grow.
        self._works: dict[tuple[int, int], list[Work]] = {}
        self._buffers: dict[tuple[Gemm, int, int], torch.Tensor] = {}
        self._wanted: dict[tuple[Gemm, int], torch.Tensor] = {}

    def _matrices(self, gemm: Gemm) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One layer's weights, (experts, N, K) in memory, and their scales."""
        g, (n, k) = self.geometry, self.geometry.shape(gemm)
        count = self.held or g.experts
        where: dict[str, Any] = {"device": self.device, "generator": self._generator}
        if g.dtype == "int4_w4a16":
            assert g.block_shape is not None
            packed = torch.randint(0, 256, (count, n, k // 2), dtype=torch.uint8, **where)
            scales = torch.rand(count, n, k // g.block_shape[1], dtype=torch.float32, **where)
            return packed, ((scales + 0.5) * k**-0.5 / 4).to(self.compute)
        weights = torch.empty(count, n, k, dtype=self.compute, device=self.device).normal_(
            0, k**-0.5, generator=self._generator
        )
        if g.dtype != "fp8_w8a8":
            return weights, None
        assert g.block_shape is not None
        scales = torch.rand(count, -(-n // g.block_shape[0]), -(-k // g.block_shape[1]), **where) + 0.5
        return torch.stack([(expert * k**0.5).to(torch.float8_e4m3fn) for expert in weights]), scales * k**-0.5

    def works(self, tokens: int, block_m: int, count: int = 1) -> list[Work]:
        """The first `count` draws of a batch of `tokens`."""
        g, known = self.geometry, self._works.setdefault((tokens, block_m), [])
        for number in range(len(known), count):
            known.append(
                routing.work(
                    tokens, g.experts, g.top_k, block_m, number, self.seed, self.device, self._align, self.held
                )
            )
        return known[:count]

    def activations(self, gemm: Gemm, tokens: int, more: int = 0) -> torch.Tensor:
        """Random input of a product: (tokens, hidden), or (tokens * top_k, intermediate); `more` rows behind those."""
        key = (gemm, tokens, more)
        if key not in self._buffers:
            rows = (tokens if gemm == "gate_up" else tokens * self.geometry.top_k) + more
            made = torch.empty(rows, self.geometry.shape(gemm)[1], dtype=self.compute, device=self.device)
            self._buffers[key] = made.normal_(generator=self._generator)
        return self._buffers[key]

    def output(self, gemm: Gemm, tokens: int) -> torch.Tensor:
        """(tokens * top_k, N), or (tokens, top_k, N) as upstream has it for down."""
        g = self.geometry
        shape = (tokens * g.top_k, 2 * g.intermediate) if gemm == "gate_up" else (tokens, g.top_k, g.hidden)
        return torch.empty(shape, dtype=self.compute, device=self.device)

    def call(
        self, gemm: Gemm, config: Config, work: Work, out: torch.Tensor, layer: int = 0, a: torch.Tensor | None = None
    ) -> None:
        """Launch upstream's kernel once.

        Args:
            work: sorted for `config.block_m`.
            out: see `output`.
            a: input in place of random numbers; for down with TMA in the order of `work.order`, as upstream has it.
        """
        import triton.language as tl

        g, up = self.geometry, gemm == "gate_up"
        tokens = work.ids.shape[0]
        if a is None:
            a = self.activations(gemm, tokens, work.order.numel() if config.tma and not up else 0)
        weights, scales = self.weights[gemm][layer % self.layers]
        _invoke()(
            a, weights, None, out, None, scales, None, work.weights, work.ids, work.order, work.experts, work.padded,
            not up, g.top_k if up else 1, config.kernel(),
            compute_type=tl.float16 if self.compute == torch.float16 else tl.bfloat16,
            use_fp8_w8a8=g.dtype == "fp8_w8a8", use_int8_w8a8=False, use_int8_w8a16=False,
            use_int4_w4a16=g.dtype == "int4_w4a16", per_channel_quant=False,
            block_shape=list(g.block_shape) if g.block_shape else None,
            a_use_tma=config.tma and not up, b_use_tma=config.tma, c_sorted=False, filter_expert=False,
            router_topk=g.top_k,
        )  # fmt: skip

    def dense(self, gemm: Gemm, layer: int, expert: int) -> torch.Tensor:
        """One expert's matrix in float32, (N, K)."""
        weights, scales = self.weights[gemm][layer % self.layers]
        one = weights[expert]
        if scales is None:
            return one.float()
        assert self.geometry.block_shape is not None
        rows, columns = self.geometry.block_shape
        if self.geometry.dtype == "int4_w4a16":
            numbers = torch.stack([one & 15, one >> 4], dim=-1).flatten(-2).float() - 8
            return numbers * scales[expert].float().repeat_interleave(columns, 1)
        spread = scales[expert].repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return one.float() * spread[: one.shape[0], : one.shape[1]]

    def _checked(self, tokens: int) -> torch.Tensor:
        """Which rows of an output are compared."""
        count = tokens * self.geometry.top_k
        return torch.arange(0, count, max(1, count // _CHECKED_ROWS), device=self.device)

    def wanted(self, gemm: Gemm, tokens: int) -> torch.Tensor:
        """What the rows of `_checked` must be for the first draw on the first layer, in float32."""
        if (gemm, tokens) not in self._wanted:
            work, a, rows = self.works(tokens, 16)[0], self.activations(gemm, tokens), self._checked(tokens)
            ids = work.ids.flatten()[rows]
            made = torch.empty(len(rows), self.geometry.shape(gemm)[0], device=self.device)
            for expert in ids.unique().tolist():
                mine = rows[ids == expert]
                source = mine // self.geometry.top_k if gemm == "gate_up" else mine
                made[ids == expert] = a[source].float() @ self.dense(gemm, 0, expert).T
            if gemm == "down":
                made *= work.weights.flatten()[rows, None]
            self._wanted[gemm, tokens] = made
        return self._wanted[gemm, tokens]

    def error(self, gemm: Gemm, config: Config, tokens: int) -> float:
        """Largest deviation of one call from float32, as a share of the largest number; infinite if one is not finite.

        Of a large batch some rows are looked at.
        """
        work, a = self.works(tokens, config.block_m)[0], self.activations(gemm, tokens)
        given = a
        if config.tma and gemm == "down":
            real = work.order < work.ids.numel()
            real[int(work.padded[0]) :] = False
            given = torch.zeros(len(a) + work.order.numel(), a.shape[1], dtype=a.dtype, device=a.device)
            given[: work.order.numel()][real] = a[work.order[real].long()]
        out = self.output(gemm, tokens).fill_(float("nan"))
        self.call(gemm, config, work, out, 0, given)
        got, wanted = out.flatten(0, -2)[self._checked(tokens)].float(), self.wanted(gemm, tokens)
        worst = ((got - wanted).abs().max() / wanted.abs().max()).item()
        return worst if worst == worst else float("inf")
