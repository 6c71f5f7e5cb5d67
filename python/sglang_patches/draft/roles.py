"""Which of two models is the target and which the draft: refused where they were given in each other's place.

Of their ``config.json`` as dicts, or of upstream's configuration objects.
"""

from __future__ import annotations

from typing import Any

from sglang_patches.draft import conventions
from sglang_patches.draft.shapes import value

# What `conventions.architecture` looks at.
_KEYS = ("architectures", "draft_vocab_size", "speculators_model_type", "transformer_layer_config")


def is_draft(config: Any) -> bool:
    """Whether this is the configuration of an EAGLE-3 draft known here."""
    own = {key: value(config, key) for key in _KEYS}
    return conventions.architecture({key: found for key, found in own.items() if found is not None}) is not None


def no_target(target: Any) -> str:
    """Why this target is none, in words; empty where it may be one."""
    if not is_draft(target):
        return ""
    return f"the target's config.json architectures is {_said(target)}, an EAGLE-3 draft and no whole model"


def no_draft(draft: Any, target: Any, as_it_says: bool = False) -> str:
    """Why this draft is none, in words: it is a whole model; empty where it may be one.

    Args:
        as_it_says: for an upstream that takes a draft for what ``architectures`` says, whatever its other keys tell.
    """
    said, targets = _said(draft), value(target, "architectures") or []
    # Upstream gives a draft of DeepSeek's class the name of its next-token layer.
    whole = said.endswith("ForConditionalGeneration") or said.removesuffix("NextN") in targets
    if not whole or said in conventions.ARCHITECTURES or (is_draft(draft) and not as_it_says):
        return ""
    known = ", ".join(conventions.ARCHITECTURES)
    return (
        f"config.json architectures is {said}, a whole model and no EAGLE-3 draft; drafts known here are {known}, and "
        "speculators' format"
    )


def misplaced(target: Any, draft: Any, as_it_says: bool = False) -> list[str]:
    """Why one or both are not what they were given as; empty where they may be. `draft` is None without one."""
    reasons = [no_target(target), "" if draft is None else no_draft(draft, target, as_it_says)]
    return [reason for reason in reasons if reason]


def remedy(target: Any, draft: Any, target_path: str, draft_path: str) -> str:
    """What to do about a target that is a draft; empty where it is none."""
    if not is_draft(target):
        return ""
    if draft is not None and not is_draft(draft):
        return f"swap them: {draft_path} as the target, {target_path} as its draft"
    return f"give the whole model that {target_path} was trained for as the target, and it as the draft"


def _said(config: Any) -> str:
    names = value(config, "architectures")
    return str(names[0]) if isinstance(names, list | tuple) and names else "none"
