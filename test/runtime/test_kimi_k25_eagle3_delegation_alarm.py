"""kimi-k25-eagle3-delegation on a running server: the window of accept lengths and the one warning."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from drafts import DRAFT, EAGLE3, TARGET, served
from sglang.srt.configs.model_config import ModelConfig

from sglang_patches import lane
from sglang_patches.runtime import _outcome
from sglang_patches.runtime._verify_pass import VerifyPass
from sglang_patches.runtime.kimi_k25_eagle3_delegation import DraftContractError, alarm, settings, startup


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_outcome, "_recorded", {})
    monkeypatch.setattr(_outcome, "_suppliers", {})
    monkeypatch.setattr(startup, "_checked", [])
    monkeypatch.setattr(alarm, "_broken", [])
    for name in (settings.CONTRACT, settings.WINDOW, settings.THRESHOLD, settings.SECONDS):
        monkeypatch.delenv(name, raising=False)
    alarm.window.cache_clear()
    alarm._answers.cache_clear()


class Reporter:
    """As much of upstream's metrics reporter as the alarm reads."""

    def __init__(self, layers: list[int]) -> None:
        self.current_scheduler_metrics_enabled = self.enable_metrics = False
        body = SimpleNamespace(model=SimpleNamespace(layers_to_capture=layers))
        runner = SimpleNamespace(model=SimpleNamespace(language_model=body))
        self.scheduler = SimpleNamespace(
            tp_worker=SimpleNamespace(model_runner=runner), server_args=SimpleNamespace(chat_template=None)
        )

    def verified(self, requests: int, drafts: int) -> None:
        """A verify pass of so many running requests, in which so many draft tokens were accepted."""
        alarm._seen(self, VerifyPass(3, (drafts, *[0] * (requests - 1)) if requests else (), requests + drafts))


