"""Tables of fused-MoE tiles beside upstream's: patch ``moe-config-tables``.

Upstream looks for a table by experts, intermediate size, GPU and type, first in its own package or in the folder that
``SGLANG_MOE_CONFIG_DIR`` names, for its Triton release and then for others. Where all of that has none, `find` looks in
the folder that ``SGLANG_PATCHES_MOE_TABLES`` names and in ``configs`` beside this file, which have the same layout, for
this Triton release alone: a table of another release is not measured here. ``sglang-patches tune moe`` writes them.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_patches.runtime import _outcome

PATCH = "moe-config-tables"
FOLDER = "SGLANG_PATCHES_MOE_TABLES"
SHIPPED = Path(__file__).parent

Table = dict[int, dict[str, Any]]

_NUMBERS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
_POWERS_OF_TWO = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps")
_MAY_HAVE = {"num_warps": int, "num_stages": int, "USE_TMA": bool}
_UPSTREAM = "upstream or SGLANG_MOE_CONFIG_DIR has its own"
_NOWHERE = "upstream looks for none: deterministic inference"

Answer = tuple[_outcome.Result, str]

# What `find` came to in each lookup under way: upstream's for the down projection asks for the other one inside.
_under_way: list[list[Answer]] = []
# Names of our tables that serve.
_served: set[str] = set()
# By shape, what each lookup came to.
_lookups: dict[str, Answer] = {}


class BadTable(ValueError):
    """A file that is no table of the kernel's configurations."""


def find(name: str, down: bool) -> Table | None:
    """Our table of upstream's file name, or None: then upstream goes on as it would.

    Called where upstream's own lookup has found none. A table of the down projection is taken only beside one of ours
    for gate and up: both share one sorting of tokens, so that tiles of different origin need not fit.
    """
    try:
        table, answer = _look(name, down, _release())
    except OSError as error:  # whatever it is, upstream's own choice can serve
        table, answer = None, ("failed", str(error))
    if _under_way:
        _under_way[-1].append(answer)
    return table


def _look(name: str, down: bool, release: str) -> tuple[Table | None, Answer]:
    if down and name.replace("_down.json", ".json") not in _served:
        return None, ("not needed", "none of ours without ours for gate and up")
    if fault := _fault(release):
        return None, ("failed", fault)
    for root in _roots():
        file = _place(root, release) / name
        try:
            if not _is_file(file):
                continue
            table = read(file)
        except (BadTable, OSError) as error:
            return None, ("failed", f"{file}: {error}")
        _served.add(name)
        return table, ("applied", str(file))
    return None, ("not needed", _none(name, release))


def read(file: Path) -> Table:
    """A table by token count.

    Raises:
        BadTable: not what upstream's kernel takes; a key that it does not know would end the server at its first batch.
    """
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        table = {int(tokens): entry for tokens, entry in told.items()}
    except (ValueError, AttributeError) as error:
        raise BadTable(f"no table: {error}") from None
    if not table:
        raise BadTable("no entry")
    for tokens, entry in table.items():
        if not isinstance(entry, dict):
            raise BadTable(f"at {tokens} tokens {entry!r}, expected an object")
        for key in _NUMBERS:
            if type(entry.get(key)) is not int or entry[key] < 1:
                raise BadTable(f"at {tokens} tokens {key} is {entry.get(key)!r}, expected a positive whole number")
        for key, value in entry.items():
            if key not in _NUMBERS and type(value) is not _MAY_HAVE.get(key):
                raise BadTable(f"at {tokens} tokens {key} is {value!r}, which upstream's kernel does not take")
        for key in _POWERS_OF_TWO:
            if (value := entry.get(key, 1)) < 1 or value & (value - 1):
                raise BadTable(f"at {tokens} tokens {key} is {value}, expected a power of two: Triton takes no other")
    return table


def tells(lookup: Callable[..., Any]) -> Callable[..., Any]:
    """Upstream's ``get_moe_configs``, below its cache, so once a shape: keeps what each lookup came to.

    Runs where a process imports upstream's module, so a folder that cannot be looked into is told at start.
    """
    signature = inspect.signature(lookup)
    if fault := _fault(_release()):
        _outcome.record(PATCH, "failed", fault)

    @functools.wraps(lookup)
    def told(*args: Any, **kwargs: Any) -> Any:
        _under_way.append([])
        try:
            found = lookup(*args, **kwargs)
        finally:
            answers = _under_way.pop()
        given = signature.bind(*args, **kwargs).arguments
        label = f"E={given['E']},N={given['N']}" + (f",{given['dtype']}" if given.get("dtype") else "")
        label += "_down" if given.get("down_moe") else ""
        _tell(label, answers[-1] if answers else ("not needed", _UPSTREAM if found else _NOWHERE))
        return found

    return told


def _tell(label: str, answer: Answer) -> None:
    _lookups[label] = answer
    order: tuple[_outcome.Result, ...] = ("failed", "applied", "not needed")
    result = min((result for result, _ in _lookups.values()), key=order.index)
    named = [f"{label}: {why}" for label, (its, why) in _lookups.items() if its == result]
    tables = {
        label: {"result": its, "table" if its == "applied" else "reason": why} for label, (its, why) in _lookups.items()
    }
    if fault := _fault(_release()):  # also where upstream has a table: the folder was named to be looked into
        result, named = "failed", [fault]
    _outcome.record(PATCH, result, "; ".join(named), lookups=tables)


def _roots() -> list[Path]:
    own = os.environ.get(FOLDER)
    return [*([Path(own)] if own else []), SHIPPED]


def _release() -> str:
    import triton

    return str(triton.__version__)


def _fault(release: str) -> str:
    """Why the folder that the variable names cannot be looked into; empty where it can, or none is named."""
    own = os.environ.get(FOLDER)
    if not own:
        return ""
    try:
        if not stat.S_ISDIR(os.stat(own).st_mode):
            return f"{FOLDER}={own} is no folder; name one that `sglang-patches tune moe` wrote"
        _is_file(_place(Path(own), release) / "any")
    except OSError as error:
        return (
            f"{FOLDER}={own}: {error.strerror} ({error.filename}); "
            f"name a folder that is there and that user {os.geteuid()} may read"
        )
    return ""


def _is_file(file: Path) -> bool:
    """Raises OSError where that cannot be told: a folder may not be searched, say."""
    try:
        return stat.S_ISREG(os.stat(file).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _place(root: Path, release: str) -> Path:
    return root / "configs" / f"triton_{release.replace('.', '_')}"


def _none(name: str, release: str) -> str:
    """Why there is none, with what to do."""
    others = sorted({file.parent.name for root in _roots() for file in root.glob(f"configs/triton_*/{_escaped(name)}")})
    if others:
        return f"no table {name} for Triton {release}, only in {', '.join(others)}: tune again"
    own = os.environ.get(FOLDER)
    if own and not os.path.isdir(os.path.join(own, "configs")):
        return f"no table {name}, and {FOLDER}={own} has no folder configs"
    return f"no table {name}: `sglang-patches tune moe` makes one"


def _escaped(name: str) -> str:
    """A name as a pattern: block shapes have brackets."""
    return name.replace("[", "[[]")
