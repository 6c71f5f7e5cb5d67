"""`tune moe` on upstream's real kernel, interpreted on the CPU by `moe_kernel.py`: values, stages, going on, lookup."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_patches.tune.moe.choose import TOLERANCE
from sglang_patches.tune.moe.geometry import Dtype


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tune")
    command = [sys.executable, str(Path(__file__).with_name("moe_kernel.py")), str(folder)]
    # What other tests' modules set when they are collected; here always, so that it is not by the order of tests.
    env = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.parametrize("dtype", ["float16", "int4_w4a16", "fp8_w8a8"])
def test_the_check_against_float32_passes_right_results_only(found: dict[str, Any], dtype: Dtype) -> None:
    errors = found["errors"][dtype]
    assert errors["gate_up"] < TOLERANCE[dtype]
    assert errors["down"] < TOLERANCE[dtype]
    assert errors["gate_up of another layer"] > 0.5


def test_all_stages_run_and_each_token_count_has_a_result(found: dict[str, Any]) -> None:
    assert {"plan", "facts", "begin", "screen", "check", "final", "done"} <= set(found["flow"]["records"])
    assert found["flow"]["lines"] == [1, 2]
    assert all(found["flow"]["candidates"])
    assert found["flow"]["names"] == {
        "gate_up": "E=4,N=64,device_name=CPU.json",
        "down": "E=4,N=64,device_name=CPU_down.json",
    }


def test_the_same_command_again_measures_nothing(found: dict[str, Any]) -> None:
    assert found["flow"]["again"] == ["done", "facts"]


def test_what_was_measured_tells_when(found: dict[str, Any]) -> None:
    assert found["flow"]["timed"] == ["check", "final", "layer", "screen"]


def test_what_another_triton_measured_is_not_gone_on_with(found: dict[str, Any]) -> None:
    assert found["flow"]["place"] == ["device", "sglang", "triton"]
    assert "triton '3.1.0', now '" in found["flow"]["elsewhere"]
    assert found["flow"]["elsewhere is as it was"]


def test_a_configuration_that_ended_its_process_is_out(found: dict[str, Any]) -> None:
    assert "process ended" in found["flow"]["out"]
    assert found["flow"]["died"] not in found["flow"]["finalists"]


def test_upstream_finds_the_tables_and_keeps_its_own_choice_behind_them(found: dict[str, Any]) -> None:
    assert found["lookup"]["ours at"] == [1, 2, 3]
    assert found["lookup"]["as without at"] == [4, 5, 6, 4096]
    assert found["lookup"]["differs"] < 0.01


def test_a_table_that_upstream_does_not_find_is_an_error(found: dict[str, Any]) -> None:
    assert found["lookup"]["missing"] == "PatchError"
