"""`tune moe`: sizes of a model's layers, which configurations are measured, and what they are measured on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_made import FAST, FP8, INT4, KIMI, OWN, SLOW

from sglang_patches.errors import PatchError
from sglang_patches.tune.moe import builds, routing, space
from sglang_patches.tune.moe.geometry import GEMMS, Geometry, from_document, of_model
from sglang_patches.tune.moe.space import Config, Device

H200 = Device(132, 227 << 10, 228 << 10, 4.1e12, 50 << 20, True)
ADA = Device(142, 99 << 10, 100 << 10, 0.9e12, 96 << 20, False)
configs = st.builds(
    Config, st.sampled_from([16, 64]), st.sampled_from([32, 256]), st.sampled_from([64, 256]), st.sampled_from([1, 16]),
    st.sampled_from([0, 2, 8]), st.sampled_from([0, 2, 5]), st.booleans(),
)  # fmt: skip


# Sizes


def test_the_default_is_a_ranks_share_of_kimi() -> None:
    assert (KIMI.experts, KIMI.hidden, KIMI.intermediate, KIMI.top_k, KIMI.dtype) == (384, 7168, 256, 8, "bfloat16")
    assert KIMI.experts * (KIMI.expert_bytes("gate_up") + KIMI.expert_bytes("down")) == 384 * 3 * 256 * 7168 * 2
    assert KIMI.active(1) == pytest.approx(8)
    assert KIMI.active(64) == pytest.approx(284, abs=1)
    assert from_document(json.loads(json.dumps(FP8.document()))) == FP8


def config_json(folder: Path, **more: Any) -> Path:
    text = {
        "hidden_size": 7168, "n_routed_experts": 384, "moe_intermediate_size": 2048, "num_experts_per_tok": 8, **more,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))
    return folder


def test_kimis_checkpoint_is_int4_and_its_files_are_named_by_bytes(tmp_path: Path) -> None:
    weights = {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    found = of_model(config_json(tmp_path, quantization_config=quantization), 8)
    assert found == INT4
    assert (found.table_n, found.upstream_dtype) == (128, "int4_w4a16")


def test_other_checkpoints(tmp_path: Path) -> None:
    assert of_model(config_json(tmp_path), 8) == KIMI
    assert of_model(config_json(tmp_path, torch_dtype="float16"), 8) == replace(KIMI, dtype="float16")
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert of_model(config_json(tmp_path, quantization_config=fp8), 8) == FP8
    assert of_model(config_json(tmp_path), 8, 8) == replace(KIMI, experts=48, intermediate=2048)
    with pytest.raises(PatchError, match="awq"):
        of_model(config_json(tmp_path, quantization_config={"quant_method": "awq"}), 8)
    with pytest.raises(PatchError, match="do not divide"):
        of_model(config_json(tmp_path), 7)
    with pytest.raises(PatchError, match="no sizes"):
        of_model(config_json(tmp_path, n_routed_experts=0), 8)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PatchError, match=r"config\.json: not JSON"):
        of_model(tmp_path, 8)


@pytest.mark.parametrize("wrong", [("fp8_w8a8", None), ("bfloat16", (128, 128)), ("int4_w4a16", (32, 32))])
def test_a_block_shape_that_the_type_has_not_is_refused(wrong: Any) -> None:
    with pytest.raises(PatchError, match="block shape"):
        replace(KIMI, dtype=wrong[0], block_shape=wrong[1])


# What is measured


@given(configs)
def test_a_configuration_is_the_same_after_each_way_of_writing_it(config: Config) -> None:
    assert space.parse(str(config)) == config
    assert space.read(json.loads(json.dumps(config.entry()))) == config
    assert "USE_TMA" not in config.kernel(), "the kernel does not take it"


@pytest.mark.parametrize("geometry", [KIMI, INT4, FP8], ids=lambda of: of.dtype)
@pytest.mark.parametrize("device", [H200, ADA], ids=["H200", "Ada"])
@pytest.mark.parametrize("tokens", [1, 16, 64, 4096])
def test_pruning_leaves_what_can_run_and_keeps_memory_busy(geometry: Geometry, device: Device, tokens: int) -> None:
    for gemm in GEMMS:
        found = space.candidates(geometry, gemm, tokens, device)
        assert found
        assert len(found) == len(set(found))
        n, k = geometry.shape(gemm)
        for config in found:
            assert config.block_k <= k
            assert config.block_n <= n
            assert space._shared(geometry, config) <= device.shared
            assert config.stages <= -(-k // config.block_k) + 1
            if geometry is FP8:
                assert 128 % config.block_k == 0


def test_what_pruning_leaves_out() -> None:
    found = space.candidates(KIMI, "gate_up", 1, H200)
    # Upstream's tiles with Triton's defaults: 8 KB in flight on a multiprocessor that needs 22.
    assert space.in_flight(KIMI, "gate_up", 1, OWN, H200) == 2 * 32 * 64 * 2
    assert Config(16, 32, 64, 1, 4, 3) not in found
    assert Config(16, 32, 256, 1, 4, 4) in found
    assert not space.fits(KIMI, "down", Config(16, 64, 256, 1, 4, 5), H200), "one turn of the loop, five stages"
    assert not space.fits(KIMI, "gate_up", Config(16, 256, 256, 1, 8, 4), H200), "400 KB of shared memory"
    assert not space.fits(KIMI, "gate_up", Config(16, 16, 256, 1, 8, 3), H200), "eight warps for two products"
    count = sum(len(space.candidates(KIMI, gemm, 16, H200)) for gemm in GEMMS)
    assert count < 200, "twice as many kernels have to be compiled in a minute and a half"


def test_block_m_follows_the_tokens_an_expert_has() -> None:
    assert [space.block_ms(KIMI, tokens) for tokens in (1, 64, 256)] == [[16]] * 3
    assert space.block_ms(KIMI, 1024) == [16, 32]
    assert space.block_ms(KIMI, 4096) == [32, 64, 128]


def test_twins_have_tma_where_there_is_one() -> None:
    assert replace(FAST, tma=True) in space.twins(KIMI, "gate_up", [FAST, SLOW], H200)
    assert replace(FAST, group_m=16) in space.twins(KIMI, "gate_up", [FAST], ADA)
    assert not any(config.tma for config in space.twins(KIMI, "gate_up", [FAST], ADA))
    assert not any(config.tma for config in space.twins(INT4, "gate_up", [FAST], H200))


def test_kernels_that_are_compiled_apart() -> None:
    def of(gemm: Any, tokens: int) -> Any:
        return builds.variant(KIMI, (gemm, FAST, tokens))

    assert of("gate_up", 1) != of("gate_up", 2), "eight pairs do not divide by 16"
    assert of("gate_up", 2) == of("gate_up", 16) == of("gate_up", 64)
    assert of("down", 64) != of("down", 96), "upstream lets the next kernel start early up to 512 rows"


# Routing


def test_each_token_has_distinct_experts_and_all_experts_their_turn() -> None:
    ids, weights = routing.draw(512, 384, 8, torch.Generator().manual_seed(1))
    assert all(len(set(row)) == 8 for row in ids.tolist())
    counts = torch.bincount(ids.flatten().long(), minlength=384)
    assert counts.max() < 40, "ten or so each, not all to the same ones"
    torch.testing.assert_close(weights.sum(1), torch.ones(512))


@given(st.integers(1, 40), st.sampled_from([16, 32]), st.integers(0, 5))
def test_sorted_by_expert_in_whole_blocks(tokens: int, block: int, number: int) -> None:
    work = routing.work(tokens, 24, 4, block, number, 1, torch.device("cpu"))
    flat, padded = work.ids.flatten().tolist(), int(work.padded)
    assert padded % block == 0
    order = work.order[:padded].tolist()
    assert sorted(place for place in order if place < len(flat)) == list(range(len(flat)))
    for at, place in enumerate(order):
        assert place == len(flat) or flat[place] == work.experts[at // block]


def test_a_draw_is_the_same_for_each_block_size() -> None:
    one, other = (routing.work(8, 24, 4, block, 3, 1, torch.device("cpu")) for block in (16, 32))
    assert torch.equal(one.ids, other.ids)
    assert not torch.equal(one.ids, routing.work(8, 24, 4, 16, 4, 1, torch.device("cpu")).ids)
