"""`tune moe` apart from the kernel: sizes, pruning, samples, the choice, the tables, processes, the command line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from sglang_patches.errors import PatchError
from sglang_patches.tune.app import app
from sglang_patches.tune.moe import builds, choose, journal, parent, report, routing, space, tables
from sglang_patches.tune.moe.geometry import GEMMS, Geometry, from_document, kimi_k25, of_model
from sglang_patches.tune.moe.journal import Known
from sglang_patches.tune.moe.space import Config, Device

COMMITTED = Path(__file__).parents[2] / "benchmark/results/h200-moe-tune"
COMMITTED_TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
KIMI = kimi_k25()
INT4 = Geometry(384, 7168, 256, 8, "int4_w4a16", (0, 32))
FP8 = Geometry(384, 7168, 256, 8, "fp8_w8a8", (128, 128))
H200 = Device(132, 227 << 10, 228 << 10, 4.1e12, 50 << 20, True)
ADA = Device(142, 99 << 10, 100 << 10, 0.9e12, 96 << 20, False)
OWN = Config(16, 32, 64, 1, 0, 0)
FAST, SLOW = Config(16, 32, 256, 1, 2, 4), Config(16, 64, 128, 1, 4, 3)
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


# Samples


def test_a_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    journal.append(file, {"record": "plan"})
    with file.open("a") as handle:
        handle.write('{"record":"scr')
    journal.append(file, {"record": "done"})
    assert [record["record"] for record in journal.read(file)] == ["plan", "done"]


def test_another_plan_is_refused(tmp_path: Path) -> None:
    plan = {"record": "plan", "seed": 1}
    assert not journal.check_plan(tmp_path, [], plan)
    assert journal.check_plan(tmp_path, [plan], plan)
    with pytest.raises(PatchError, match="seed 1, now 2"):
        journal.check_plan(tmp_path, [plan], {**plan, "seed": 2})


def cell(record: str, config: Config, gemm: str = "down", tokens: int = 1, **more: Any) -> dict[str, Any]:
    return {"record": record, "gemm": gemm, "tokens": tokens, "config": str(config), **more}


def test_what_is_out_is_out_at_every_token_count_of_its_product() -> None:
    records = [
        cell("begin", OWN), cell("screen", OWN, us=[1.0]),
        cell("begin", FAST),
        cell("failed", SLOW, tokens=16, why="out of shared memory"),
        cell("check", replace(OWN, tma=True), error=0.3), cell("check", OWN, error=0.004),
        cell("check", replace(OWN, stages=2), error=float("inf")),
    ]  # fmt: skip
    known = Known(records)
    assert known.bad("down", OWN, 0.02) == ""
    assert "process ended" in known.bad("down", FAST, 0.02)
    assert known.bad("down", SLOW, 0.02) == "at 16 tokens: out of shared memory"
    assert known.bad("gate_up", SLOW, 0.02) == ""
    assert "0.3 from float32" in known.bad("down", replace(OWN, tma=True), 0.02)
    assert known.bad("down", replace(OWN, stages=2), 0.02)
    assert known.of("down", 1) == {OWN: [1.0]}
    assert Known([*records[:3], {"record": "interrupted"}]).bad("down", FAST, 0.02) == ""


# The choice


def test_anchors_and_neighbours() -> None:
    assert choose.anchors([1, 2, 4, 8, 16, 24, 32, 48, 64]) == [1, 16, 64]
    assert choose.anchors([4]) == [4]
    assert choose.near(24, [1, 16, 64]) == [16, 64]
    assert choose.near(16, [1, 16, 64]) == [16]
    assert choose.near(96, [1, 16, 64]) == [64]


def test_the_best_of_each_block_m_go_on() -> None:
    wide = replace(SLOW, block_m=64)
    samples = {FAST: [1.0, 9.0, 1.0], SLOW: [2.0], OWN: [3.0], wide: [9.0]}
    assert choose.best(samples, 2) == [FAST, SLOW, wide]


def test_both_products_share_block_m() -> None:
    wide = replace(SLOW, block_m=64)
    times: Any = {"gate_up": {FAST: [10.0], wide: [7.0]}, "down": {SLOW: [5.0], wide: [9.0]}}
    found = choose.pair(times, {"gate_up": OWN, "down": OWN})
    assert found == choose.Pair(FAST, SLOW, 15.0), "15 together, though 7 and 5 would be less"
    assert choose.pair({"gate_up": {FAST: [1.0]}, "down": {wide: [1.0]}}, {"gate_up": OWN, "down": OWN}) is None


def test_upstreams_own_stays_where_it_is_as_fast() -> None:
    times: Any = {"gate_up": {FAST: [10.0], OWN: [10.05]}, "down": {FAST: [10.0], OWN: [10.2]}}
    assert choose.pair(times, {"gate_up": OWN, "down": OWN}) == choose.Pair(OWN, FAST, 20.05)


def test_only_configurations_with_all_rounds_count() -> None:
    records = [{"us": {"down": {str(FAST): [3.0, 1.0, 2.0], str(SLOW): [1.0]}}}, {"us": {"down": {str(FAST): [4.0]}}}]
    assert choose.by_round(records, "down") == {FAST: [2.0, 4.0]}


def layers(*pairs: tuple[float, float], tokens: int = 1, **more: Any) -> list[dict[str, Any]]:
    return [
        {"record": "layer", "tokens": tokens, "us": {"upstream": [theirs], "tuned": [ours]}, "differs": 0.0, **more}
        for theirs, ours in pairs
    ]


def test_ours_goes_in_where_the_layer_is_faster_beyond_chance() -> None:
    better = choose.verdict(layers((50, 40), (51, 41), (50, 39.9)), 9)
    assert better is not None
    assert better.ours
    assert better.ratio.value == pytest.approx(0.8, abs=0.01)
    chance = choose.verdict(layers((50, 40), (50, 52), (50, 47)), 9)
    assert chance is not None
    assert not chance.ours
    assert choose.verdict([]) is None
    assert not choose.verdict(layers((50, 1))).ours, "one round tells nothing"  # type: ignore[union-attr]


# Tables


@given(st.integers(1, 600), st.integers(8, 512), st.lists(st.integers(1, 5000), max_size=5))
def test_behind_what_was_measured_upstream_chooses(largest: int, experts: int, own: list[int]) -> None:
    """A lookup by the nearest key, as upstream does it, takes an entry of ours up to `largest` + 1 tokens."""

    def upstream(tokens: int) -> Config:  # without a table
        return OWN if tokens <= experts else Config(64, 64, 32, 8, 0, 0)

    kept = {at: {gemm: upstream(at) for gemm in GEMMS} for at in tables.beyond(largest, experts, own)}
    table = tables.assemble({largest: {"gate_up": FAST, "down": SLOW}}, kept)["gate_up"]
    for tokens in {1, largest, largest + 1, largest + 2, experts, experts + 1, 5000, 9999}:
        entry = table[min(table, key=lambda key: abs(key - tokens))]
        ours = tokens <= largest + 1
        assert entry == (FAST.entry() if ours else upstream(tokens).entry()), tokens


def test_the_files(tmp_path: Path) -> None:
    names: Any = {"gate_up": "E=384,N=256,device_name=X.json", "down": "E=384,N=256,device_name=X_down.json"}
    made = tables.assemble({2: {"gate_up": FAST, "down": replace(SLOW, block_m=64, tma=True)}}, {})
    written = tables.write(tmp_path, "3.8.0", names, made)
    assert [str(file.relative_to(tmp_path)) for file in written] == [
        f"configs/triton_3_8_0/{names[gemm]}" for gemm in GEMMS
    ]
    assert json.loads(written[0].read_text()) == {"2": FAST.entry()}
    assert json.loads(written[1].read_text())["2"] == {**SLOW.entry(), "USE_TMA": True}, "block_m of gate_up"


# Processes and the result


@given(st.integers(1, 12), st.integers(1, 10))
def test_every_token_count_is_on_one_gpu(tokens: int, gpus: int) -> None:
    parts = parent.shares(range(tokens), gpus)
    assert [token for part in parts for token in part] == list(range(tokens))
    assert all(parts)
    assert len(parts) == min(tokens, gpus)


def facts(own: dict[int, Config], kept: dict[int, Config]) -> dict[str, Any]:
    return {
        "record": "facts", "device": "Imagined GPU", "bandwidth": 4e12, "layers": 4, "triton": "3.8.0", "torch": "2",
        "sglang": "0.5.23",
        "names": {"gate_up": "T.json", "down": "T_down.json"},
        "upstream": {str(at): {gemm: str(config) for gemm in GEMMS} for at, config in own.items()},
        "beyond": {str(at): {gemm: str(config) for gemm in GEMMS} for at, config in kept.items()},
    }  # fmt: skip


def final(tokens: int, **us: dict[Config, float]) -> dict[str, Any]:
    told = {gemm: {str(config): [value] for config, value in of.items()} for gemm, of in us.items()}
    return {"record": "final", "tokens": tokens, "round": 0, "us": told}


@pytest.fixture
def measured(tmp_path: Path) -> parent.Request:
    pair = {"gate_up": str(FAST), "down": str(FAST)}
    halves = [
        [
            facts({1: OWN}, {3: OWN}),
            final(1, gate_up={OWN: 20.0, FAST: 12.0}, down={OWN: 10.0, FAST: 7.0}),
            *layers((40, 30), (41, 31), (40, 30.1), pair=pair),
        ],
        [
            facts({8: OWN, 16: OWN}, {18: OWN, 385: SLOW}),
            final(8, gate_up={OWN: 20.0, FAST: 19.0}, down={OWN: 10.0, FAST: 10.0}),
            *layers((40, 39), (40, 41), (40, 40), tokens=8, pair={"gate_up": str(FAST), "down": str(OWN)}),
            final(16, gate_up={OWN: 20.0, FAST: 12.0}, down={OWN: 10.0, FAST: 7.0}),
            cell("failed", SLOW, tokens=8, why="out of shared memory"),
        ],
    ]
    for place, records in enumerate(halves):
        for record in records:
            journal.append(tmp_path / f"samples-{place}.jsonl", record)
    return parent.Request(KIMI, (1, 8, 16), tmp_path, ("0", "1"))


def test_the_result_of_two_gpus(measured: parent.Request) -> None:
    found = parent.result(measured)
    assert [line.tokens for line in found.lines] == [1, 8, 16]
    assert [line.tokens for line in found.better] == [1]
    # At 8 the layer is no faster, at 16 it was not reached: upstream's own stands there, and behind it.
    assert found.tables["gate_up"] == {1: FAST.entry(), **dict.fromkeys((8, 16, 18), OWN.entry()), 385: SLOW.entry()}
    assert found.failed == [f"down {SLOW}: out of shared memory"]
    # 12 us for gate_up of 16 tokens is faster than the copy's 4 TB/s.
    rate = KIMI.active(16) * KIMI.expert_bytes("gate_up") / 12e-6
    assert found.rate.bytes_a_second == pytest.approx(rate)
    assert found.rate.of == f"gate_up at 16 tokens, {FAST}"
    assert found.lines[0].floor_us == pytest.approx(8 * 3 * 256 * 7168 * 2 / rate * 1e6)
    assert found.broken_floors == []


def test_a_floor_above_a_measurement_is_told(measured: parent.Request) -> None:
    """Products alone took 19 us and the layer with ours 1: then bytes, experts or times are reckoned wrong."""
    file = measured.out / "samples-0.jsonl"
    file.write_text(file.read_text().replace('"tuned":[', '"tuned":[0.'))
    found = parent.result(measured)
    assert found.broken_floors == [1]
    report.write(found, {})
    readme = (measured.out / "README.md").read_text()
    assert "At 1 tokens less than that was measured, so there it is no floor" in readme
    assert "| no floor: " in readme
    told = json.loads((measured.out / "tiles.json").read_text())
    assert [row["floor_holds"] for row in told["rows"]] == [False, True, True]


def test_a_copy_that_is_slower_than_reading_is_no_floor() -> None:
    """A run on an H200 noted 2.8 TB/s for a copy, and its own kernels read 4.5."""
    request = parent.Request(KIMI, COMMITTED_TOKENS, COMMITTED, ("0",))
    found = parent.result(request)
    copied = found.facts["bandwidth"]
    assert copied < 2.8e12
    assert 4.4e12 < found.rate.bytes_a_second < 4.8e12, "of the data sheet"
    assert found.broken_floors == []
    assert all(0.5 < line.floor_us / line.verdict.tuned < 1 for line in found.lines if line.verdict)
    by_copy = [replace(line, floor_us=line.floor_us * found.rate.bytes_a_second / copied) for line in found.lines]
    assert not any(line.floor_holds for line in by_copy)


def test_the_committed_result_is_what_its_samples_give(tmp_path: Path) -> None:
    for file in COMMITTED.glob("samples*.jsonl"):
        shutil.copy(file, tmp_path)
    written = json.loads((COMMITTED / "tiles.json").read_text())
    found = parent.result(parent.Request(KIMI, COMMITTED_TOKENS, tmp_path, ("0",)))
    for file in report.write(found, written["provenance"]):
        assert file.read_text() == (COMMITTED / file.relative_to(tmp_path)).read_text()
    assert json.loads((tmp_path / "tiles.json").read_text()) == written
    assert (COMMITTED / "README.md").read_text().startswith((tmp_path / "README.md").read_text())


def test_a_report_keeps_what_measured(measured: parent.Request) -> None:
    command = ["python", "-m", "sglang_patches.cli", "tune", "moe", "--out", "there"]
    report.write(parent.result(measured), {"command": command, "code": "x"})
    kept = report.measured_by(measured.out)
    assert kept is not None
    assert kept["code"] == "x"
    assert "    sglang-patches tune moe --out there\n" in (measured.out / "README.md").read_text()
    assert report.measured_by(measured.out / "configs") is None


def test_the_folder(measured: parent.Request) -> None:
    found = parent.result(measured)
    written = report.write(found, {"code": "x"})
    assert [file.name for file in written] == ["T.json", "T_down.json"]
    readme = (measured.out / "README.md").read_text()
    assert "0.75" in readme
    assert "| 16 | - | - | not reached |" in readme
    told = json.loads((measured.out / "tiles.json").read_text())
    assert [row["ours"] for row in told["rows"]] == [True, False, False]
    assert told["provenance"] == {"code": "x"}


def test_outputs_that_differ_keep_ours_out(measured: parent.Request) -> None:
    file = measured.out / "samples-0.jsonl"
    file.write_text(file.read_text().replace('"differs":0.0', '"differs":0.05', 1))
    assert parent.result(measured).better == []


def test_without_a_gain_there_is_no_table(measured: parent.Request) -> None:
    (measured.out / "samples-0.jsonl").unlink()
    found = parent.result(measured)
    assert found.tables == {}
    assert report.write(found, {}) == []
    # One token count was compared and lost, the other was not reached: that is no finding yet.
    assert report.headline(found) == "Not measured far enough to tell at 16 tokens: there is no table yet."
    readme = (measured.out / "README.md").read_text()
    assert "## Why there is no table\n\n- at 16 tokens: ours is faster by its single products, and the whole" in readme
    assert "- at 8 tokens: the whole layer is not faster with ours beyond chance" in readme
    assert "larger `--seconds` than 240" in readme
    assert "the tables hold" not in readme


def one_count(folder: Path, final_: dict[str, Any], *layers_: dict[str, Any]) -> Any:
    """The result of samples of one token count."""
    for record in (facts({1: OWN}, {3: OWN}), final_, *layers_):
        journal.append(folder / "samples.jsonl", record)
    return parent.result(parent.Request(KIMI, (1,), folder, ("0",)))


FASTER = {"gate_up": {OWN: 20.0, FAST: 12.0}, "down": {OWN: 10.0, FAST: 7.0}}
SLOWER = {"gate_up": {OWN: 12.0, FAST: 20.0}, "down": {OWN: 7.0, FAST: 10.0}}
BOTH = {"gate_up": str(FAST), "down": str(FAST)}


@pytest.mark.parametrize(
    ("us", "times", "differs", "headline", "said"),
    [
        ({}, [], 0.0, "Not measured far enough", "no pair of configurations was measured"),
        (SLOWER, [], 0.0, "not beaten", "upstream's own choice is the fastest that was found"),
        (FASTER, [(40, 30)], 0.0, "Not measured far enough", "the whole layer was not measured often enough"),
        (FASTER, [(40, 41), (40, 39), (40, 40)], 0.0, "not beaten", "do not name this one"),
        (FASTER, [(40, 30), (41, 31), (40, 30.1)], 0.5, "gives other outputs", "`outputs_differ` in tiles.json"),
    ],
)
def test_a_readme_without_a_table_says_why_and_what_to_do(
    tmp_path: Path, us: dict[str, Any], times: list[Any], differs: float, headline: str, said: str
) -> None:
    final_ = final(1, **us) if us else {"record": "begin", "gemm": "down", "tokens": 1, "config": str(FAST)}
    of_layer = [record | {"differs": differs} for record in layers(*times, pair=BOTH)] if times else []
    found = one_count(tmp_path, final_, *of_layer)
    assert report.write(found, {}) == []
    assert headline in report.headline(found)
    readme = (tmp_path / "README.md").read_text()
    assert "## Why there is no table" in readme
    assert said in readme
    assert ("goes on where it was" in readme) == ("far enough" in headline)


def test_a_table_that_later_samples_do_not_bear_is_removed(tmp_path: Path) -> None:
    first = one_count(tmp_path, final(1, **FASTER), *layers((40, 30), (41, 31), (40, 30.1), pair=BOTH))
    written = report.write(first, {})
    assert all(file.exists() for file in written)
    later = one_count(tmp_path, final(1, **FASTER), *layers((30, 40), (31, 41), pair=BOTH))
    assert report.write(later, {}) == []
    assert not any(file.exists() for file in written)


def test_samples_of_other_gpus_are_refused(measured: parent.Request) -> None:
    with pytest.raises(PatchError, match=r"samples-0\.jsonl, samples-1\.jsonl of a run on other GPUs"):
        parent.measure(replace(measured, gpus=("0",)))
    with pytest.raises(PatchError, match="no samples"):
        parent.result(replace(measured, out=measured.out / "empty"))


@pytest.mark.parametrize(
    ("name", "other", "told"),
    [
        ("device", "NVIDIA B200", "device 'Imagined GPU', {} 'NVIDIA B200'"),
        ("triton", "3.9.0", "triton '3.8.0', {} '3.9.0'"),
        ("sglang", "0.5.24", "sglang '0.5.23', {} '0.5.24'"),
    ],
)
def test_samples_of_another_place_are_refused(measured: parent.Request, name: str, other: str, told: str) -> None:
    here = facts({8: OWN}, {18: OWN})
    journal.check_place(measured.out, here)
    with pytest.raises(PatchError, match=told.format("now") + r"\n  remedy     another --out"):
        journal.check_place(measured.out, {**here, name: other})
    journal.append(measured.out / "samples-1.jsonl", {**here, name: other})
    # The last facts are the first file's again: the ones in between count too.
    journal.append(measured.out / "samples-1.jsonl", here)
    with pytest.raises(PatchError, match=f"{name} .*, elsewhere "):
        parent.result(measured)


def test_samples_without_a_release_can_be_reported_and_not_gone_on_with() -> None:
    with pytest.raises(PatchError, match=r"samples\.jsonl: .*: sglang not noted, now '0\.5\.23'"):
        journal.check_place(COMMITTED, {"device": "NVIDIA H200", "triton": "3.8.0", "sglang": "0.5.23"})
    journal.check_place(COMMITTED)


@pytest.mark.parametrize(("codes", "starts"), [([0], 1), ([parent._RESTART, -11, 0], 3)])
def test_a_process_that_a_kernel_took_down_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: list[int], starts: int
) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    begun = run_with(codes, monkeypatch, parent.Request(KIMI, (1, 2), tmp_path, ("5",)))
    assert len(begun) == starts
    assert begun[0]["CUDA_VISIBLE_DEVICES"] == "5"
    assert begun[0]["SGLANG_PATCHES"] == "none", "upstream as it is"
    assert "SGLANG_USE_CPU_ENGINE" not in begun[0], "without patches there is no sgl_kernel for it"


def test_a_process_that_fails_otherwise_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PatchError, match="ended with code 1"):
        run_with([1], monkeypatch, parent.Request(KIMI, (1,), tmp_path, ("0",)))
    with pytest.raises(PatchError, match=f"code {parent._RESTART}"):
        run_with([parent._RESTART] * 9, monkeypatch, parent.Request(KIMI, (1,), tmp_path, ("0",)))


def run_with(codes: list[int], monkeypatch: pytest.MonkeyPatch, request: parent.Request) -> list[dict[str, str]]:
    """`measure` with processes that end so; returns the environment of each."""
    left, begun = iter(codes), []

    class Process:
        def __init__(self, _arguments: list[str], env: dict[str, str]) -> None:
            begun.append(env)
            self.code = next(left)

        def wait(self, timeout: float | None = None) -> int:
            return self.code

        def terminate(self) -> None: ...

    monkeypatch.setattr(parent.subprocess, "Popen", Process)
    parent.measure(request)
    return begun


# The command


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--tokens", "0"], "--tokens '0'"),
        (["--tokens", "1;2"], "--tokens '1;2'"),
        (["--dtype", "int3"], "--dtype int3"),
        (["--dtype", "fp8_w8a8"], "block shape None"),
        (["--dtype", "fp8_w8a8", "--block-shape", "128"], "--block-shape 128"),
        (["--experts", "8"], "sizes in part"),
        (["--model", "nowhere"], "--model nowhere: no folder has that name"),
        (["--model", "./nowhere"], "--model ./nowhere: there is no such folder"),
        (["--report"], "no samples"),
    ],
)
def test_what_it_refuses(tmp_path: Path, arguments: list[str], why: str) -> None:
    done = CliRunner().invoke(app, ["moe", "--cpu", "--out", str(tmp_path / "out"), *arguments])
    assert done.exit_code == 2
    assert why in done.output


def test_without_a_gpu_it_says_how_to_try_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = CliRunner().invoke(app, ["moe", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "--cpu" in done.output