@pytest.fixture
def reporter(monkeypatch: pytest.MonkeyPatch) -> Reporter:
    spec = SimpleNamespace(speculative_num_steps=3, speculative_num_draft_tokens=4)
    monkeypatch.setattr(lane.here().runtime_context(), "get_spec", lambda: spec)
    draft = ModelConfig(str(DRAFT), dtype="float32", is_draft_model=True, **EAGLE3)
    pair = startup.make_pair(SimpleNamespace(download_dir=None), ModelConfig(str(TARGET), dtype="float32"), draft)
    told = startup.Checked(pair, lambda: None, {"draft": str(DRAFT), "warnings": ["a remark"]})
    monkeypatch.setattr(startup, "_checked", [told])
    monkeypatch.setenv(settings.WINDOW, "20")
    monkeypatch.setenv(settings.SECONDS, "3")
    return Reporter([2, 6, 9])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds; each reading is half a second later than the last one."""
    read = [100.0]

    def monotonic() -> float:
        read[0] += 0.5
        return read[0]

    monkeypatch.setattr(alarm, "time", SimpleNamespace(monotonic=monotonic))
    return read


def test_one_warning_when_passes_gain_nothing_for_long(
    reporter: Reporter, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="sglang_patches"):
        for _ in range(6):
            reporter.verified(3, 0)
        for _ in range(6):
            reporter.verified(3, 0)
        assert caplog.messages == []  # a full window, but 2.5 s of it
        for _ in range(40):
            reporter.verified(3, 0)
    assert len(caplog.messages) == 1
    for part in (
        "mean accept length 1.00 over the last 21 verify passes, below 1.1 for 3 s of verifying",
        "3 draft steps and verifies 4 tokens",
        "eagle_config.eagle_aux_hidden_state_layer_ids is [1, 5, 8]",
        "inputs of layers [2, 6, 9] of 12",
        "d2t names 3072 of 4096 tokens",
        "vocab_size 4096, bos_token_id 1, eos_token_id 3",
        "chat template: the one of the tokenizer",
        "Warnings at start: a remark",
    ):
        assert part in caplog.messages[0]
    told = _outcome.outcomes()[startup.PATCH]
    assert (told["result"], told["accept_alarm"], told["accept_length_window"]) == ("failed", True, 1.0)
    assert told["warnings"] == ["a remark"]


def test_no_warning_where_a_batch_may_draft_nothing(
    reporter: Reporter, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    lane.here().runtime_context().get_spec().speculative_adaptive = True
    for _ in range(60):
        reporter.verified(3, 0)
    assert "mean accept length" not in caplog.text
    told = _outcome.outcomes()[startup.PATCH]
    assert (told["accept_length_window"], told["accept_alarm"]) == (1.0, False)


def test_a_window_that_gains_is_left_alone(reporter: Reporter, caplog: pytest.LogCaptureFixture) -> None:
    for turn in range(400):
        correct = (turn % 10 == 0) * 4
        reporter.verified(2, correct)  # 1.2
    assert "mean accept length" not in caplog.text
    told = _outcome.outcomes()[startup.PATCH]
    assert told["accept_length_window"] == pytest.approx(1.2)
    assert (told["accept_window_passes"], told["accept_alarm"]) == (20, False)


def test_the_window_forgets_what_is_long_ago(reporter: Reporter) -> None:
    for _ in range(50):
        reporter.verified(1, 3)
    for _ in range(10):
        reporter.verified(1, 0)
    assert alarm.window().mean == pytest.approx(2.5)
    for _ in range(10):
        reporter.verified(1, 0)
    assert alarm.window().mean == 1.0


def test_a_burst_of_text_that_no_draft_foresees_is_no_alarm(
    reporter: Reporter, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(4):  # 48 requests, 1.5 s below
        reporter.verified(48, 0)
    clock[0] += 3600  # waiting for requests is not verifying: this counts as 1 s
    reporter.verified(48, 0)
    reporter.verified(48, 96)
    for _ in range(6):
        reporter.verified(48, 0)
    assert "mean accept length" not in caplog.text
    assert not alarm.window().alarmed


def test_the_alarm_ends_when_the_mean_recovers_and_can_come_again(
    reporter: Reporter, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    results = []
    with caplog.at_level("WARNING", logger="sglang_patches"):
        for accepted in (1, 4, 1):
            for _ in range(30):
                reporter.verified(4, 4 * (accepted - 1))
            told = _outcome.outcomes()[startup.PATCH]
            results.append((told["result"], told["accept_alarm"]))
    assert results == [("failed", True), ("applied", False), ("failed", True)]
    assert len(caplog.messages) == 2


def test_one_rank_of_a_group_tells(
    reporter: Reporter, clock: list[float], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(attn_tp_rank=1, attn_cp_rank=0, tp_rank=1, pp_rank=0):
        for _ in range(30):
            reporter.verified(4, 0)
        startup.warn("a remark")
        assert "mean accept length" not in caplog.text
        assert "a remark" not in caplog.text
    alarm._answers.cache_clear()  # another process
    with get_parallel().override(attn_tp_rank=0, attn_cp_rank=0, tp_rank=0, pp_rank=0):
        for _ in range(30):
            reporter.verified(4, 0)
        startup.warn("a remark")
    assert caplog.text.count("mean accept length") == 1
    assert caplog.text.count("a remark\n") == 1


def test_an_error_here_does_not_end_the_scheduler(
    reporter: Reporter, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    del reporter.scheduler.tp_worker.model_runner
    for _ in range(30):
        reporter.verified(4, 0)
    assert caplog.text.count("the accept length is no longer watched") == 1
    assert "AttributeError" in caplog.text
    assert _outcome.outcomes()[startup.PATCH]["accept_watched"] is False


def test_a_pass_of_requests_that_have_all_finished_is_none(reporter: Reporter) -> None:
    reporter.verified(0, 0)
    assert alarm.window().passes == 0


@pytest.mark.parametrize(
    ("name", "given"), [(settings.WINDOW, "0"), (settings.WINDOW, "many"), (settings.THRESHOLD, "-1")]
)
def test_settings_that_cannot_be_used_stop_the_start(name: str, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, given)
    arguments = served(TARGET, DRAFT)
    with pytest.raises(DraftContractError, match=f"{name} is {given!r}, expected a number from"):
        startup.check_before_spawn(arguments)
