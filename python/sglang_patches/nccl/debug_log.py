"""What NCCL says in its own log (``NCCL_DEBUG=INFO``) of the settings it took and of what it chose.

The forms of the lines were read from NCCL 2.28.9 and 2.30.7: most variables are read through one function that logs
``NAME set by environment to VALUE.`` when a variable is first needed, the others log in forms of their own, and a few
(the debug variables themselves) are not logged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

# The value ends at the end of the line; the common form puts a full stop after a number.
_TAKEN = re.compile(r"\b(NCCL_[A-Z0-9_]+) set (?:by environment )?to (.+?)\.?\s*$")
_CONFIG = re.compile(r"Comm config \w+ reset to \S*? ?(?:by )?(NCCL_[A-Z0-9_]+)=(\S+?)\.?\s*$")
_INVALID = re.compile(r"Invalid value (\S+) for (NCCL_[A-Z0-9_]+), using default (\S+?)\.?\s*$")
_REFUSED = re.compile(r"\b(NCCL_[A-Z0-9_]+) (\S+) is not valid, leaving it set at (\S+)")
_CHOICE = re.compile(r"AllReduce: (\d+) Bytes -> Algo (\w+) proto (\w+) channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}")
_CHANNELS = re.compile(r"(\d+) coll channels, .*?(\d+) p2p channels")
_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+\S*)")
_GRAPH_MODE = re.compile(r"Comm config graphUsageMode set to (\d+)")


@dataclass(frozen=True)
class Choice:
    """What NCCL chose for one all-reduce: `channels` is how many it used."""

    size_bytes: int
    algorithm: str
    protocol: str
    channels: int


@dataclass
class Told:
    """What one rank's log says.

    Attributes:
        taken: variable -> value as NCCL logged it.
        refused: variable -> what NCCL said about a value it did not take.
        choices: of each different all-reduce, in the order logged (only rank 0 logs them).
        channels: collective channels of each communicator, in the order made.
        graph_modes: ``graphUsageMode`` of communicators that were made with one.
    """

    taken: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    choices: list[Choice] = field(default_factory=list)
    channels: list[int] = field(default_factory=list)
    graph_modes: list[int] = field(default_factory=list)
    version: str = ""


def read(lines: Iterable[str]) -> Told:
    """Read one rank's log; lines in no known form are passed over."""
    told = Told()
    for line in lines:
        if match := _INVALID.search(line):
            told.refused[match[2]] = f"invalid value {match[1]}, used its default {match[3]}"
        elif match := _REFUSED.search(line):
            told.refused[match[1]] = f"value {match[2]} is not valid, left it at {match[3]}"
        elif match := _CONFIG.search(line) or _TAKEN.search(line):
            told.taken[match[1]] = match[2].strip()
        elif match := _CHOICE.search(line):
            low, high = int(match[4]), int(match[5])
            choice = Choice(int(match[1]), match[2], match[3], high - low + 1)
            if choice not in told.choices:
                told.choices.append(choice)
        elif match := _CHANNELS.search(line):
            told.channels.append(int(match[1]))
        elif match := _GRAPH_MODE.search(line):
            told.graph_modes.append(int(match[1]))
        elif match := _VERSION.search(line):
            told.version = match[1]
    return told


def same_value(wanted: str, told: str) -> bool:
    """Whether a logged value is the one that was set.

    Numbers are compared as NCCL reads them: decimal, octal and hexadecimal are one, and ``16M`` is not 16777216 but 16.
    Words are compared without case; a numeric path level is another spelling of its name.
    """
    wanted, told = wanted.strip(), told.strip()
    if wanted.lower() == told.lower():
        return True
    number = re.fullmatch(r"[+-]?(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)", wanted)
    if number and re.fullmatch(r"-?\d+", told):
        return _strtoll(wanted) == int(told)
    # The old style of NCCL_P2P_LEVEL and its like: a number for a name.
    return bool(number) and told in ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")


def _strtoll(text: str) -> int:
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text.lstrip("+"))
    base = 16 if digits[:2].lower() == "0x" else 8 if digits.startswith("0") and len(digits) > 1 else 10
    return sign * int(digits, base)
