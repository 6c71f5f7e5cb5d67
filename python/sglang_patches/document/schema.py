"""The provenance document as a type: what it holds, its JSON Schema, and reading one back.

The version counts up whenever a reader of the former one would misread a document; new optional fields do not need it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sglang_patches.errors import PatchError

KIND = "sglang-patches.provenance"
VERSION = 1
#: The file of a result folder that embeds documents.
RESULT = "result.json"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PatchState(_Part):
    """One patch of the series, on or off."""

    name: str
    on: bool
    state: str = Field(description="applied, off, not needed, mismatch or inactive, as `sglang-patches status` says")
    reason: str = ""
    sha256: str = Field(description="Over the patch file and all code it brings.")


class Code(_Part):
    """Upstream's release and the patches on it."""

    id: str = Field(description="12 hexadecimal digits; equal exactly if release, patches on, order and code are.")
    release: str
    version: str | None = Field(description="Of this distribution; null where it runs from a source tree.")
    active: bool = Field(description="Whether the process loads patched modules at all.")
    patches: list[PatchState] = Field(description="The whole series, in order.")


class File(_Part):
    """One file of package `sglang` that is not what the wheel's RECORD says."""

    path: str = Field(description="As upstream names it: sglang/srt/server_args.py")
    sha256: str | None = Field(description="Of the file in use; null where a file of the wheel is gone.")
    by: Literal["patch", "edit"] = Field(description="patch: a patch of the series that is on makes this copy.")


class Library(_Part):
    """One shared library the process has loaded."""

    name: str
    path: str
    size: int = Field(description="Bytes.")
    sha256: str | None = Field(description="null: not hashed yet (a server hashes for a fraction of a second only).")


class Process(_Part):
    """What one process runs."""

    name: str = Field(description="environment, http, or a scheduler by its ranks: dp 0 pp 0 tp 0")
    patch_set_id: str
    files: list[File]
    libraries: list[Library]
    nccl: str | None = Field(description="Version of the NCCL that is loaded, as it tells itself.")


class Model(_Part):
    """Which model it is, by content."""

    path: str
    revision: str | None
    config_sha256: str | None
    index_sha256: str | None = Field(
        description="Of *.safetensors.index.json; without one, over names and sizes of the weight files."
    )
    weights_sample_sha256: str | None = Field(
        default=None,
        description="Over names, sizes and evenly spread blocks of the weight files: a model that was trained further "
        "has the same index. Null in documents of earlier releases.",
    )


class Gpu(_Part):
    """One GPU that the process may see. Clocks in MHz, power in W; null where the driver does not tell."""

    name: str
    uuid: str | None = Field(
        default=None, description="In results gpu: and a digest of it, which is the same for the same GPU."
    )
    sm_clock: int | None = None
    memory_clock: int | None = None
    max_sm_clock: int | None = None
    max_memory_clock: int | None = None
    power_limit: float | None = None


class Machine(_Part):
    """What it ran on."""

    cpu: str
    cpus: int = Field(description="That the process may use.")
    memory_gib: float
    kernel: str
    container: str | None = Field(description="Image or kind of container, where it can be told.")
    driver: str | None = Field(description="Of NVIDIA.")
    gpus: list[Gpu]
    topology: str = Field(description="GPUs and their connections, in words.")
    topology_fingerprint: str = Field(description="12 hexadecimal digits, equal for hosts of the same make.")


class Document(_Part):
    """Provenance of one server, or of one environment."""

    kind: Literal["sglang-patches.provenance"] = "sglang-patches.provenance"
    schema_version: Literal[1] = 1
    code: Code
    processes: list[Process]
    versions: dict[str, str | None] = Field(description="Of the libraries that matter; null: not installed.")
    command: list[str] = Field(description="Secrets are masked.")
    server_args: dict[str, Any] | None = Field(description="Resolved arguments of a server. Secrets are masked.")
    environment: dict[str, str] = Field(description="Variables that change what is computed. Secrets are masked.")
    models: dict[str, Model] = Field(description="By role: target, draft.")
    machine: Machine
    time: str | None = Field(default=None, description="ISO 8601 in UTC, only if asked for.")
    host: str | None = Field(default=None, description="Host name, only if asked for.")


