"""What a model is follows from its configuration, which nothing changes while it is served."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any


def kept_by_model(ask: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a question ``ask(model_config)`` where it is asked while serving.

    Answers are kept by ``ModelConfig`` object, so that target and draft have their own, and only for the ``hf_config``
    and the role that it was asked with. Upstream changes those, and what is in them, while a server starts: a question
    that is asked then must not go through here.
    """
    # By id, since a class that compares by value has no hash; the weak reference says whose id it is.
    known: dict[int, tuple[weakref.ref[Any], Any, bool, Any]] = {}

    @functools.wraps(ask)
    def answered(model_config: Any) -> Any:
        key = id(model_config)
        config, draft = model_config.hf_config, model_config.is_draft_model
        found = known.get(key)
        if found and found[0]() is model_config and found[1] is config and found[2] == draft:
            return found[3]
        answer = ask(model_config)
        known[key] = weakref.ref(model_config, lambda gone: _forget(known, key, gone)), config, draft, answer
        return answer

    return answered


def _forget(known: dict[int, Any], key: int, gone: weakref.ref[Any]) -> None:
    if key in known and known[key][0] is gone:
        del known[key]
