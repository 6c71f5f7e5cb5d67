"""Results name no GPU by its UUID, committed ones neither, and two of one GPU can still be told to be that."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sglang_patches.document import diff
from sglang_patches.document.schema import Document, Gpu
from sglang_patches.document.unnamed import name, unnamed

from .documents import made

REPO = Path(__file__).parents[2]
A, B = "GPU-8f3e1c2a-0b1d-4e5f-8a9b-0c1d2e3f4a5b", "GPU-00000000-0b1d-4e5f-8a9b-0c1d2e3f4a5b"


def test_a_uuid_is_a_digest_wherever_it_is() -> None:
    told = unnamed({"gpus": [{"uuid": A}, {"uuid": B}], "environment": {"CUDA_VISIBLE_DEVICES": f"{A.upper()},{B}"}})
    one, other = name(A), name(B)
    assert re.fullmatch("gpu:[0-9a-f]{12}", one)
    assert one != other
    assert told == {
        "gpus": [{"uuid": one}, {"uuid": other}],
        "environment": {"CUDA_VISIBLE_DEVICES": f"{one},{other}"},
    }
    assert unnamed(told) == told, "once more changes nothing"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (f"MIG-{A}/1/0", "gpu:"),
        (A.replace("GPU", "MIG"), "gpu:"),
        ("GPU-8f3e1c2a", "***"),  # abbreviations, which CUDA accepts
        ("GPU-8f3e1c", "***"),
        ("GPU-8f3e,GPU-8f3e1c2a-0b", "***,***"),
        ("GPU-2 of 8, GPU-127, GPU-bound, GPU-accelerated, MIG-1g.10gb", None),
        (3, None),
        (None, None),
    ],
)
def test_other_forms(given: Any, told: str | None) -> None:
    found = unnamed(given)
    assert unnamed(found) == found, "once more changes nothing"
    assert found == given if told is None else found.startswith(told)
    assert "8f3e" not in str(found)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (f"{A}_trace.json", "{}_trace.json"),
        (f"/tmp/node_{A}/data", "/tmp/node_{}/data"),
        (f"{A}-rank0.log", "{}-rank0.log"),
        (f"--gpus={A.lower()},x", "--gpus={},x"),
        (f"{A}é", "{}é"),
        (f"{A}ab", "***"),  # too long for one
        (f"node{A}", "node***"),
        ("GPU-8f3e1c_trace, node_GPU-8f3e1c", "***_trace, node_***"),
        ("/tmp/GPU-8f3e1c2a/data", "/tmp/***/data"),
        ("GPU-8f3e1c2a-0b1d-4e5f-8a9b-0c1d2e3f_trace", "***_trace"),
    ],
)
def test_what_stands_beside_a_uuid_stays_and_no_digit_does(given: str, told: str) -> None:
    found = unnamed(given)
    assert found == told.format(name(A))
    assert unnamed(found) == found


def test_tuples_and_keys_are_looked_into_and_no_key_is_lost() -> None:
    assert unnamed({A: (A, [(B,)]), 1: None}) == {name(A): (name(A), [(name(B),)]), 1: None}
    assert unnamed({"GPU-8f3e1c": 1, "GPU-9f3e1c": 2, "GPU-af3e1c": 3}) == {"***": 1, "*** (2)": 2, "*** (3)": 3}


def test_uuids_stay_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PATCHES_GPU_UUIDS", "keep")
    assert unnamed([A]) == [A]
    monkeypatch.setenv("SGLANG_PATCHES_GPU_UUIDS", "yes")
    with pytest.raises(ValueError, match="SGLANG_PATCHES_GPU_UUIDS='yes' is not known; it can be keep"):
        unnamed([A])


def test_diff_knows_a_gpu_by_either() -> None:
    def of(uuid: str) -> Document:
        return made(gpus=[Gpu(name="H200", uuid=uuid)])

    assert diff.diff(of(A), of(name(A))) == []
    assert [found.subject for found in diff.diff(of(A), of(name(B)))] == ["the GPUs' UUIDs"]


def test_no_committed_file_names_a_gpu() -> None:
    """Of figures, recipes and what documentation shows."""
    real = re.compile(rb"(?:GPU|MIG)-[0-9a-f]{8}-[0-9a-f]{4}-")
    found = [
        file.relative_to(REPO)
        for folder in ("benchmark", "docs", "recipes", "docker")
        for file in (REPO / folder).rglob("*")
        if file.suffix in (".json", ".jsonl", ".md", ".txt", ".yaml", ".log") and real.search(file.read_bytes())
    ]
    assert found == []