def json_schema() -> str:
    """The published JSON Schema (docs/provenance.schema.json), as text."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"{KIND}.v{VERSION}",
        **Document.model_json_schema(),
    }
    return json.dumps(schema, indent=2) + "\n"


def find(data: Any) -> dict[str, Any] | None:
    """The first document in JSON data, outermost first: the data itself, or what a result file embeds.

    A server's comes before that of a process that only measured: what was measured is what a result is about.
    """
    level, first = [data], None
    while level:
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                if value.get("kind") != KIND:
                    below += value.values()
                elif value.get("server_args") is not None:
                    return value
                else:
                    first = first or value
            elif isinstance(value, list):
                below += value
        level = below
    return first


def shared(data: dict[str, Any]) -> dict[str, Any]:
    """JSON data with each library once: a list `libraries` at its top, and its indices where a process has some.

    Every process of every server loads about the same hundreds of libraries, which is nearly all of a result's size.
    """
    places: dict[str, int] = {}
    table: list[Any] = []

    def place(library: Any) -> int:
        key = json.dumps(library, sort_keys=True)
        if key not in places:
            places[key] = len(table)
            table.append(library)
        return places[key]

    return {**_with_libraries(data, place), "libraries": table}


def unshared(data: Any) -> Any:
    """What `shared` was given; data without a list at the top as it is. An index that is none stays one."""
    table = data.get("libraries") if isinstance(data, dict) else None
    if not isinstance(table, list):
        return data

    def library(place: Any) -> Any:
        return table[place] if isinstance(place, int) and 0 <= place < len(table) else place

    return _with_libraries({name: value for name, value in data.items() if name != "libraries"}, library)


def _with_libraries(value: Any, put: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        out = {name: _with_libraries(item, put) for name, item in value.items()}
        if "patch_set_id" in value and isinstance(value.get("libraries"), list):
            out["libraries"] = [put(item) for item in value["libraries"]]
        return out
    return [_with_libraries(item, put) for item in value] if isinstance(value, list) else value


def parse(data: Any, name: str) -> Document:
    """The document in JSON data.

    Args:
        data: a document, or anything that embeds one.
        name: of the file or server, for messages.

    Raises:
        PatchError: there is none, it has another schema version, or it does not fit the schema.
    """
    found = find(data)
    if found is None:
        raise PatchError(
            f"{name}: holds no provenance document\n"
            f'  expected   an object with "kind": "{KIND}", at any depth\n'
            f"  remedy     write one with: sglang-patches provenance --out FILE"
        )
    if found.get("schema_version") != VERSION:
        raise PatchError(
            f"{name}: provenance document of schema version {found.get('schema_version')!r}\n"
            f"  expected   version {VERSION}\n"
            f"  remedy     read it with the sglang-patches that wrote it, or write it again with this one"
        )
    try:
        return Document.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise PatchError(
            f"{name}: not a provenance document of version {VERSION}: {place}: {first['msg']}\n"
            f"  remedy     write it again with: sglang-patches provenance --out FILE"
        ) from None


def read(file: Path) -> Document:
    """The document in a file of JSON, or in the `result.json` of a folder.

    Raises:
        PatchError: it is not JSON, or as `parse` says.
        OSError: it cannot be read.
    """
    return parse(_json(file), str(file))


def pairs(a: Path, b: Path) -> tuple[list[tuple[str, Document, Document]], list[str]]:
    """What to compare: of two results the first server of each arm that both have; else the first document of each.

    Returns: (arm, document of a, document of b), the arm empty where it is not by arm; and the arms that either result
        has and that were left out, since the other lacks them or no server of theirs told a document.

    Raises:
        PatchError, OSError: as `read`.
    """
    one, other = _json(a), _json(b)
    there, here = _by_arm(one), _by_arm(other)
    both = [arm for arm, told in there.items() if told is not None and here.get(arm) is not None]
    if not both or len({*there, *here}) < 2:
        return [("", parse(one, str(a)), parse(other, str(b)))], []
    left = [arm for arm in dict.fromkeys([*there, *here]) if arm not in both]
    return [(arm, parse(there[arm], str(a)), parse(here[arm], str(b))) for arm in both], left


def _by_arm(data: Any) -> dict[str, Any]:
    """The first document of each arm among a result's turns; None where no server of an arm told one."""
    turns = data.get("turns") if isinstance(data, dict) else None
    found: dict[str, Any] = {}
    for turn in turns if isinstance(turns, list) else []:
        if isinstance(turn, dict) and isinstance(turn.get("arm"), str):
            told = turn["document"] if find(turn.get("document")) is not None else None
            found[turn["arm"]] = found.get(turn["arm"]) or told
    return found


def _json(file: Path) -> Any:
    if file.is_dir():  # a result folder, by whose name every other command goes
        file = file / RESULT
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise PatchError(f"{file}: not JSON: {error}\n  remedy     name a result or provenance file") from None
    return unshared(data)
