"""`tune moe` apart from the kernel: samples, the choice, the tables, processes, the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_made import COMMITTED, FAST, KIMI, OWN, SLOW, cell, facts, layers, measured_by_two
from typer.testing import CliRunner

from sglang_patches.errors import PatchError
from sglang_patches.tune.app import app
from sglang_patches.tune.moe import choose, journal, parent, tables
from sglang_patches.tune.moe.geometry import GEMMS
from sglang_patches.tune.moe.journal import Known
from sglang_patches.tune.moe.space import Config


@pytest.fixture
def measured(tmp_path: Path) -> parent.Request:
    return measured_by_two(tmp_path)


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


# Processes


@given(st.integers(1, 12), st.integers(1, 10))
def test_every_token_count_is_on_one_gpu(tokens: int, gpus: int) -> None:
    parts = parent.shares(range(tokens), gpus)
    assert [token for part in parts for token in part] == list(range(tokens))
    assert all(parts)
    assert len(parts) == min(tokens, gpus)


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


def test_a_finished_folder_is_written_again_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command there finds nothing to measure: neither time nor code state are those of now."""
    made_by = iter([{"time": f"2026-0{month}-01", "command": ["tune", "moe", str(month)]} for month in range(1, 9)])
    monkeypatch.setattr("sglang_patches.tune.app._provenance", lambda: next(made_by))

    def run(measure: Callable[[Path], object]) -> dict[str, bytes]:
        monkeypatch.setattr(parent, "measure", lambda request: measure(request.out))
        done = CliRunner().invoke(app, ["moe", "--cpu", "--out", str(tmp_path), "--tokens", "1,8,16"])
        assert done.exit_code == 0, done.output
        return {file.name: file.read_bytes() for file in tmp_path.glob("*.*") if file.suffix in (".json", ".md")}

    def goes_on(out: Path) -> None:
        journal.append(out / "samples-0.jsonl", {"record": "facts", **journal.read(out / "samples-0.jsonl")[0]})
        journal.append(out / "samples-0.jsonl", {"record": "done"})

    first = run(measured_by_two)
    assert sorted(first) == ["README.md", "tiles.json"]
    assert json.loads(first["tiles.json"])["when"] == "2026-01-01"
    assert run(goes_on) == first
    more = run(lambda out: journal.append(out / "samples-0.jsonl", journal.timed(cell("screen", OWN, us=[1.0]))))
    told = json.loads(more["tiles.json"])
    assert told["provenance"]["command"][-1] == "2"
    assert told["when"] == journal.read(tmp_path / "samples-0.jsonl")[-1]["at"]


def test_without_a_gpu_it_says_how_to_try_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = CliRunner().invoke(app, ["moe", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "--cpu" in done.output
