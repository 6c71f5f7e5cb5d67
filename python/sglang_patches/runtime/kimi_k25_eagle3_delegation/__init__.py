"""Patch ``kimi-k25-eagle3-delegation``: Kimi-K2.5 as an EAGLE-3 target, and a draft that must fit it.

``wrapper`` lets ``KimiK25ForConditionalGeneration`` answer for its language model, ``contract`` compares a draft's
configuration and checkpoint headers with the target before weights are loaded, ``accounting`` watches the draft being
loaded, ``alarm`` watches the accept length of the running server. ``startup`` joins them to upstream. These names are
what patched lines call.
"""

from __future__ import annotations

from sglang_patches.draft.refusal import DraftContractError
from sglang_patches.runtime.kimi_k25_eagle3_delegation.accounting import (
    accounts_for_weights,
    watches_draft,
    watches_runner,
)
from sglang_patches.runtime.kimi_k25_eagle3_delegation.alarm import watches_sums, watches_verify_passes
from sglang_patches.runtime.kimi_k25_eagle3_delegation.startup import check_before_spawn, check_in_worker
from sglang_patches.runtime.kimi_k25_eagle3_delegation.wrapper import answers_as_target, owner_of_body

__all__ = [
    "DraftContractError",
    "accounts_for_weights",
    "answers_as_target",
    "check_before_spawn",
    "check_in_worker",
    "owner_of_body",
    "watches_draft",
    "watches_runner",
    "watches_sums",
    "watches_verify_passes",
]
