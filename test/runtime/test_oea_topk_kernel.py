"""oea-topk: the Triton kernel, interpreted, equals the reference; with k0 = k upstream's router, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_patches.runtime.oea_topk import kernel


def test_the_kernel_is_the_reference_and_upstreams_router() -> None:
    script = Path(__file__).with_name("oea_kernel.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == ["cases 48 14"]


@pytest.mark.parametrize(
    ("capability", "changes"),
    [(90, {}), (120, {"HAS_P": True, "RANK_CAP": 24, "SHARED": 1, "BLOCK_K": 16, "RENORMALIZE": False, "COUNT": True})],
)
def test_the_kernel_compiles_for_gpus(
    capability: int, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter takes more than the compiler does; a verify of 4 tokens, Kimi-K2.5's router, no GPU needed."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    fixed: dict[str, Any] = {
        "N": 384, "K": 8, "K0": 4, "K_MAX": 8, "RANK_CAP": 0, "LEAST": 2, "MOST": 64, "SHARED": 0, "SOFTMAX": False,
        "HAS_BIAS": True, "HAS_P": False, "RENORMALIZE": True, "COUNT": False, "BLOCK_M": 4, "BLOCK_N": 512,
        "BLOCK_K": 8, "LOWEST": kernel._LOWEST, **changes,
    }  # fmt: skip
    types = {"logits": "*bf16", "bias": "*fp32", "real": "*i32", "out_weights": "*fp32", "out_ids": "*i32",
             "counts": "*i64", "M": "i32", "stride": "i32", "p": "fp32", "scale": "fp32",
             "shared_weight": "fp32"}  # fmt: skip
    signature = types | dict.fromkeys(fixed, "constexpr")
    source = ASTSource(
        kernel._oea_kernel, signature, {(list(signature).index(name),): value for name, value in fixed.items()}
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert compiled.asm["cubin"]
