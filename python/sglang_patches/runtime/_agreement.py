"""How the ranks of a group come to one decision, at start: each says what it found, the first verdict is everyone's.

Goes through the default process group's key-value store: a rank on which a patch is off takes no part, and a collective
without it would hang.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta

# Ranks meet when a group is made, just before they compare, so a rank that takes longer will hardly come. Should it
# come all the same, it takes the verdict that the others reached without it (`first_verdict`).
_RANK_WAIT = timedelta(seconds=300)
_KEY = "sglang_patches/agreed"
# For ranks that have come already to read what all others said.
_READ_WAIT = timedelta(seconds=60)


def exchange(name: str, mine: str, rank: int, ranks: Sequence[int]) -> dict[int, str | None]:
    """What every rank of a group says under `name`, by global rank; None for one that says nothing in time.

    Every rank of `ranks` must call it, each `name` once. Needs the default process group. A rank that comes later than
    the others wait hears them all, while they did not hear it: decide with `first_verdict`.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    group = _key(name, ranks)
    store.set(f"{group}/{rank}", mine)
    said: dict[int, str | None] = {}
    for other in ranks:
        key = f"{group}/{other}"
        try:
            store.wait([key], _RANK_WAIT if None not in said.values() else timedelta(seconds=1))
            said[other] = store.get(key).decode()
        except RuntimeError as error:  # DistStoreError of a TCPStore; a FileStore raises no more than this
            if "timeout" not in str(error).lower():
                raise
            said[other] = None
    return said


def first_verdict(name: str, mine: str, ranks: Sequence[int]) -> str:
    """The verdict of the rank that was the first to reach one under `name`, for all ranks of a group alike."""
    from torch.distributed.distributed_c10d import _get_default_store

    # The marker keeps an empty verdict from looking like none.
    told = _get_default_store().compare_set(f"{_key(name, ranks)}/verdict", "", f"={mine}")
    return told.decode()[1:]


def before_refusing(name: str, rank: int, ranks: Sequence[int]) -> None:
    """Return once all of `ranks` have called this under `name`: each knows why it is about to end.

    One of them serves the store, as a rule the first. Did it end before the others have read, they would lose the
    connection, and report that in the place of the reason.

    Args:
        ranks: those that said something, this one among them; nobody waits for one that is silent.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    store, group = _get_default_store(), _key(name, ranks)
    # One that died meanwhile is no reason to hide this rank's own.
    with contextlib.suppress(RuntimeError):
        store.set(f"{group}/knows/{rank}", "")
        store.wait([f"{group}/knows/{other}" for other in ranks], _READ_WAIT)


def _key(name: str, ranks: Sequence[int]) -> str:
    return f"{_KEY}/{name}/{'-'.join(map(str, ranks))}"
