"""moe-config-tables: through upstream's own lookup, with the patch's lines in it, on a GPU that nobody has."""

from __future__ import annotations

import errno
import json
import os
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import triton
from sglang.srt.runtime_context import get_context

from sglang_patches import hunks, series, upstream
from sglang_patches.runtime import _outcome, moe_config_tables
from sglang_patches.runtime.moe_config_tables import BadTable

PATH = "sglang/srt/layers/moe/moe_runner/triton_utils/fused_moe_triton_config.py"
VERSION = f"triton_{triton.__version__.replace('.', '_')}"
UP = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 256, "GROUP_SIZE_M": 1, "num_warps": 2, "num_stages": 4}
DOWN = {**UP, "BLOCK_SIZE_N": 128, "USE_TMA": True}
MEASURED = Path(__file__).parents[2] / "benchmark/results/h200-moe-tune"
NAME = "E=384,N=256,device_name=Imagined_GPU.json"


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    installed = upstream.locate()
    assert installed is not None
    insertions = series.load(installed.release)["moe-config-tables"].insertions[PATH]
    lines = installed.read(PATH)
    assert lines is not None
    text = hunks.apply(lines, insertions, PATH)
    module = types.ModuleType("fused_moe_triton_config_with_our_lines")
    module.__dict__["__file__"] = str(installed.path(PATH))
    exec(compile(text, str(installed.path(PATH)), "exec"), vars(module))
    monkeypatch.setattr(module, "get_device_name", lambda: "Imagined GPU")
    for kept in (moe_config_tables._served, moe_config_tables._lookups):
        kept.clear()  # type: ignore[attr-defined]
    with get_context().override_server_args():
        yield module
    _outcome._recorded.pop(moe_config_tables.PATCH, None)


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Puts a table where the variable says; ours by default."""

    def make(name: str, table: Any, variable: str = moe_config_tables.FOLDER, version: str = VERSION) -> Path:
        root = tmp_path / variable
        file = root / "configs" / version / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(table if isinstance(table, str) else json.dumps(table))
        monkeypatch.setenv(variable, str(root))
        return file

    return make


def taken(module: Any, tokens: int = 4, experts: int = 384) -> tuple[Any, Any]:
    """What upstream takes for gate_up and for down: experts of width 256 in bfloat16."""
    shapes = (experts, 512, 7168), (experts, 7168, 256)
    config, (down, _) = module.try_get_optimal_moe_config(*shapes, 8, None, tokens, return_down_config=True)
    return config, down


def told() -> dict[str, Any]:
    return _outcome.outcomes()[moe_config_tables.PATCH]


def test_our_tables_serve_where_upstream_has_none(patched: Any, put: Callable[..., Path]) -> None:
    file = put(NAME, {"1": {**UP, "num_stages": 5}, "8": UP})
    put(NAME.replace(".json", "_down.json"), {"1": DOWN, "8": DOWN})
    assert taken(patched, 7) == (UP, DOWN)
    assert taken(patched, 2)[0] == {**UP, "num_stages": 5}
    assert told()["result"] == "applied"
    assert told()["lookups"]["E=384,N=256"] == {"result": "applied", "table": str(file)}
    assert told()["lookups"]["E=384,N=256_down"]["result"] == "applied"


def test_without_ours_for_down_it_takes_ours_for_gate_and_up_as_upstream_does(
    patched: Any, put: Callable[..., Path]
) -> None:
    put(NAME, {"8": {**UP, "USE_TMA": True}})
    assert taken(patched)[1] == {**UP, "USE_TMA": True}


def test_no_table_of_ours_is_upstream(patched: Any) -> None:
    config, down = taken(patched)
    assert config == patched.get_default_config(4, 384, 256, 7168, 8, None, False)
    assert down is None
    assert told()["result"] == "not needed"
    assert f"no table {NAME}" in told()["detail"]
    assert "tune moe" in told()["detail"]


def test_upstreams_own_table_stands(patched: Any, put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patched, "get_device_name", lambda: "NVIDIA H200")
    for name in ("E=512,N=256,device_name=NVIDIA_H200.json", "E=512,N=256,device_name=NVIDIA_H200_down.json"):
        put(name, {"4": {**DOWN, "num_stages": 7}})
    config, down = taken(patched, experts=512)
    assert 7 not in (config["num_stages"], down["num_stages"])
    assert told()["result"] == "not needed"
    assert "has its own" in told()["lookups"]["E=512,N=256"]["reason"]
    # Its table for gate and up serves down too, and none of ours comes between.
    assert "without ours" in told()["lookups"]["E=512,N=256_down"]["reason"]


def test_the_users_table_stands(patched: Any, put: Callable[..., Path]) -> None:
    put(NAME, {"4": {**UP, "num_stages": 2}}, "SGLANG_MOE_CONFIG_DIR")
    put(NAME, {"4": UP})
    put(NAME.replace(".json", "_down.json"), {"4": DOWN})
    config, down = taken(patched)
    assert config["num_stages"] == down["num_stages"] == 2
    assert told()["result"] == "not needed"


def test_a_table_for_another_triton_is_not_taken(patched: Any, put: Callable[..., Path]) -> None:
    put(NAME, {"4": UP}, version="triton_3_1_0")
    assert taken(patched)[0] != UP
    assert "only in triton_3_1_0" in told()["detail"]


def test_the_name_of_a_block_shape_is_found_too(patched: Any, put: Callable[..., Path]) -> None:
    name = "E=384,N=256,device_name=Imagined_GPU,dtype=fp8_w8a8,block_shape=[128, 128].json"
    put(name, {"4": UP}, version="triton_3_1_0")
    assert patched.get_moe_configs(384, 256, "fp8_w8a8", 128, 128) is None
    assert "only in triton_3_1_0" in told()["detail"]
    put(name, {"4": UP})
    patched.get_moe_configs.cache_clear()
    assert patched.get_moe_configs(384, 256, "fp8_w8a8", 128, 128) == {4: UP}


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ("{", "no table"),
        ("[]", "no table"),
        ({}, "no entry"),
        ({"four": UP}, "no table"),
        ({"4": 16}, "expected an object"),
        ({"4": {**UP, "BLOCK_SIZE_M": 0}}, "BLOCK_SIZE_M is 0"),
        ({"4": {**UP, "BLOCK_SIZE_M": 48}}, "BLOCK_SIZE_M is 48, expected a power of two"),
        ({"4": {**UP, "BLOCK_SIZE_N": 96}}, "BLOCK_SIZE_N is 96, expected a power of two"),
        ({"4": {**UP, "BLOCK_SIZE_K": 3}}, "BLOCK_SIZE_K is 3, expected a power of two"),
        ({"4": {**UP, "num_warps": 0}}, "num_warps is 0, expected a power of two"),
        ({"4": {**UP, "BLOCK_SIZE_K": None}}, "BLOCK_SIZE_K is None"),
        ({"4": {**UP, "waves_per_eu": 2}}, "waves_per_eu is 2"),
        ({"4": {**UP, "USE_TMA": 1}}, "USE_TMA is 1"),
    ],
)
def test_a_broken_table_is_told_and_upstreams_choice_serves(
    patched: Any, put: Callable[..., Path], table: Any, why: str
) -> None:
    file = put(NAME, table)
    with pytest.raises(BadTable, match=why):
        moe_config_tables.read(file)
    assert taken(patched)[0] == patched.get_default_config(4, 384, 256, 7168, 8, None, False)
    assert told()["result"] == "failed"
    assert str(file) in told()["detail"]
    assert why in told()["detail"]


def test_a_folder_without_tables_is_told(patched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tune moe` writes none where nothing is faster."""
    monkeypatch.setenv(moe_config_tables.FOLDER, str(tmp_path))
    taken(patched)
    assert told()["result"] == "not needed"
    assert f"{tmp_path} has no folder configs" in told()["detail"]


