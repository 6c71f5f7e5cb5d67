"""`bench verify-step` on the bundled pair: one real engine, its rows against the weight files, and continuing."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from .server import REPO

TARGET, DRAFT = REPO / "test/models/tiny-kimi", REPO / "test/models/tiny-kimi-eagle3"
COMMAND = [
    sys.executable, "-m", "sglang_patches.cli", "bench", "verify-step", "--draft-tokens", "4", "--no-plain",
    "--batch-sizes", "1,2", "--contexts", "32,96", "--rounds", "1", "--tokens", "24",
    "--model", str(TARGET), "--draft", str(DRAFT),
]  # fmt: skip
FLOAT32 = 4


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    words = [*COMMAND, "--out", str(folder)]
    return subprocess.run(words, cwd=REPO, env=environ, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("results") / "tiny"
    done = run(place)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return place


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def cells(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "cells.json").read_text())


def numbers(checkpoint: Path) -> dict[str, int]:
    """Numbers in each tensor of a checkpoint."""
    with safe_open(str(checkpoint / "model.safetensors"), "pt") as file:
        return {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def test_every_cell_has_cycles_context_and_a_floor(result: dict[str, Any], cells: dict[str, Any]) -> None:
    rows = cells["rows"]
    assert [(row["context"], row["batch_size"], row["mode"]) for row in rows] == [
        (32, 1, "eager"), (32, 2, "eager"), (96, 1, "eager"), (96, 2, "eager"),
    ]  # fmt: skip
    for row in rows:
        assert row["cycles"] >= 3
        assert min(part["ms"] for part in row["parts"].values()) > 0
        assert row["parts"]["cycle"]["times_floor"] > 1
        assert row["context"] <= row["contexts"][0] <= row["contexts"][1] <= row["context"] + 24
        assert row["prefilled"] <= 2  # the rest came from the radix cache
        assert 2 <= row["experts_per_layer"] <= 8
    assert [row["cycle"] for row in result["analysis"]["rows"]] == [row["parts"]["cycle"]["ms"] for row in rows]


def test_the_samples_are_the_rows(folder: Path, result: dict[str, Any]) -> None:
    records = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    samples = [record for record in records if record["record"] == "cycles"]
    assert sum(row["cycles"] for row in result["analysis"]["rows"]) == sum(len(s["ms"]["cycle"]) for s in samples)
    for sample in samples:
        for at, whole in enumerate(sample["ms"]["cycle"]):
            parts = [values[at] for name, values in sample["ms"].items() if name != "cycle"]
            assert sum(parts) == pytest.approx(whole, abs=0.001)


def test_bytes_are_those_of_the_weight_files(folder: Path) -> None:
    records = map(json.loads, (folder / "samples.jsonl").read_text().splitlines())
    facts = next(record["facts"] for record in records if record["record"] == "engine")
    draft = numbers(DRAFT)
    whole = sum(size for name, size in draft.items() if name not in ("d2t", "t2d"))
    assert facts["models"]["draft"]["captured_states"] == draft["fc.weight"] * FLOAT32
    assert facts["models"]["draft"]["dense"] == (whole - draft["fc.weight"]) * FLOAT32
    target = numbers(TARGET)
    text = {name: size for name, size in target.items() if "language_model" in name and "embed_tokens" not in name}
    config = json.loads((TARGET / "config.json").read_text())["text_config"]
    expert = sum(size for name, size in text.items() if ".layers.1.mlp.experts.0." in name)
    assert expert == 3 * 112 * 256
    # Upstream pads an expert's 112 to 128 on a CPU, and reads that.
    padding = 3 * 16 * 256
    assert facts["models"]["target"]["experts"] == {
        str(layer): (expert + padding) * FLOAT32 for layer in range(1, config["num_hidden_layers"])
    }
    dense = sum(size for name, size in text.items() if ".experts." not in name)
    assert facts["models"]["target"]["dense"] == (dense + 11 * padding) * FLOAT32
    assert facts["models"]["target"]["kv_token"] == 12 * (72 + 32) * FLOAT32


def test_kernels_and_code_state_are_told(folder: Path, result: dict[str, Any], cells: dict[str, Any]) -> None:
    profiles = cells["profiles"]
    assert [(profile["batch_size"], profile["context"]) for profile in profiles] == [(1, 32), (1, 96), (2, 32)]
    for profile in profiles:
        assert "aten::mm" in {kernel["name"] for kernel in profile["kernels"]}
    on = {patch["name"] for patch in result["document"]["code"]["patches"] if patch["on"]}
    assert "cpu-eagle3" in on
    assert [process["name"] for process in result["document"]["processes"]] == ["engine", "dp 0 pp 0 tp 0"]
    text = (folder / "README.md").read_text()
    assert result["headline"] in text
    assert "sglang-patches bench verify-step --draft-tokens 4" in text


def test_what_is_measured_is_not_measured_again(folder: Path) -> None:
    before = (folder / "samples.jsonl").read_bytes()
    begun = time.monotonic()
    again = run(folder)
    assert again.returncode == 0, again.stderr[-2000:]
    assert "1 of 1 engines are measured already" in again.stdout
    assert time.monotonic() - begun < 30
    assert (folder / "samples.jsonl").read_bytes() == before
