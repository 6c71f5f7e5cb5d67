"""Tells when speculation does not pay: the mean accept length over the last verify passes, and what may be wrong."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from sglang_patches import lane
from sglang_patches.draft import shapes
from sglang_patches.draft.shapes import value
from sglang_patches.runtime import _metrics, _outcome, _ranks, _verify_pass
from sglang_patches.runtime._verify_pass import VerifyPass
from sglang_patches.runtime.kimi_k25_eagle3_delegation import startup
from sglang_patches.runtime.kimi_k25_eagle3_delegation.settings import alarm_settings


class AcceptWindow:
    """Mean accept length (bonus token included) over the last verify passes, counted per request, and its alarm.

    Passes come in batches and leave in batches, so the window holds at least `size` of them once it is full. The alarm
    goes on when the mean of a full window has stayed below `lowest` for `sustained` seconds of verifying, and off when
    it is no longer below.
    """

    # Between two passes no more than this counts as verifying: a server that waits for requests learns nothing.
    _LONGEST_STEP = 1.0

    def __init__(self, size: int, lowest: float, sustained: float = 0.0) -> None:
        self.size, self.lowest, self.sustained = size, lowest, sustained
        self.tokens = self.passes = 0
        self.alarmed = False
        # None while the mean is not below.
        self.seconds_below: float | None = None
        self._last: float | None = None
        self._batches: deque[tuple[int, int]] = deque()

    def add(self, tokens: int, passes: int, now: float) -> bool:
        """Count one batch: `passes` requests verified, `tokens` accepted by them together, at `now` in seconds.

        Returns whether that switched the alarm on or off.
        """
        self._batches.append((tokens, passes))
        self.tokens += tokens
        self.passes += passes
        while self.passes - self._batches[0][1] >= self.size:
            gone = self._batches.popleft()
            self.tokens -= gone[0]
            self.passes -= gone[1]
        step = 0.0 if self._last is None else min(now - self._last, self._LONGEST_STEP)
        self._last = now
        if self.passes < self.size or self.tokens >= self.lowest * self.passes:
            self.seconds_below = None
            switched, self.alarmed = self.alarmed, False
            return switched
        # The step to the first pass that is below is not time below.
        self.seconds_below = 0.0 if self.seconds_below is None else self.seconds_below + step
        switched = not self.alarmed and self.seconds_below >= self.sustained
        self.alarmed |= switched
        return switched

    @property
    def mean(self) -> float | None:
        return self.tokens / self.passes if self.passes else None


@functools.cache
def window() -> AcceptWindow:
    """This process's window, made on the first call."""
    size, lowest, sustained = alarm_settings()
    # Adaptive speculation drafts nothing for some batches, so that a mean of 1 may be what was planned.
    made = AcceptWindow(size, 0.0 if _adaptive() else lowest, sustained)
    told = startup.checked()
    _outcome.live_figures(
        startup.PATCH,
        lambda: {
            **(told.figures if told else {}),
            "accept_length_window": made.mean,
            "accept_window_passes": made.passes,
            "accept_window": made.size,
            "accept_alarm_below": made.lowest,
            "accept_alarm_after_s": made.sustained,
            "accept_alarm": made.alarmed,
            "accept_watched": not _broken,
        },
    )
    return made


def _adaptive() -> bool:
    return bool(getattr(lane.here().runtime_context().get_spec(), "speculative_adaptive", False))


def _contained(reporter: Any, passes: int, tokens: int) -> None:
    """Watch one verify pass. An error here must not end the scheduler's loop: it is logged once, and nothing is watched
    from then on."""
    if _broken:
        return
    try:
        _watch(reporter, passes, tokens)
    except Exception as error:
        _broken.append(error)
        startup.logger.exception(
            "sglang-patches: %s: the accept length is no longer watched, by an error that does not concern the "
            "server's answers",
            startup.PATCH,
        )


def _seen(reporter: Any, verified: VerifyPass) -> None:
    _contained(reporter, len(verified.drafts), verified.tokens)