def refused(patched: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """Told at start, at a lookup that comes to the folder and at one that does not; each time upstream's serves."""

    def check() -> None:
        assert told()["result"] == "failed"
        for word in (moe_config_tables.FOLDER, *words):
            assert word in told()["detail"]

    moe_config_tables.tells(lambda E, N, dtype: None)
    check()
    assert "lookups" not in told()
    assert taken(patched)[0] == patched.get_default_config(4, 384, 256, 7168, 8, None, False)
    assert told()["lookups"]["E=384,N=256"]["result"] == "failed"
    check()
    moe_config_tables._lookups.clear()
    monkeypatch.setattr(patched, "get_device_name", lambda: "NVIDIA H200")
    taken(patched, experts=512)
    assert {of["result"] for of in told()["lookups"].values()} == {"not needed"}
    check()


def test_a_folder_that_is_not_there_is_told_at_start(
    patched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(moe_config_tables.FOLDER, str(tmp_path / "nowhere"))
    refused(patched, monkeypatch, "No such file or directory", str(tmp_path / "nowhere"))


def test_a_file_in_place_of_the_folder_is_told(patched: Any, put: Callable[..., Path], monkeypatch: Any) -> None:
    monkeypatch.setenv(moe_config_tables.FOLDER, str(put(NAME, {"4": UP})))
    refused(patched, monkeypatch, "is no folder")


@pytest.mark.parametrize("closed", [0, 1, 2, 3])
def test_a_folder_that_may_not_be_searched_does_not_end_the_server(
    patched: Any, put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, closed: int
) -> None:
    """The folder of the release, `configs`, the named folder, and the one around it."""
    folder, stat = put(NAME, {"4": UP}).parents[closed], os.stat

    def denied(path: Any, *args: Any, **more: Any) -> os.stat_result:
        if isinstance(path, (str, Path)) and folder in Path(path).parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *args, **more)

    monkeypatch.setattr(os, "stat", denied)
    refused(patched, monkeypatch, "Permission denied", f"user {os.geteuid()}")


def test_a_table_that_may_not_be_read_does_not_end_the_server(
    patched: Any, put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = put(NAME, {"4": UP})

    def denied(_: Path) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    for name in ("read", "_roots"):
        with monkeypatch.context() as patch:
            patch.setattr(moe_config_tables, name, denied if name == "read" else lambda: denied(file))
            patched.get_moe_configs.cache_clear()
            assert patched.get_moe_configs(384, 256, None) is None
        assert told()["result"] == "failed"
        assert "Permission denied" in told()["detail"]


def test_deterministic_inference_takes_none(patched: Any, put: Callable[..., Path]) -> None:
    put(NAME, {"4": UP})
    with get_context().override_server_args(enable_deterministic_inference=True):
        assert patched.get_moe_configs(384, 256, None) is None
    assert "deterministic" in told()["detail"]


def test_ours_for_the_h200_are_found(patched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the lane's Triton, at each token count what was measured, behind those what upstream takes without a table."""
    monkeypatch.setattr(patched, "get_device_name", lambda: "NVIDIA H200")
    rows = json.loads((MEASURED / "tiles.json").read_text())["rows"]
    assert [row["tokens"] for row in rows] == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    for row in rows:
        config, down = taken(patched, row["tokens"])
        assert config == row["chosen"]["gate_up"], "another Triton: tune again"
        # Upstream hands TMA of gate and up to the launch apart from the tiles.
        assert down == row["chosen"]["down"]
    lookups = told()["lookups"]
    for label in ("E=384,N=256", "E=384,N=256_down"):
        assert lookups[label]["result"] == "applied"
        assert Path(lookups[label]["table"]).is_relative_to(moe_config_tables.SHIPPED)
    for tokens in (66, 384, 385, 4096):
        assert taken(patched, tokens)[0] == patched.get_default_config(tokens, 384, 256, 7168, 8, None, False)


def test_what_we_ship_is_what_was_measured() -> None:
    files = list(moe_config_tables.SHIPPED.glob("configs/triton_*/*.json"))
    measured = {file.relative_to(MEASURED): file.read_text() for file in MEASURED.glob("configs/*/*.json")}
    assert {file.relative_to(moe_config_tables.SHIPPED): file.read_text() for file in files} == measured


def test_the_tables_that_we_ship_can_be_read_and_come_in_pairs() -> None:
    files = list(moe_config_tables.SHIPPED.glob("configs/triton_*/*.json"))
    assert files
    for file in files:
        table = moe_config_tables.read(file)
        other = file.with_name(file.name.replace("_down.json", ".json").replace(".json", "_down.json"))
        assert set(table) == set(moe_config_tables.read(other)), file
        assert max(table) > 64, "behind what was measured stands upstream's choice"
