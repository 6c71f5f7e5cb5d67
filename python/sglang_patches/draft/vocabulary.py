"""The draft's vocabulary: which of the target's token ids its head names, by ``d2t`` and ``t2d``.

Two forms of ``d2t`` are stored. Most trainers write *offsets*: draft token i is token ``i + d2t[i]`` (SpecForge and all
that copied its ``process_token_dict_to_mappings``; EAGLE; vLLM and upstream read it so). Some write *token ids*: draft
token i is token ``d2t[i]`` (verl-SpeCo before its pull request 67). ``t2d`` marks the same tokens in the target's
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ids = NDArray[np.int64]
    Mask = NDArray[np.bool_]

Form = Literal["offsets", "token ids"]


def form(stored: Ids, mask: Mask | None, target: int) -> Form:
    """Which of the two `stored` (int64 ``[draft vocabulary]``) holds.

    What is no vocabulary in one form is read in the other. Where both would be one, ``t2d`` decides (`mask`, bool
    ``[target vocabulary]``), else the values: ids in ascending order rise at every step, and offsets that do so would
    leave out every second token of the target at least.

    Args:
        target: size of the target's vocabulary.
    """
    import numpy as np

    moved = stored + np.arange(len(stored))
    if not _is_vocabulary(stored, target):
        return "offsets"
    if not _is_vocabulary(moved, target):
        return "token ids"
    if mask is not None and len(mask) == target:
        marked = np.flatnonzero(mask)
        for ids, found in ((moved, "offsets"), (stored, "token ids")):
            if np.array_equal(np.sort(ids), marked):
                return found  # type: ignore[return-value]
    return "token ids" if len(stored) > 1 and bool((np.diff(stored) > 0).all()) else "offsets"


def ids(stored: Ids, read_as: Form) -> Ids:
    """The target's token id of each draft token, int64 ``[draft vocabulary]``."""
    import numpy as np

    return stored if read_as == "token ids" else stored + np.arange(len(stored))


def _is_vocabulary(found: Ids, target: int) -> bool:
    import numpy as np

    return len(found) > 0 and found.min() >= 0 and found.max() < target and len(np.unique(found)) == len(found)


def findings(stored: Ids, mask: Mask | None, target: int, name: str, read_as: Form) -> Iterator[tuple[bool, str]]:
    """What is wrong with a vocabulary; ``True``: it cannot work.

    Args:
        name: of the tensor `stored`, for messages.
    """
    import numpy as np

    found, size = ids(stored, read_as), len(stored)
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= target:
        hint = (
            "; these look like token ids themselves, not offsets from the draft's own ids"
            if read_as == "offsets" and _is_vocabulary(stored, target)
            else ""
        )
        yield (
            True,
            f"{name} + position gives token ids from {low} to {high}, but the target has ids 0 to {target - 1}{hint}",
        )
        return
    distinct = len(np.unique(found))
    if distinct != size:
        yield True, f"{name} gives {distinct} different token ids to {size} draft tokens; each needs its own"
        return
    falls = np.flatnonzero(np.diff(found) <= 0)
    if len(falls):
        at = int(falls[0]) + 1
        # A mask keeps no order but the ascending one, so a draft that was trained with one has ascending ids.
        yield (
            mask is not None,
            f"{name} gives token ids out of order (draft token {at} is {int(found[at])} after {int(found[at - 1])}), "
            "but draft vocabularies are cut out of the target's in ascending order",
        )
    elif mask is not None and len(mask) != target:
        yield len(mask) <= high, f"tensor t2d has {len(mask)} entries, but the target's vocab_size is {target}"
    elif mask is not None and not np.array_equal(np.flatnonzero(mask), found):
        there = int(mask.sum())
        yield (
            there == size,
            f"tensor t2d marks {there} tokens of the target and d2t names {size}: {int(mask[found].sum())} are in both",
        )


def by_mask(mask: Mask | None, size: int, target: int) -> Ids | None:
    """The vocabulary of a draft without ``d2t``: the `size` tokens that ``t2d`` marks, ascending; None if it does not.

    Training fills the head in that order, as no mask keeps another (``process_token_dict_to_mappings`` sorts).
    """
    import numpy as np

    if mask is None or len(mask) != target or int(mask.sum()) != size:
        return None
    return np.flatnonzero(mask)
