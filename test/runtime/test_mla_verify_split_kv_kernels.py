"""mla-verify-split-kv: its kernels give what attention gives, upstream's backend calls them, and they fit a GPU.

The kernels run in triton's interpreter, in a process of their own (`split_verify.py`), and are compiled for GPUs that
are not here. Speed, and bfloat16 in the interpreter, need a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from split_compile import compiled
from split_made import written
from split_verify import SHAPES

from sglang_patches.runtime._split_kv import plan
from sglang_patches.runtime.mla_verify_split_kv import launch
from sglang_patches.runtime.mla_verify_split_kv.kernels import attend_splits


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return written("split_verify.py", "mla-verify-split-kv", "kernels", tmp_path_factory.mktemp("split"))


@pytest.mark.parametrize("name", [*SHAPES, "scaled cache"])
def test_kernels_give_float32_attention(kernels: Any, name: str) -> None:
    split, reference = kernels[name]["split"], kernels[name]["reference"]
    assert reference.abs().max() > 0.3
    assert (split - reference).abs().max() < 3e-6


def test_what_start_up_tries_is_right(kernels: Any) -> None:
    assert len(kernels["check"]) == 6
    assert all(worst < (1e-5 if "float32" in what else 5e-3) for what, worst in kernels["check"].items())


@pytest.mark.parametrize(("dtype", "error"), [("torch.float16", 2e-3), ("torch.float8_e4m3fn", 2e-3)])
def test_other_types_round_only(kernels: Any, dtype: str, error: float) -> None:
    assert (kernels[dtype]["split"] - kernels[dtype]["reference"]).abs().max() < error


@pytest.mark.parametrize(
    ("tile", "sm", "cache"),
    [
        (launch.ROWS_16, 120, "bf16"),
        (launch.ROWS_16, 89, "fp8e4nv"),
        (launch.ROWS_32, 80, "bf16"),
        (launch.ROWS_32, 90, "bf16"),
        (launch.ROWS_64, 90, "bf16"),
        (launch.ROWS_64, 100, "bf16"),
    ],
    ids=str,
)
def test_kernels_compile_and_take_the_shared_memory_they_say(tile: plan.Tiles, sm: int, cache: str) -> None:
    """For Kimi-K2.5 on a TP-8 rank."""
    pointers = {"Q": "bf16", "Extend": "bf16", "Cache": cache}
    constants = {"L": 4, "H": 8, "DV": 512, "PE": 64, "BLOCK_DV": 512, "BLOCK_PE": 64}
    made = compiled(attend_splits, pointers, constants, tile, sm)
    assert len(made.asm["cubin"]) > 1000
    assert made.metadata.shared <= tile.memory


def test_upstreams_backend_verifies_with_the_split_kernels(tmp_path: Path) -> None:
    found = written("split_verify.py", "mla-verify-split-kv", "backend", tmp_path)
    reference, split = found["torch_native"], found["split"]
    assert split["calls"] == {"split_kv": 12}  # one a layer
    assert split["outcome"]["result"] == "applied"
    assert split["outcome"]["splits_launched_at_batch_1"] == 3
    for name in ("logits", "hidden"):
        assert reference[name].abs().max() > 1
        assert (split[name] - reference[name]).abs().max() < 1e-5 * reference[name].abs().max(), name
    assert torch.equal(split["logits"].argmax(-1), reference["logits"].argmax(-1))
    used, outcome = found["on a CPU"]
    assert (used, outcome["result"], outcome["reason"]) == (False, "not needed", "device")
    assert found["draft's"] is False
    assert found["off"] is False


def test_splits_follow_from_batch_and_gpu() -> None:
    """One H200 (132 multiprocessors), 4 draft tokens and 8 heads: twice what runs at once, within limits."""

    def launched(batch: int, rows: int = 32, override: int | None = None) -> int:
        return plan.splits(batch, rows, 512, launch.tiles(rows, 232_448), 132, override)

    assert [launched(batch) for batch in (1, 2, 4, 16, 32, 128)] == [128, 128, 66, 17, 9, 8]
    assert launched(4, rows=128) == 33
    assert launched(8, rows=16) == 66  # two such programs at once
    assert launched(4, override=5) == 5
    # 256 requests of 64 heads and 4 tokens: 128 MiB of results allow one split.
    assert launched(256, rows=256) == 1


def test_the_workspace_holds_every_batch_within_its_limit() -> None:
    def make(requests: int, tokens: int, heads: int) -> launch.SplitVerify:
        return launch.SplitVerify(requests, tokens, heads, 512, cores=132, device="meta")

    kimi = make(48, 4, 8)
    assert all(kimi.fits(batch, 32, 512) for batch in range(1, 49))
    assert kimi.workspace.numel() * 4 < 40 * 2**20
    large = make(1024, 4, 64)
    assert large.workspace.numel() * 4 <= plan.WORKSPACE_LIMIT
    assert large.fits(256, 256, 512)
    assert not large.fits(1024, 256, 512)


def test_tiles_follow_from_rows_and_shared_memory() -> None:
    by_gpu = {"SM 120": 101_376, "SM 80": 166_912, "SM 90": 232_448}
    tiles = {name: [launch.tiles(rows, memory) for rows in (16, 32, 64, 128)] for name, memory in by_gpu.items()}
    small, middle, large = launch.ROWS_16, launch.ROWS_32, launch.ROWS_64
    assert tiles["SM 120"] == [small] * 4
    assert tiles["SM 80"] == [small, middle, middle, middle]
    assert tiles["SM 90"] == [small, middle, large, large]
    assert launch.tiles(64, 0) is small
    assert plan.shared_memory("cpu") == plan.LEAST_SHARED_MEMORY
    # A multiprocessor of SM 86, 89 and 120 has 100 KiB, of SM 80 164, of SM 90 228.
    assert [plan.fitted(small, kib * 1024).resident for kib in (100, 164, 228)] == [1, 2, 2]
    assert plan.fitted(large, 164 * 1024).resident == 1


def test_a_batch_beyond_the_workspace_is_refused() -> None:
    """On a GPU it would write behind it."""
    run = launch.SplitVerify(1, 2, 2, 16, cores=4, device="cpu")
    q, indptr = torch.zeros(4 * 2, 2, 24), torch.arange(5, dtype=torch.int32)
    with pytest.raises(ValueError, match="a batch of 4 with 4 rows needs"):
        run(q, q[:, :1], q, torch.zeros(5, 1, 24), indptr, torch.zeros(4, dtype=torch.int64), width=16, scale=1.0)
