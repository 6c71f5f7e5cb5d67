"""Split kernels compiled for a GPU that is not here."""

from __future__ import annotations

from typing import Any

import triton

NUMBERS = ("scale", "k_scale", "v_scale")


def compiled(kernel: Any, pointers: dict[str, str], constants: dict[str, int], tile: Any, sm: int) -> Any:
    """Triton's compiled kernel for NVIDIA's ``sm``, all pointers and strides multiples of 16.

    Args:
        pointers: arguments that are tensors, and of which triton type; others are 32-bit.
        constants: of ``tl.constexpr`` arguments, less those that the tile gives.
        tile: `_split_kv.plan.Tiles`.
    """
    constants = constants | {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_L": 16, "MIN_CHUNK": 64}
    pointers = pointers | {"Partial": "fp32", "Lse": "fp32", "indptr": "i32", "indices": "i64"}
    names = kernel.arg_names
    types = {name: "fp32" if name in NUMBERS else "i32" for name in names}
    types |= {name: f"*{kind}" for name, kind in pointers.items()} | dict.fromkeys(constants, "constexpr")
    aligned = [name for name in names if name in pointers or name.startswith("stride")]
    source = triton.compiler.ASTSource(
        kernel,
        types,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = triton.backends.compiler.GPUTarget("cuda", sm, 32)
    return triton.compile(source, target=target, options={"num_warps": tile.warps, "num_stages": tile.stages})
