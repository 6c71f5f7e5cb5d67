"""What `sglang-patches port` does, without its options."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_patches import series
from sglang_patches.errors import PatchError
from sglang_patches.port import needs, wheels
from sglang_patches.port.carry import Carrier, Ported
from sglang_patches.port.wheels import Echo

Fetch = Callable[[str, Echo], wheels.Wheel]


def lane_to_port(name: str | None, to: str = "") -> series.Series:
    """The lane of that release; for None the newest one that is not that of `to`.

    Raises:
        PatchError: there is none.
    """
    folder = series.patches_folder()
    known = series.releases(folder)
    if not known:
        raise PatchError(f"{folder} has no lane\n  remedy     set SGLANG_PATCHES_DIR to the folder that has one")
    newest = [entry for entry in known if entry != to] or known
    chosen = newest[-1] if name is None else str(wheels.release(name))
    if chosen not in known:
        raise PatchError(
            f"no lane for SGLang {chosen} to carry\n"
            f"  lanes      {', '.join(known)} (in {folder})\n"
            f"  remedy     name one of them with --from"
        )
    return series.load(chosen)


def carry(
    source: series.Series, releases: Sequence[str], echo: Echo, fetch: Fetch = wheels.fetch
) -> dict[str, tuple[Carrier, list[Ported]]]:
    """Every patch carried to each of `releases`; nothing is written.

    Raises:
        PatchError: a wheel cannot be had, or a patch was not made for the release it is listed for.
    """
    old = fetch(source.release, echo)
    result = {}
    for name in releases:
        carrier = Carrier(old, fetch(name, echo), needs.missing)
        echo(f"sglang {name}: carrying {len(source.patches)} patches ...")
        result[name] = carrier, [carrier.carry(patch) for patch in source.patches]
    return result
