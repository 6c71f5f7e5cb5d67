"""Environment variables of patches whose kernels split the context."""

from __future__ import annotations

import os

MODES = ("auto", "on", "off")
SPLITS_MOST = 512


def mode(variable: str) -> str:
    """`auto`, `on` or `off`.

    Raises:
        ValueError: it has a value that is not known.
    """
    value = os.environ.get(variable, "auto")
    if value not in MODES:
        raise ValueError(f"{variable}={value!r} is not known; it can be {', '.join(MODES)}. Unset it for {MODES[0]}.")
    return value


def split_override(variable: str) -> int | None:
    """Into how many parts a request is cut, None if it is unset.

    Raises:
        ValueError: it is no whole number from 1 to `SPLITS_MOST`.
    """
    value = os.environ.get(variable, "")
    if not value:
        return None
    if not value.isdecimal() or not 1 <= int(value) <= SPLITS_MOST:
        raise ValueError(
            f"{variable}={value!r} is no whole number from 1 to {SPLITS_MOST}. "
            "Unset it to have the number follow from batch and GPU."
        )
    return int(value)
