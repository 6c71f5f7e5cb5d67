"""How a draft is refused, whichever patch finds that it cannot work, and the variable that serves it all the same."""

from __future__ import annotations

import os

CONTRACT = "SGLANG_PATCHES_DRAFT_CONTRACT"


class DraftContractError(ValueError):
    """This draft cannot work with this target. The message names every reason, file and key, and is complete alone."""


def only_warns() -> bool:
    """Whether `CONTRACT` asks to serve what would be refused.

    Raises DraftContractError for any value but ``refuse`` (the default) and ``warn``.
    """
    chosen = os.environ.get(CONTRACT, "refuse")
    if chosen not in ("refuse", "warn"):
        raise DraftContractError(f"{CONTRACT} is {chosen!r}, expected 'refuse' or 'warn'; unset it to refuse")
    return chosen == "warn"
