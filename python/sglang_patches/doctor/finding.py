"""What a check has to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: From harmless to harmful; only a failure changes the exit code.
Level = Literal["ok", "note", "warning", "failure"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "failure")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        check: which check says so, in the words of the report's first column.
        level: ``failure``: a server will not start or will be wrong; ``warning``: it will be slower, or may fail under
            load; ``note``: good to know; ``ok``.
        seen: the value found, with what was expected where that differs.
        why: why it matters, with a number and where the number is from; empty where nothing is wrong.
        do: the next step; empty where nothing is to be done.
    """

    check: str
    level: Level
    seen: str
    why: str = ""
    do: str = ""
