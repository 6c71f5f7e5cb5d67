"""_outcome: one log line a decision, and the figures that `/server_info` gets."""

from __future__ import annotations

import logging

import pytest

from sglang_patches.runtime import _outcome


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_outcome, "_recorded", {})
    monkeypatch.setattr(_outcome, "_suppliers", {})


def test_a_decision_is_logged_once_with_its_figures(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="sglang_patches"):
        for _ in range(3):
            _outcome.record("some-patch", "applied", "covers all batches", largest=16)
        _outcome.record("some-patch", "failed", "out of memory", largest=8)
    assert caplog.messages == [
        "sglang-patches: some-patch: applied: covers all batches largest=16",
        "sglang-patches: some-patch: failed: out of memory largest=8",
    ]
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert _outcome.outcomes() == {"some-patch": {"result": "failed", "detail": "out of memory", "largest": 8}}


def test_live_figures_are_read_each_time() -> None:
    count = 0
    _outcome.record("counting", "applied", "counts")
    _outcome.live_figures("counting", lambda: {"count": count})
    assert _outcome.outcomes()["counting"]["count"] == 0
    count = 5
    assert _outcome.outcomes()["counting"] == {"result": "applied", "detail": "counts", "count": 5}


def test_equal_outcomes_are_told_once_and_others_by_process() -> None:
    good = {"result": "applied", "detail": "x"}
    bad = {"result": "failed", "detail": "y"}
    assert _outcome.merge([{"p": good}, {"p": good}]) == {"p": good}
    assert _outcome.merge([{"p": good}, {}, {"p": bad}]) == {"p": {"result": "failed", "by_process": [bad, good]}}
    assert _outcome.merge([]) == {}
