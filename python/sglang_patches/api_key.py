"""The server's API keys: where they come from, and how the server gets them without their being on a command line.

Every user of a machine can read a command line, and it ends up in logs. Upstream takes keys as arguments or from the
file of ``--config`` (``server_args_config_parser.py`` in 0.5.23), so `launch` writes them into a file in memory that
only this process and the server it becomes hold open.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from sglang_patches import cache
from sglang_patches.errors import PatchError
from sglang_patches.trust import distrusted, folder_of_ones_own

# Upstream's options, and the variables that `collect` reads; with _FILE, the file that holds the key.
VARIABLES = {"--api-key": "SGLANG_API_KEY", "--admin-api-key": "SGLANG_ADMIN_API_KEY"}


def collect(given: Mapping[str, str | None], environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Option of upstream to (key, where it comes from), for each key there is.

    Args:
        given: the keys on the command line by option; None where it has none. They win over variables, and an empty
            one says that the server has none.
        environ: has the variables.

    Raises:
        PatchError: a key cannot be read, or upstream could not compare it with a header.
    """
    found = {}
    for option, variable in VARIABLES.items():
        key, source = given.get(option), option
        if key is None and (file := environ.get(f"{variable}_FILE")):
            source = f"{variable}_FILE={file}"
            try:
                key = Path(file).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise PatchError(
                    f"{variable}_FILE: {file} cannot be read: {error}\n"
                    f"  remedy     let it name a file that this user (uid {os.geteuid()}) can read, with the key in it"
                ) from None
            if not key:
                raise PatchError(f"{source}: the file is empty\n  remedy     write the key into it")
        elif key is None:
            key, source = environ.get(variable), variable
        if not key:
            continue
        if not key.isascii() or not key.isprintable() or " " in key or key.startswith("-"):
            raise PatchError(
                f"{source}: the key cannot be used\n"
                f"  expected   visible ASCII characters without spaces, not beginning with '-'\n"
                f"  remedy     make one: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
            )
        found[option] = key, source
    return found


def of_requests(given: str) -> str:
    """The key for requests to a server: `given`, else as a server gets it (`SGLANG_API_KEY_FILE`, `SGLANG_API_KEY`);
    empty for none.

    Raises:
        PatchError: as `collect`.
    """
    option = "--api-key"
    names = (VARIABLES[option], f"{VARIABLES[option]}_FILE")
    found = collect({option: given or None}, {name: os.environ[name] for name in names if name in os.environ})
    return found[option][0] if option in found else ""


def refuse_abbreviations(words: Sequence[str]) -> None:
    """Raise PatchError where upstream's parser would take one of a server's arguments for a key's option.

    It takes every beginning of an option that is no other's, and such a key would stay on the line.
    """
    for word in words:
        name = word.partition("=")[0]
        for option in VARIABLES:
            if name.startswith("--") and len(name) > 2 and name != option and option.startswith(name):
                raise PatchError(
                    f"{name}: an abbreviation of {option}\n  remedy     write it in full, or set {VARIABLES[option]}"
                )


def config(words: Sequence[str]) -> tuple[str | None, Mapping[str, Any]]:
    """The file after ``--config`` among a server's arguments, and what it says."""
    if "--config" not in words[:-1]:
        return None, {}
    file = words[words.index("--config") + 1]
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return file, {}  # upstream will say what is wrong with it
    return file, content if isinstance(content, dict) else {}


def in_config(words: Sequence[str]) -> tuple[str | None, bool]:
    """The file after ``--config`` among a server's arguments, and whether it has an API key."""
    file, content = config(words)
    return file, bool(content.get("api-key") or content.get("api_key"))


def header(words: Sequence[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """Words of a shell that give curl the API key of a server with these arguments, and a line that comes before them.

    The key itself is in neither: the words name the variable or the file that has it by `environ`, else the variable
    that the commands here read, and the line sets it. Both are empty where there is no key, the line where it is set.
    """
    option = "--api-key"
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(option)
    key = parser.parse_known_args(list(words))[0].api_key
    if not key and not (key is None and in_config(words)[1]):
        return "", ""
    variable = VARIABLES[option]
    told, before, file = f"${variable}", f"export {variable}=...   # the server's key", environ.get(f"{variable}_FILE")
    if key and environ.get(variable) == key:
        before = ""
    elif key and file:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if Path(file).read_text(encoding="utf-8").strip() == key:
                told, before = f"$(cat {shlex.quote(file)})", ""
    return f' -H "Authorization: Bearer {told}"', before


def required(recipe: str) -> PatchError:
    """The refusal to serve without a key."""
    return PatchError(
        f"recipe {recipe} serves with an API key, and there is none\n"
        f"  remedy     export SGLANG_API_KEY=... or SGLANG_API_KEY_FILE=/path/of/a/file, for instance\n"
        f"             export SGLANG_API_KEY=\"$(python -c 'import secrets; print(secrets.token_urlsafe(32))')\"\n"
        f"  or         serve everybody who reaches the port: --api-key="
    )


def hand_over(keys: Mapping[str, str]) -> list[str]:
    """Arguments that give upstream these keys (option to key), for the program that this process becomes by `exec`.

    They name a link to a file in memory, which that program inherits and no other process has.
    """
    content = json.dumps({option.removeprefix("--"): key for option, key in keys.items()})
    descriptor = os.memfd_create("sglang-api-keys", 0)
    os.write(descriptor, content.encode())
    # Upstream wants a name that ends in .yaml. The link itself is no secret, and one serves every start.
    return ["--config", _link(f"keys-{descriptor}.yaml", f"/proc/self/fd/{descriptor}")]


def _link(name: str, target: str) -> str:
    """A link to `target` in the first folder where nobody else can make it lead elsewhere."""
    problems = []
    places: tuple[Callable[[], str], ...] = (cache.folder, cache.default_folder, _temporary)
    for place in places:
        folder = "temporary folder"
        try:
            folder = place()
            link = os.path.join(folder, name)
            if reason := distrusted(folder):
                raise PermissionError(reason)
            cache.make_folder(folder)
            if not (os.path.islink(link) and os.readlink(link) == target):
                os.symlink(target, link)
            if reason := distrusted(folder):
                raise PermissionError(reason)
            return link
        except OSError as error:
            problems.append(f"  {folder}: {error}")
    raise PatchError(
        "the API key cannot be handed over: no folder takes a link that nobody else can change\n"
        + "\n".join(problems)
        + f"\n  remedy     set SGLANG_PATCHES_CACHE to {folder_of_ones_own()}"
    )


def _temporary() -> str:
    return tempfile.mkdtemp(prefix="sglang-patches-keys-")  # nobody can be first with a name that is not known
