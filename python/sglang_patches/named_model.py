"""A model as a person names it, a folder or OWNER/MODEL of the hub, and what to say where it is not on this machine.

A server takes more than what is read here: a GGUF file or one of the hub, Mistral's own format, the address of an
object store, a model of ModelScope. Of those nothing is refused that upstream could load.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from sglang_patches import hub
from sglang_patches.draft.checkpoint import has_all_weights, local_folder
from sglang_patches.errors import PatchError, first_missing

OFFLINE = "HF_HUB_OFFLINE"
# Both are read by huggingface_hub, the second where the first is unset or empty.
_OFFLINE = (OFFLINE, "TRANSFORMERS_OFFLINE")
_TRUE = ("1", "ON", "YES", "TRUE")
_TRUE_UPSTREAM = ("1", "TRUE", "YES", "Y")
_THE_HUB = "the hub"
_MODELSCOPE = "SGLANG_USE_MODELSCOPE"
_ON_THE_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")
# As upstream's server reads them: OWNER/MODEL:QUANTIZATION, and OWNER/MODEL/PATH.gguf.
_GGUF_ON_THE_HUB = re.compile(r"(?P<model>[\w.-]+/[\w.-]+)(:[\w.-]+|/(?P<file>[\w./-]+\.gguf))")
# Mistral's own format, and an adapter that names the model it is for.
_OTHER_FORMS = ("params.json", "head.pt")
_ADDRESS = re.compile(r".+://.*")
_A_FOLDER = "the folder of a downloaded model"
_ANY = f"{_A_FOLDER}, or a hub name such as OWNER/MODEL"


@dataclass(frozen=True)
class Absence:
    """Why a model's files cannot be read here.

    Attributes:
        seen: what there is in its place.
        remedy: what to do.
        fetched: whom a server asks for it at start; empty where it asks nobody.
        here: it is on this machine, in a form that only a server reads.
    """

    seen: str
    remedy: str
    fetched: str = ""
    here: bool = False

    def __str__(self) -> str:
        return f"{self.seen}\n  remedy     {self.remedy}"


def is_path(model: str) -> bool:
    """Whether a model's name is meant as a folder, and not as OWNER/MODEL of the hub."""
    on_the_hub = _ON_THE_HUB.fullmatch(model) or _GGUF_ON_THE_HUB.fullmatch(model)
    return Path(model).exists() or model.startswith((".", "/", "~")) or not on_the_hub


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
    given = os.environ if environ is None else environ
    return replace(_why(model, folder, given), here=_only_a_server_reads(model, folder, given, revision))


def _why(model: str, folder: Path | None, given: Mapping[str, str]) -> Absence:
    if _ADDRESS.fullmatch(model):
        return Absence("that is an address, which only a server reads", _A_FOLDER, fetched="the store of that address")
    if is_path(model):
        return _no_folder(Path(model))
    if _from_modelscope(given):
        seen = f"no folder has that name; by {_MODELSCOPE}={given[_MODELSCOPE]} ModelScope is asked and not the hub"
        return Absence(seen, f"modelscope download {model}, and the folder that it names", fetched="ModelScope")
    if folder is not None:
        seen = f"its copy in the hub's cache, {folder}, has no config.json"
    else:
        seen = "no folder has that name, and the hub's cache of this machine has no such model"
    forbidden = offline(given)
    if forbidden:
        seen += f"; {forbidden} keeps from asking the hub"
    fetched = "" if forbidden else _THE_HUB
    if "/" not in model:
        # The hub has names without an owner for a few of its oldest models only.
        return Absence(seen, _ANY, fetched=fetched)
    first = f"unset {forbidden.partition('=')[0]} and: " if forbidden else ""
    file = _GGUF_ON_THE_HUB.fullmatch(model)
    words = " ".join(filter(None, file.group("model", "file"))) if file else model
    remedy = f"{first}hf download {words}; where the hub cannot be reached, {_A_FOLDER}"
    return Absence(seen, remedy, fetched=fetched)


def _no_folder(path: Path) -> Absence:
    if path.is_dir():
        return Absence("that folder has no config.json, so it holds no model", _ANY)
    if path.exists():
        beside = (path.parent / "config.json").is_file()
        return Absence("that is a file", f"its folder: {path.parent}" if beside else _ANY)
    return Absence(f"there is no such folder{first_missing(path)}", _ANY)


def folder(what: str, model: str, environ: Mapping[str, str] | None = None) -> Path:
    """The folder of a model whose files are read here: the one that is named, or the hub's copy on this machine.

    Args:
        what: the option or role that names it, for the message.
        environ: as in `absence`.

    Raises:
        PatchError: it is not here.
    """
    missing = absence(model, environ)
    if missing is not None:
        raise PatchError(f"{what} {model}: {missing}")
    found = local_folder(model, None, _cache(environ))
    assert found is not None
    return found


