"""What a file of `nccl tune`, `nccl check` and `stress` says made it."""

from __future__ import annotations

import json
import sys

import pytest

from sglang_patches.document import collect, schema
from sglang_patches.errors import PatchError
from sglang_patches.nccl import provenance
from sglang_patches.nccl.settings import without_profile
from sglang_patches.nccl.topology import Topology


def made_by() -> dict[str, object]:
    """As it is read back from a file."""
    found: dict[str, object] = json.loads(
        json.dumps(provenance.document(without_profile(), Topology(absent="no GPU"), {"nccl": "2.30.7"}))
    )
    return found


def test_it_holds_the_whole_document() -> None:
    told = made_by()
    document = schema.parse(told, "results.json")
    assert document.code.id == collect.code().id
    assert any(library.sha256 for library in document.processes[0].libraries)
    assert "no_document" not in told
    assert told["versions"]["nccl"] == "2.30.7"  # type: ignore[index]


def test_without_upstream_it_says_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise PatchError("SGLang is not installed here\n  remedy     install it")

    monkeypatch.setattr(collect, "on_disk", absent)
    told = made_by()
    assert (told["document"], told["no_document"]) == (None, "SGLang is not installed here")
    assert told["kernel"]


def test_without_the_libraries_of_the_series_engine_it_says_which_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sglang_patches.document.collect")
    monkeypatch.delattr("sglang_patches.document.collect")
    monkeypatch.setitem(sys.modules, "sglang_patches.document.schema", None)
    told = made_by()
    assert told["document"] is None
    assert "sglang_patches.document.schema" in str(told["no_document"])
