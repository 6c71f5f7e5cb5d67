"""Which tiles are worth a measurement: a configuration of upstream's kernel, and the ones that physics leaves.

A decode step reads each active expert once, so the kernel is as fast as it keeps memory busy. By Little's law that
takes bandwidth times latency in flight; a configuration that cannot have half of it is left out, as is one whose tiles
do not fit in shared memory, or with more stages than the loop has turns, or more warps than its tile gives work.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sglang_patches.tune.moe.geometry import Gemm, Geometry

BLOCK_M = (16, 32, 64, 128)
BLOCK_N = (16, 32, 64, 128, 256)
BLOCK_K = (64, 128, 256)
WARPS = (2, 4, 8)
STAGES = (2, 3, 4, 5)
GROUPS = (1, 16)
_LATENCY = 0.7e-6  # seconds from a load of device memory to its data, loaded GPUs of the last generations
_TRITON_WARPS, _TRITON_STAGES = 4, 3  # what Triton takes where a table says nothing


@dataclass(frozen=True, order=True)
class Config:
    """One configuration of ``fused_moe_kernel``. `warps` and `stages` 0: not told, so Triton's defaults.

    Attributes:
        tma: gate_up loads weights, down weights and activations through the tensor memory accelerator.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 1
    warps: int = 4
    stages: int = 3
    tma: bool = False

    def kernel(self) -> dict[str, int]:
        """As upstream hands it to the kernel."""
        told = {"BLOCK_SIZE_M": self.block_m, "BLOCK_SIZE_N": self.block_n, "BLOCK_SIZE_K": self.block_k}
        told["GROUP_SIZE_M"] = self.group_m
        if self.warps:
            told["num_warps"] = self.warps
        if self.stages:
            told["num_stages"] = self.stages
        return told

    def entry(self) -> dict[str, int | bool]:
        """As a table has it; ``USE_TMA`` only where it is used, since upstream takes its absence for no."""
        return {**self.kernel(), **({"USE_TMA": True} if self.tma else {})}

    def __str__(self) -> str:
        told = f"{self.block_m}x{self.block_n}x{self.block_k} g{self.group_m}"
        told += f" w{self.warps or '-'} s{self.stages or '-'}"
        return told + (" tma" if self.tma else "")


def read(entry: Mapping[str, Any]) -> Config:
    """A configuration as upstream writes it."""
    names = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
    m, n, k, group = (int(entry[name]) for name in names)
    warps, stages = int(entry.get("num_warps", 0)), int(entry.get("num_stages", 0))
    return Config(m, n, k, group, warps, stages, bool(entry.get("USE_TMA", False)))


def parse(text: str) -> Config:
    """What `str` of a configuration gives."""
    tiles, group, warps, stages, *tma = text.split()
    m, n, k = (int(part) for part in tiles.split("x"))
    told = [int(part[1:].replace("-", "0")) for part in (group, warps, stages)]
    return Config(m, n, k, told[0], told[1], told[2], bool(tma))


@dataclass(frozen=True)
class Device:
    """What pruning asks of a GPU.

    Attributes:
        shared: bytes of shared memory that one block may have.
        shared_all: bytes of one multiprocessor.
        bandwidth: bytes a second of device memory, as copies reach it (read and written).
        has_tma: whether Triton loads by descriptors in hardware.
    """

    multiprocessors: int
    shared: int
    shared_all: int
    bandwidth: float
    l2: int
    has_tma: bool


def block_ms(geometry: Geometry, tokens: int) -> list[int]:
    """Rows a block: 16, the least a matrix instruction takes, until experts have more tokens each."""
    each = tokens * geometry.top_k / geometry.active(tokens)
    return [rows for rows in BLOCK_M if rows == BLOCK_M[0] or rows <= 2 * each] if each < 64 else list(BLOCK_M[1:])


def in_flight(geometry: Geometry, gemm: Gemm, tokens: int, config: Config, device: Device) -> float:
    """Bytes of weights that a multiprocessor has on their way, at most."""
    n, _k = geometry.shape(gemm)
    blocks = tokens * geometry.top_k / max(geometry.active(tokens), 1)
    programs = geometry.active(tokens) * math.ceil(blocks / config.block_m) * math.ceil(n / config.block_n)
    warps, stages = config.warps or _TRITON_WARPS, config.stages or _TRITON_STAGES
    fits = min(device.shared_all // max(_shared(geometry, config), 1), 2048 // (32 * warps))
    resident = min(max(fits, 1), math.ceil(programs / device.multiprocessors))
    return resident * (stages - 1) * config.block_n * config.block_k * geometry.element_bytes()


def _shared(geometry: Geometry, config: Config) -> int:
    """Bytes of shared memory that the loop's tiles take; one stage less than there are, as Triton may do with it."""
    activation = 1 if geometry.dtype == "fp8_w8a8" else 2
    weight = max(geometry.element_bytes(), 1)  # an int4 tile lies there as bytes
    tile = config.block_k * (config.block_m * activation + config.block_n * weight)
    return int(tile * max((config.stages or _TRITON_STAGES) - 1, 1))


def fits(geometry: Geometry, gemm: Gemm, config: Config, device: Device) -> bool:
    """Whether the kernel can run so, and whether nothing in it is idle by construction."""
    n, k = geometry.shape(gemm)
    warps, stages = config.warps or _TRITON_WARPS, config.stages or _TRITON_STAGES
    if config.block_n > max(n, BLOCK_N[0]) or config.block_k > k or stages > max(math.ceil(k / config.block_k) + 1, 2):
        return False
    if geometry.dtype == "fp8_w8a8" and geometry.block_shape and geometry.block_shape[1] % config.block_k:
        return False  # a tile has one scale along k
    products = (config.block_m // 16) * (config.block_n // 8)
    if warps > products or config.block_m * config.block_n > 32 * warps * 128:
        return False
    return _shared(geometry, config) <= device.shared


def candidates(geometry: Geometry, gemm: Gemm, tokens: int, device: Device) -> list[Config]:
    """What to measure first, for a batch of `tokens`: no TMA, one group size. `twins` adds to the best of them."""
    wanted = device.bandwidth / device.multiprocessors * _LATENCY
    found = []
    for m, n, k, warps, stages in itertools.product(block_ms(geometry, tokens), BLOCK_N, BLOCK_K, WARPS, STAGES):
        config = Config(m, n, k, 1, warps, stages)
        if not fits(geometry, gemm, config, device) or warps < n // 32:
            continue
        n_bytes = config.block_n * config.block_k * geometry.element_bytes()
        if n_bytes < warps * 32 * 8 or in_flight(geometry, gemm, tokens, config, device) < wanted / 2:
            continue
        found.append(config)
    return found


def twins(geometry: Geometry, gemm: Gemm, best: Iterable[Config], device: Device) -> list[Config]:
    """The best ones so far in other group sizes and, where there is one for their type, with TMA."""
    found: list[Config] = []
    for place, config in enumerate(best):
        if device.has_tma and geometry.dtype != "int4_w4a16":
            found.append(replace(config, tma=True))
        if place < 3:
            found += [replace(config, group_m=group) for group in GROUPS if group != config.group_m]
    return [config for config in dict.fromkeys(found) if fits(geometry, gemm, config, device)]
