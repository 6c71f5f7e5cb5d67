"""Environment variables of this patch; a value that cannot be used stops the start."""

from __future__ import annotations

import os

from sglang_patches.draft.refusal import CONTRACT, DraftContractError, only_warns

__all__ = ["CONTRACT", "SECONDS", "THRESHOLD", "WINDOW", "alarm_settings", "only_warns"]

WINDOW = "SGLANG_PATCHES_ACCEPT_WINDOW"
SECONDS = "SGLANG_PATCHES_ACCEPT_SECONDS"
THRESHOLD = "SGLANG_PATCHES_ACCEPT_ALARM"
# The bundled draft without its fc, or without its d2t, is at 1.03-1.06; published drafts are at 2.7-3.3, and below 1.5
# or so no draft pays for its passes.
_PASSES, _LOWEST = 512, 1.1
# 512 passes are 11 cycles of 48 requests, less than a second: a burst of random text is no broken draft.
_SUSTAINED = 60.0


def alarm_settings() -> tuple[int, float, float]:
    """`WINDOW` (passes, default 512), `THRESHOLD` (default 1.1; 0: no alarm) and `SECONDS` (default 60).

    Raises DraftContractError.
    """
    return int(_setting(WINDOW, _PASSES, 1)), _setting(THRESHOLD, _LOWEST, 0), _setting(SECONDS, _SUSTAINED, 0)


def _setting(name: str, default: float, least: float) -> float:
    text = os.environ.get(name, str(default))
    try:
        chosen = float(text)
        if chosen >= least:
            return chosen
    except ValueError:
        pass
    raise DraftContractError(f"{name} is {text!r}, expected a number from {least:g}; unset it for {default:g}")