# For upstream's ``_resolve_spec_v2_tokens(self, result, batch)``.
watches_verify_passes = _verify_pass.tells(_seen)


def watches_sums(update: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``update_spec_metrics(self, bs, num_accepted_tokens)``, where upstream (0.5.9) tells of a pass by sums:
    its requests, and the draft tokens that they accepted together."""

    @functools.wraps(update)
    def watched(self: Any, bs: int, num_accepted_tokens: int) -> None:
        update(self, bs, num_accepted_tokens)
        _contained(self, int(bs), int(bs) + int(num_accepted_tokens))

    return watched


# The error that ended watching in this process, if one did.
_broken: list[Exception] = []


# Asked once: a scheduler that verifies has its ranks for good.
_answers = functools.cache(_ranks.answers)


def _watch(reporter: Any, passes: int, tokens: int) -> None:
    told = startup.checked()
    # The ranks of one attention group verify the same requests; one of them tells.
    if told is None or not passes or not _answers():
        return
    seen = window()
    switched = seen.add(tokens, passes, time.monotonic())
    if lane.here().has_metrics(reporter):
        labels = reporter.metrics_collector.labels
        _metrics.ACCEPT_LENGTH_WINDOW.child(labels).set(seen.mean)
        _metrics.ACCEPT_ALARM.child(labels).set(int(seen.alarmed))
    if switched and seen.alarmed:
        _outcome.record(startup.PATCH, "failed", explain(seen, told, getattr(reporter, "scheduler", reporter)))
    elif switched:
        told.record(f"the mean accept length is {seen.mean:.2f} again, no longer below {seen.lowest:g}")


def explain(seen: AcceptWindow, told: startup.Checked, scheduler: Any) -> str:
    """The alarm: what was measured, what it costs, and the likely causes with the values of this server."""
    pair, spec = told.pair, lane.here().runtime_context().get_spec()
    ids, key = shapes.layer_ids(pair.draft)
    captured = captured_layers(scheduler)
    vocab = int(value(pair.target, "vocab_size"))
    reduced = f"d2t names {pair.draft_vocab} of {vocab} tokens" if pair.tensor("d2t") else f"full, {vocab} tokens"
    template = getattr(scheduler.server_args, "chat_template", None)
    return (
        f"mean accept length {seen.mean:.2f} over the last {seen.passes} verify passes, below {seen.lowest:g} for "
        f"{seen.seconds_below or 0:.0f} s of verifying: "
        f"every pass pays {spec.speculative_num_steps} draft steps and verifies {spec.speculative_num_draft_tokens} "
        "tokens for the one that decoding gives alone. Likely causes, with the values seen: "
        f"(1) layer ids: {key} is {ids or 'not given'} and the target captures at the inputs of layers {captured} of "
        f"{value(pair.target, 'num_hidden_layers')}; a draft trained on the other convention (ids of layer outputs, "
        "or of layer inputs with 0 the embedding) is one layer off. "
        f"(2) vocabulary map: {reduced}. "
        f"(3) tokenizer: the draft has {_ids(pair.draft)}, the target {_ids(pair.target)}. "
        f"(4) chat template: {template or 'the one of the tokenizer'}; a draft learns the text of one template, and "
        "requests without it (/generate, /v1/completions) are another. "
        f"Warnings at start: {'; '.join(told.figures.get('warnings', [])) or 'none'}. "
        "Serve without --speculative-algorithm until it is found"
    )


def _ids(config: Any) -> str:
    keys = ("vocab_size", "bos_token_id", "eos_token_id")
    return ", ".join(f"{key} {value(config, key)}" for key in keys)


def captured_layers(scheduler: Any) -> list[int] | None:
    """The layers whose inputs the target's model captures, as it was set; None where that cannot be read."""
    found = scheduler.tp_worker.model_runner.model
    for name in ("language_model", "model"):
        found = getattr(found, name, found)
    layers = getattr(found, "layers_to_capture", None)
    return None if layers is None else list(layers)
