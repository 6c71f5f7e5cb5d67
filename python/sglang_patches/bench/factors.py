"""From factors' names and a design to arms: what is on in which run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_patches import selection
from sglang_patches.bench import arms
from sglang_patches.bench.design import Design
from sglang_patches.bench.model import Arm
from sglang_patches.errors import PatchError
from sglang_patches.series import Series, unknown_patches


@dataclass(frozen=True)
class Factor:
    """Something that is on or off: a patch, or a word of a selection (`env:NAME=VALUE`, `arg:--option=value`).

    Off is `-patch` for a patch, and absence for a word.
    """

    name: str
    is_patch: bool

    def words(self, on: bool) -> list[str]:
        """What the selection of a run says of it."""
        if self.is_patch:
            return [f"{'+' if on else '-'}{self.name}"]
        return [self.name.replace(",", "\\,")] if on else []


def parse(text: str, series: Series) -> list[Factor]:
    """Factors from a list such as `pcie-nccl-allreduce,env:NCCL_PROTO=LL` (a comma inside a word: ``\\,``).

    Raises:
        PatchError: a word is neither a patch of the series nor of the form kind:value.
    """
    words = [word.replace("\\,", ",").strip() for word in re.split(r"(?<!\\),", text)]
    found = []
    for word in filter(None, words):
        if ":" in word:
            found.append(Factor(word, is_patch=False))
            continue
        if word[0] in "+-" or word.lower() in ("none", "all", "default"):
            raise PatchError(
                f"factor {word!r}: a factor is switched both on and off\n  expected   a patch's name, env:NAME=VALUE, "
                f"arg:--option=value or python:PATH\n  remedy     name it alone; what stays the same is in --base"
            )
        if word.lower() not in series.by_name:
            raise PatchError(unknown_patches([word], series))
        found.append(Factor(word.lower(), is_patch=True))
    return found


def make_arms(
    factors: Sequence[Factor],
    design: Design,
    base: str,
    series: Series,
    gpu: Callable[[], bool] = selection.has_gpu,
) -> list[Arm]:
    """One arm for each run of the design, in its order; named by the factors' levels: `101`.

    Args:
        base: a selection that all runs start from; it says nothing of a factor.

    Raises:
        PatchError: a run cannot be served: factors exclude or require each other, or the base contradicts one.
    """
    found: list[Arm] = []
    for levels in design.levels:
        on = [bool(level > 0) for level in levels]
        name = "".join("1" if one else "0" for one in on)
        words = [word for factor, one in zip(factors, on, strict=True) for word in factor.words(one)]
        spec = ",".join([base, *words] if base else words)
        try:
            arm = arms.parse(name, spec, series, gpu=gpu)
        except PatchError as error:
            settings = ", ".join(
                f"{factor.name} {'on' if one else 'off'}" for factor, one in zip(factors, on, strict=True)
            )
            raise PatchError(
                f"factors {', '.join(factor.name for factor in factors)} cannot be switched each on its own: "
                f"no run with {settings}\n{error}\n"
                f"  or         leave one of them out of --factors, and set it for all runs by --base"
            ) from None
        same = next((other for other in found if arms.same(arm, other)), None)
        if same is not None:
            raise PatchError(
                f"runs {same.name} and {name} would serve alike: {spec!r}\n"
                f"  remedy     leave out of --factors what --base or another factor already says"
            )
        found.append(arm)
    return found
