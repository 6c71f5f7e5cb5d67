"""What eagle-verify-cuda-graph keeps of a server's start, taken back for a test."""

from __future__ import annotations

import pytest

from sglang_patches.runtime import _outcome
from sglang_patches.runtime.eagle_verify_cuda_graph import counting, coverage


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has captured nothing yet."""
    monkeypatch.delenv(coverage.VARIABLE, raising=False)
    monkeypatch.setattr(_outcome, "_recorded", {})
    monkeypatch.setattr(_outcome, "_suppliers", {})
    monkeypatch.setattr(coverage, "_state", coverage._State())
    monkeypatch.setattr(counting.passes, "failures", type(counting.passes.failures)())
