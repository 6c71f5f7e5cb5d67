"""What a variable of upstream's means is kept for as long as the process's environment holds the same bytes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

# Upstream's kinds of variable whose meaning follows from the text alone and cannot be changed by who gets it. The
# other, EnvJSON, may name a file and gives lists and dictionaries.
_PURE = ("EnvStr", "EnvBool", "EnvInt", "EnvFloat", "EnvTuple")
# In place of an answer: these bytes were seen, and what they mean is upstream's to tell each time.
_ASK = object()


def keeps_meanings(get: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorate ``EnvField.get(self)``.

    ``os.environ`` encodes a name and decodes a value at each look, and tells of a missing one by an exception. The
    bytes behind it say as much: a variable that is set again, even to the same text, is a new object there, and one
    that is deleted is none, whoever did it. So an answer holds while the bytes are the same object, and the default
    while there are none; a default that is computed, a value that is not valid and one that was set to None are
    upstream's to tell.
    """
    if _bytes_behind() is None:
        return get  # not CPython's on POSIX, or one that keeps its environment elsewhere

    @functools.wraps(get)
    def meaning(self: Any) -> Any:
        try:
            key, raw, default, answer = self._kept_meaning
            # Read through `os`, since a test may put another object there; one that is no such is upstream's to read.
            known = os.environ._data.get(key) is raw  # type: ignore[attr-defined]
        except AttributeError:
            return _ask(self, get)
        if known and self.default is default and not self._set_to_none:
            return get(self) if answer is _ASK else answer
        return _ask(self, get)

    return meaning


def _bytes_behind() -> dict[bytes, bytes] | None:
    found = getattr(os.environ, "_data", None)
    return found if isinstance(found, dict) and hasattr(os.environ, "encodekey") else None


def _ask(field: Any, get: Callable[[Any], Any]) -> Any:
    """Upstream's answer; kept where it follows from the bytes of the variable."""
    known = _bytes_behind()
    if known is None or field._set_to_none:
        return get(field)
    key: bytes = os.environ.encodekey(field.name)  # type: ignore[assignment, arg-type]
    raw, default = known.get(key), field.default
    answer = get(field)
    if raw is None:
        follows = not callable(default)
    else:
        follows = _is_pure(field, get) and _is_valid(field, os.environ.decodevalue(raw))  # type: ignore[arg-type]
    if known.get(key) is raw:  # not changed meanwhile, by another thread or by upstream
        field._kept_meaning = (key, raw, default, answer if follows else _ASK)
    return answer


def _is_pure(field: Any, get: Callable[[Any], Any]) -> bool:
    kinds = (getattr(get, "__globals__", {}).get(name) for name in _PURE)
    return any(kind is not None and type(field).parse is kind.parse for kind in kinds)


def _is_valid(field: Any, text: str) -> bool:
    """Of a value that is not valid upstream warns each time."""
    try:
        field.parse(text)
    except ValueError:
        return False
    return True