def _only_a_server_reads(model: str, folder: Path | None, given: Mapping[str, str], revision: str | None) -> bool:
    """Whether a model without a ``config.json`` in `folder` is on this machine all the same."""
    if Path(model).is_file():
        return _is_gguf(Path(model))
    if (file := _GGUF_ON_THE_HUB.fullmatch(model)) and file["file"]:
        from huggingface_hub import try_to_load_from_cache

        try:
            return isinstance(try_to_load_from_cache(file["model"], file["file"], _cache(given), revision), str)
        except ValueError:  # no name that the hub could have
            return False
    if folder is not None:
        return any((folder / name).is_file() for name in _OTHER_FORMS)
    older = given.get("TRANSFORMERS_CACHE") if _reads_older_cache() else None
    return bool(older) and local_folder(model, revision, older) is not None


def _reads_older_cache() -> bool:
    """Whether the transformers that serves reads TRANSFORMERS_CACHE: before release 5."""
    try:
        return int(metadata.version("transformers").partition(".")[0]) < 5
    except (metadata.PackageNotFoundError, ValueError):
        return False


def _is_gguf(file: Path) -> bool:
    """As upstream tells it."""
    if file.suffix == ".gguf":
        return True
    try:
        with file.open("rb") as opened:
            return opened.read(4) == b"GGUF"
    except OSError:
        return False


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
    if missing is None or missing.here:
        return None
    if not missing.fetched:
        raise PatchError(f"{what} {model}: {missing}")
    return missing


def refuse_unreachable(absent: Mapping[str, Absence], environ: Mapping[str, str] | None = None) -> None:
    """Refuse a start whose server would ask the hub for a model, where the hub cannot be reached.

    Upstream tries for about a minute and ends in the error of a library. Asked last, because it is the network that is
    asked: nothing is, where no model is to come from the hub.

    Args:
        absent: what `servable` gave, by option or role and name.
        environ: as in `absence`.

    Raises:
        PatchError: it cannot.
    """
    asked = {name: missing for name, missing in absent.items() if missing.fetched == _THE_HUB}
    why = hub.unreachable(environ) if asked else ""
    for name, missing in asked.items():
        if why:
            remedy = f"{_A_FOLDER}, or HF_ENDPOINT=URL of a hub that can be reached"
            raise PatchError(f"{name}: {replace(missing, seen=f'{missing.seen}; {why}', remedy=remedy)}")


def cached(model: str, environ: Mapping[str, str], revision: str | None) -> Path | None:
    """The folder of a hub's model in its cache on this machine; None for any other, and where it is not there."""
    if is_path(model):
        return None
    found = local_folder(model, revision, _cache(environ))
    return found if found is not None and (found / "config.json").is_file() else None


def unreachable_for(copies: Mapping[str, Path], environ: Mapping[str, str]) -> str:
    """Why a server cannot ask the hub about models that its cache has.

    Empty where it can or would not ask, and where the operator has said whether it shall (HF_HUB_OFFLINE is set).

    Args:
        copies: their folders in the cache, by role and name.
        environ: of the server.

    Raises:
        PatchError: it cannot, and a copy lacks weights, which a server would take as they come from memory.
    """
    said = environ.get(OFFLINE) or offline(environ)
    why = hub.unreachable(environ) if copies and not said and not _from_modelscope(environ) else ""
    for name, folder in copies.items():
        if why and not has_all_weights(folder):
            raise PatchError(
                f"{name}: its copy in the hub's cache, {folder}, lacks weight files; {why}\n"
                f"  remedy     {_A_FOLDER}, or HF_ENDPOINT=URL of a hub that can be reached"
            )
    return why


def settled(copies: Mapping[str, Path], environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """The environment of a server whose models are in the hub's cache: where the hub cannot be reached it is not asked.

    Upstream asks it for files that are here, too, and tries for minutes each.

    Args:
        copies, environ: as in `unreachable_for`.

    Returns: the environment, and what was settled in words; empty where nothing was.

    Raises:
        PatchError: as `unreachable_for`.
    """
    why = unreachable_for(copies, environ)
    if not why:
        return dict(environ), ""
    told = f"{why}: {', '.join(copies)} from its cache on this machine ({OFFLINE}=1; with =0 the server asks anyway)"
    return {**environ, OFFLINE: "1"}, told


def _from_modelscope(environ: Mapping[str, str]) -> bool:
    return environ.get(_MODELSCOPE, "").upper() in _TRUE_UPSTREAM
