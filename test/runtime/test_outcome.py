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
    assert _outcome.merge([{"p": good}, {}, {"p": bad}]) == {"p": {**bad, "by_process": [bad, good]}}
    assert _outcome.merge([]) == {}


def replica(captured: int, eager: int, mib: int) -> dict[str, object]:
    return {
        "result": "applied",
        "detail": "every batch",
        "max_running_requests": 24,
        "added_mib": mib,
        "passes": {"verify": {"graph": {"captured": captured}, "eager": {"width": eager}}, "draft_decode": {}},
        "failures_inside": {},
    }


def test_figures_are_at_the_same_place_for_one_scheduler_and_for_many() -> None:
    first, second = replica(5, 1, 230), replica(7, 0, 231)
    second["failures_inside"] = {"count": 2}
    merged = _outcome.merge([{}, {"p": first}, {"p": second}])["p"]
    assert merged == {
        "result": "applied",
        "detail": "every batch",
        "max_running_requests": 24,
        "passes": {"verify": {"graph": {"captured": 12}, "eager": {"width": 1}}, "draft_decode": {}},
        "failures_inside": {"count": 2},
        "by_process": [first, second],
    }
    assert first == replica(5, 1, 230)  # what was merged stays as it was


def test_equal_counts_of_two_schedulers_are_added_too() -> None:
    entry = replica(5, 0, 230)
    merged = _outcome.merge([{"p": entry}, {"p": replica(5, 0, 230)}])["p"]
    assert merged["passes"]["verify"]["graph"] == {"captured": 10}
    assert merged["added_mib"] == 230
    assert "by_process" not in merged


def test_what_one_process_alone_tells_is_kept() -> None:
    launcher = {"result": "not needed", "detail": "here"}
    told = _outcome.merge([{"p": launcher}, {"p": {"result": "failed", "detail": "there", "passes": {"a": 1}}}])["p"]
    assert (told["result"], told["detail"], told["passes"]) == ("failed", "there", {"a": 1})
