"""What a checkpoint's safetensors headers say, without loading a weight."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

INDEX = "model.safetensors.index.json"
_SNAPSHOTS = "snapshots"
_ONE_OF = re.compile(r"-\d+-of-\d+\.safetensors$")
_PART = re.compile(r"-\d+-of-\d+\.\w+$")
_LONGEST_HEADER = 100 << 20  # safetensors' own limit


class UnreadableCheckpoint(ValueError):
    """A file of a checkpoint is missing or is no safetensors file; the message names it."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: ``dtype`` as safetensors spells it (``BF16``, ``I64``, ``BOOL``), its shape, the file it is in."""

    dtype: str
    shape: tuple[int, ...]
    file: Path


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checkpoint folder, by the names that the files give them."""

    folder: Path
    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> NDArray[np.generic]:
        """One tensor of integers or bools.

        Raises `UnreadableCheckpoint`.
        """
        import safetensors

        try:
            with safetensors.safe_open(self.tensors[name].file, framework="np") as file:
                return file.get_tensor(name)
        except (OSError, safetensors.SafetensorError) as error:
            raise UnreadableCheckpoint(
                f"{self.tensors[name].file} is no readable safetensors file ({error}): download the draft again"
            ) from error


def _header(file: Path) -> dict[str, TensorInfo]:
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > _LONGEST_HEADER:
                raise ValueError(f"header of {length} bytes")
            entries: dict[str, Any] = json.loads(opened.read(length))
        entries.pop("__metadata__", None)
        size, wanted = (
            file.stat().st_size,
            8 + length + max((e["data_offsets"][1] for e in entries.values()), default=0),
        )
        if size < wanted:
            raise ValueError(f"it has {size} bytes of the {wanted} that its header tells of")
        return {name: TensorInfo(entry["dtype"], tuple(entry["shape"]), file) for name, entry in entries.items()}
    except (OSError, ValueError, struct.error, AttributeError, KeyError, TypeError, IndexError) as error:
        raise UnreadableCheckpoint(
            f"{file} is no readable safetensors file ({error}): download the draft again"
        ) from error


def _named(index: Path) -> list[str]:
    """Files that an index names."""
    try:
        return sorted(set(json.loads(index.read_text()).get("weight_map", {}).values()))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UnreadableCheckpoint(f"{index} is no readable index ({error}): download the draft again") from error


def read_headers(folder: Path) -> Checkpoint | None:
    """The headers of all weight files that upstream's loader would read, or None where there is no safetensors file.

    Raises `UnreadableCheckpoint` for a broken file, or one that the index names and the folder lacks.
    """
    files = sorted(folder.glob("*.safetensors"))
    index = folder / INDEX
    if index.is_file() and files:
        named = _named(index)
        missing = [name for name in named if not (folder / name).is_file()]
        if missing and _SNAPSHOTS in folder.parts:
            return None  # a hub's cache: upstream's loader downloads the rest
        if missing:
            raise UnreadableCheckpoint(
                f"{index} names {', '.join(missing)}, which {folder} lacks: download the draft again"
            )
        files = [folder / name for name in named]
    elif _SNAPSHOTS in folder.parts and any(_ONE_OF.search(file.name) for file in files):
        return None  # likewise, and the index is not there yet
    if not files:
        return None
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        tensors |= _header(file)
    return Checkpoint(folder, tensors)


def has_all_weights(folder: Path) -> bool:
    """Whether the weight files that an index of the folder names are there, or all parts where there is no index.

    Upstream's loader takes the parts it finds, in a hub's cache that may not be asked for more, and serves what it has.
    """
    named = [file for file in folder.glob("*.index.json") if file.is_file()]
    for index in named:
        try:
            parts = _named(index)
            if parts and all((folder / part).is_file() for part in parts):
                return True
        except UnreadableCheckpoint:
            continue
    found = [file.name for form in ("safetensors", "bin", "gguf", "pt") for file in folder.glob(f"*.{form}")]
    return not named and bool(found) and not any(_PART.search(name) for name in found)


def local_config(model: str, revision: str | None, cache_dir: str | None) -> dict[str, Any] | None:
    """The ``config.json`` of `model`, as for `local_folder`; None where it is not here, or is no JSON object."""
    folder = local_folder(model, revision, cache_dir)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder else None
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def local_folder(model: str, revision: str | None, cache_dir: str | None) -> Path | None:
    """The folder of `model`, a path or a hub name, where its files are on this machine; None where they are not yet.

    Of a hub's cache also a folder that lacks some: upstream fetches no README, for one, and serves what it fetched.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except Exception as error:  # not in the cache, or no hub name at all (an object store, say): upstream will tell
        incomplete = getattr(error, "snapshot_path", None)
        return Path(incomplete) if incomplete else None
