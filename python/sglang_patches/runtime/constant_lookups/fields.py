"""The fields of a dataclass are those of its class, which are told once."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

# By the id of what a class declares, which is held here, too, so that no other can have that id.
_kept: dict[int, tuple[Any, tuple[dataclasses.Field[Any], ...]]] = {}


def with_kept_fields(module: ModuleType) -> ModuleType:
    """`module`, which is ``dataclasses``, for a module of upstream's that asks it for ``fields`` in each cycle.

    Fields are kept by what a class declares, which a class that inherits it shares; all else is `module`'s own.
    """
    kept = ModuleType(module.__name__, module.__doc__)
    vars(kept).update(vars(module), fields=_fields)
    return kept


def _fields(class_or_instance: Any) -> tuple[dataclasses.Field[Any], ...]:
    declared = getattr(class_or_instance, "__dataclass_fields__", None)
    found = _kept.get(id(declared))
    if found is not None:
        return found[1]
    fields = dataclasses.fields(class_or_instance)
    _kept[id(declared)] = declared, fields
    return fields
