"""How a draft is refused, whichever patch finds that it cannot work, and the variable that serves it all the same."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

CONTRACT = "SGLANG_PATCHES_DRAFT_CONTRACT"


class DraftContractError(ValueError):
    """This draft cannot work with this target. The message names every reason, file and key, and is complete alone."""


def message(draft: str, target: str, reasons: Iterable[str], remedy: str = "") -> str:
    """Why a draft is not served with a target; or, where `draft` is empty, why a target is not served.

    Args:
        draft, target: as they were named.
        remedy: in place of what helps against a draft that does not fit.
    """
    told = "".join(f"\n  - {reason}" for reason in reasons)
    what = f"the EAGLE-3 draft {draft} does not fit the target {target}" if draft else f"{target} is no target"
    remedy = remedy or "give the draft that was trained for this target, or serve without --speculative-algorithm"
    return f"{what}:{told}\n  remedy: {remedy}; {CONTRACT}=warn starts the server all the same"


def only_warns(environ: Mapping[str, str] | None = None) -> bool:
    """Whether `CONTRACT` asks to serve what would be refused.

    Args:
        environ: of the server; None: this process's.

    Raises DraftContractError for any value but ``refuse`` (the default) and ``warn``.
    """
    chosen = (os.environ if environ is None else environ).get(CONTRACT, "refuse")
    if chosen not in ("refuse", "warn"):
        raise DraftContractError(f"{CONTRACT} is {chosen!r}, expected 'refuse' or 'warn'; unset it to refuse")
    return chosen == "warn"
