"""The rule's parameters, read once from environment variables; a value that cannot be meant ends start-up."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

PREFIX = "SGLANG_PATCHES_OEA_"
PHASES = ("decode", "verify")
# Above this a pass is no longer bound by which experts it loads, and the kernel's work grows with the square.
MOST_TOKENS = 64

Number = TypeVar("Number", int, float)


class BadSetting(ValueError):
    """A variable of this patch has a value that cannot be meant."""


@dataclass(frozen=True)
class Rule:
    """Opportunistic expert activation, arXiv 2511.02237.

    Attributes:
        k0: experts of its own that each token keeps, from the top of its ranking.
        k_max: experts a token has in all at most; None: as many as the model's top-k.
        rank_cap: only its first so many experts may be added to a token; None: all.
        p: a token's own experts end early where they carry this share of the weight of its top-k; None: never.
        least, most: real tokens in a batch for the rule to hold; any other batch is routed as upstream does.
        phases: `PHASES` in which it holds.
        count: different experts are counted (`experts`), which no choice depends on.
    """

    k0: int
    k_max: int | None = None
    rank_cap: int | None = None
    p: float | None = None
    least: int = 2
    most: int = MOST_TOKENS
    phases: tuple[str, ...] = PHASES
    count: bool = False

    def changes_nothing(self, top_k: int) -> bool:
        """Whether every token keeps all of its `top_k` experts, so that upstream's own code may choose them."""
        return self.k0 == top_k and self.p is None

    def check(self, top_k: int) -> None:
        """Raise BadSetting where a layer with `top_k` routed experts a token cannot follow the rule."""
        for name, value in (("K0", self.k0), ("K_MAX", self.k_max)):
            if value is not None and value > top_k:
                raise BadSetting(
                    f"{PREFIX}{name}={value} is more than the {top_k} experts a token that this model routes to: "
                    f"wanted 1 to {top_k}. Lower it; {name}={top_k} "
                    + ("changes nothing." if name == "K0" else "is what leaving it unset means.")
                )

    def figures(self) -> dict[str, Any]:
        """As told in ``/server_info``."""
        return {
            "k0": self.k0,
            "k_max": self.k_max,
            "rank_cap": self.rank_cap,
            "p": self.p,
            "tokens": [self.least, self.most],
            "phases": list(self.phases),
        }


def read(variables: Mapping[str, str]) -> Rule | None:
    """The rule that `variables` ask for, or None where they ask for none.

    Raises:
        BadSetting: a value that is not understood, contradicts another or has no meaning alone.
    """
    given = {name: value for name, value in variables.items() if name.startswith(PREFIX)}
    known = {PREFIX + name for name in ("K0", "K_MAX", "RANK_CAP", "P", "TOKENS", "PHASES", "COUNT")}
    if unknown := sorted(set(given) - known):
        raise BadSetting(
            f"{', '.join(unknown)}: not known; wanted one of {', '.join(sorted(known))}. Correct the name."
        )
    if PREFIX + "K0" not in given:
        if given:
            raise BadSetting(
                f"{', '.join(sorted(given))} without {PREFIX}K0: says nothing alone. Set {PREFIX}K0 to the experts of "
                "its own that each token keeps, or unset the others."
            )
        return None
    k0 = _number(given, "K0", int, lambda value: value >= 1, "a whole number of experts from 1 to the model's top-k")
    assert k0 is not None
    least, most = _window(given)
    return Rule(
        k0=k0,
        k_max=_number(
            given, "K_MAX", int, lambda value: value >= k0, f"a whole number from K0={k0} to the model's top-k"
        ),
        rank_cap=_number(given, "RANK_CAP", int, lambda value: value >= k0, f"a whole number from K0={k0}"),
        p=_number(given, "P", float, lambda value: 0 < value < 1, "a share between 0 and 1, both excluded"),
        least=least,
        most=most,
        phases=_phases(given),
        count=_count(given),
    )


@functools.cache
def rule() -> Rule | None:
    """`read` of this process's environment."""
    return read(os.environ)


def _number(
    given: Mapping[str, str], name: str, kind: Callable[[str], Number], fits: Callable[[Number], bool], wanted: str
) -> Number | None:
    text = given.get(PREFIX + name)
    if text is None:
        return None
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not fits(value):
        raise BadSetting(f"{PREFIX}{name}={text!r}: wanted {wanted}. Correct it, or unset it for its default.")
    return value


def _window(given: Mapping[str, str]) -> tuple[int, int]:
    text = given.get(PREFIX + "TOKENS", f"2-{MOST_TOKENS}")
    least, dash, most = text.partition("-")
    if dash and least.strip().isdecimal() and most.strip().isdecimal() and 1 <= int(least) <= int(most) <= MOST_TOKENS:
        return int(least), int(most)
    raise BadSetting(
        f"{PREFIX}TOKENS={text!r}: wanted LEAST-MOST tokens of a batch, between 1 and {MOST_TOKENS}, such as 2-32. "
        "Correct it, or unset it for its default."
    )


def _count(given: Mapping[str, str]) -> bool:
    text = given.get(PREFIX + "COUNT", "off")
    if text not in ("on", "off"):
        raise BadSetting(f"{PREFIX}COUNT={text!r}: wanted on or off. Correct it, or unset it for off.")
    return text == "on"


def _phases(given: Mapping[str, str]) -> tuple[str, ...]:
    text = given.get(PREFIX + "PHASES", ",".join(PHASES))
    named = [word.strip() for word in text.split(",") if word.strip()]
    if not named or set(named) - set(PHASES):
        raise BadSetting(
            f"{PREFIX}PHASES={text!r}: wanted one or both of {','.join(PHASES)}. Correct it, or unset it for both."
        )
    return tuple(phase for phase in PHASES if phase in named)
