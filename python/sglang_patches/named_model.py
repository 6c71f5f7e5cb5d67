"""A model as a person names it, a folder or OWNER/MODEL of the hub, and what to say where it is not on this machine."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_patches.draft.checkpoint import local_folder
from sglang_patches.errors import PatchError, first_missing

# Both are read by huggingface_hub, the second where the first is unset or empty.
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE = ("1", "ON", "YES", "TRUE")
_ON_THE_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")
_A_FOLDER = "the folder of a downloaded model"
_ANY = f"{_A_FOLDER}, or a hub name such as OWNER/MODEL"


@dataclass(frozen=True)
class Absence:
    """Why a model's files cannot be read here.

    Attributes:
        seen: what there is in its place.
        remedy: what to do.
        fetched: a server asks the hub for it at start.
    """

    seen: str
    remedy: str
    fetched: bool = False

    def __str__(self) -> str:
        return f"{self.seen}\n  remedy     {self.remedy}"


def is_path(model: str) -> bool:
    """Whether a model's name is meant as a folder, and not as OWNER/MODEL of the hub."""
    return Path(model).exists() or model.startswith((".", "/", "~")) or not _ON_THE_HUB.fullmatch(model)


def offline(environ: Mapping[str, str]) -> str:
    """The variable that keeps the hub from being asked, with its value; empty where none does."""
    name = next((name for name in _OFFLINE if environ.get(name)), "")
    return f"{name}={environ[name]}" if name and environ[name].upper() in _TRUE else ""


def _cache(environ: Mapping[str, str] | None) -> str | None:
    """The hub's cache of whoever has these variables, as huggingface_hub finds it; None: this process's."""
    given = environ or {}
    if home := given.get("HF_HOME"):
        home = str(Path(home).expanduser() / "hub")
    return given.get("HF_HUB_CACHE") or given.get("HUGGINGFACE_HUB_CACHE") or home or None


def revisions(server_args: Sequence[str]) -> tuple[str | None, str | None]:
    """The revisions of target and draft that arguments of ``sglang.launch_server`` ask for."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--revision")
    parser.add_argument("--speculative-draft-model-revision", dest="draft")
    given = parser.parse_known_args(list(server_args))[0]
    return given.revision, given.draft


def absence(model: str, environ: Mapping[str, str] | None = None, revision: str | None = None) -> Absence | None:
    """Why a model cannot be read here; None where its ``config.json`` is on this machine.

    Args:
        environ: of whoever would ask the hub; None: this process's.
        revision: of a model of the hub; None: its newest here.
    """
    folder = local_folder(model, revision, _cache(environ))
    if folder is not None and (folder / "config.json").is_file():
        return None
    if is_path(model):
        return _no_folder(Path(model))
    if folder is not None:
        seen = f"its copy in the hub's cache, {folder}, has no config.json"
    else:
        seen = "no folder has that name, and the hub's cache of this machine has no such model"
    forbidden = offline(os.environ if environ is None else environ)
    if forbidden:
        seen += f"; {forbidden} keeps from asking the hub"
    if "/" not in model:
        # The hub has names without an owner for a few of its oldest models only.
        return Absence(seen, _ANY, fetched=not forbidden)
    first = f"unset {forbidden.partition('=')[0]} and: " if forbidden else ""
    remedy = f"{first}hf download {model}; where the hub cannot be reached, {_A_FOLDER}"
    return Absence(seen, remedy, fetched=not forbidden)


def _no_folder(path: Path) -> Absence:
    if path.is_dir():
        return Absence("that folder has no config.json, so it holds no model", _ANY)
    if path.exists():
        beside = (path.parent / "config.json").is_file()
        return Absence("that is a file", f"its folder: {path.parent}" if beside else _ANY)
    return Absence(f"there is no such folder{first_missing(path)}", _ANY)


def folder(what: str, model: str) -> Path:
    """The folder of a model whose files are read here: the one that is named, or the hub's copy on this machine.

    Args:
        what: the option or role that names it, for the message.

    Raises:
        PatchError: it is not here.
    """
    missing = absence(model)
    if missing is not None:
        raise PatchError(f"{what} {model}: {missing}")
    found = local_folder(model, None, None)
    assert found is not None
    return found


def servable(
    what: str, model: str, environ: Mapping[str, str] | None = None, revision: str | None = None
) -> Absence | None:
    """Of a model that a server is to load: None where it is here, its absence where the server has to fetch it first.

    Args:
        what: as in `folder`.
        environ, revision: as in `absence`.

    Raises:
        PatchError: no server can get it.
    """
    missing = absence(model, environ, revision)
    if missing is not None and not missing.fetched:
        raise PatchError(f"{what} {model}: {missing}")
    return missing
