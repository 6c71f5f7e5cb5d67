"""How many tokens one EAGLE-3 cycle gives: one, and each drafted token that is accepted.

With a chain of ``k`` draft steps (topk 1) a cycle gives ``1 + a_1 + ... + a_k`` tokens, where ``a_i`` is the share of
cycles in which the draft's first ``i`` tokens were all accepted: the *acceptance rate by position*, which falls with
``i``. For another number of steps than the rates were measured with this is an approximation: verification keeps the
text, but other chains begin their cycles at other places of it, and where text is easy and hard by turns (easy, easy,
hard, ...) a long chain sees the first position more, or less, often accepted than a short one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_patches.errors import PatchError


@dataclass(frozen=True)
class Acceptance:
    """Acceptance rates.

    Attributes:
        by_position: share of cycles that accept at least ``i + 1`` drafted tokens; each in [0, 1], none above the one
            before it.
        told: where they are from, in words.
    """

    by_position: tuple[float, ...]
    told: str

    def tokens(self, steps: int) -> float:
        """Mean tokens of a cycle of so many draft steps. ValueError beyond the positions that are known."""
        if not 0 <= steps <= len(self.by_position):
            raise ValueError(f"{steps} steps: rates are known for 1 to {len(self.by_position)}")
        return 1 + sum(self.by_position[:steps])


def by_position(text: str) -> Acceptance:
    """Rates as a person writes them: ``0.78,0.55,0.36`` or ``78%,55%,36%``.

    Raises PatchError: one is no rate, or is above the one before it, as conditional rates may be.
    """
    rates: list[float] = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        try:
            rate = float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
        except ValueError:
            rate = math.nan
        if not 0 <= rate <= 1:
            raise PatchError(f"--accept-by-position {text!r}: {word!r} is no rate\n  expected   such as 0.78,0.55,0.36")
        if rates and rate > rates[-1]:
            raise PatchError(
                f"--accept-by-position {text!r}: position {len(rates) + 1} is accepted more often ({rate:g}) than "
                f"position {len(rates)} ({rates[-1]:g})\n"
                "  expected   of all cycles, the share that accepted at least so many tokens, which cannot grow\n"
                "  remedy     of rates given that the token before was accepted, give running products"
            )
        rates.append(rate)
    if not rates:
        raise PatchError(f"--accept-by-position {text!r} has no rate\n  expected   such as 0.78,0.55,0.36")
    return Acceptance(tuple(rates), f"accepted by position {', '.join(f'{rate:g}' for rate in rates)}")


def from_length(length: float, steps: int) -> Acceptance:
    """Rates from an accept length (tokens of a cycle, the target's own included) that `steps` draft steps gave.

    Every drafted token is taken to be accepted with one and the same probability ``p`` given those before it (Leviathan
    et al. 2023, arXiv 2211.17192, section 3.1), so ``a_i = p^i``. Nothing is said about positions beyond `steps`, where
    real drafts fall faster.

    Raises PatchError: no chain of `steps` has such a length.
    """
    if steps < 1 or not 1 <= length <= steps + 1:
        raise PatchError(
            f"--accept-length {length:g} cannot come from {steps} draft steps\n"
            f"  expected   from 1 (nothing accepted) to {steps + 1} (all accepted); --accept-steps says the steps"
        )
    low, high = 0.0, 1.0
    for _ in range(60):  # the sum grows with p, so bisection finds it
        middle = (low + high) / 2
        if sum(middle**at for at in range(steps + 1)) < length:
            low = middle
        else:
            high = middle
    told = f"accept length {length:g} at {steps} steps, spread over positions as if each had the same chance"
    return Acceptance(tuple(high**at for at in range(1, steps + 1)), f"{told} ({high:.3f})")
