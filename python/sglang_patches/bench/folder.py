"""A result folder: `result.json`, `samples.jsonl`, `plot.png` and `README.md`, written whole or not at all, and read.

`result.json` is written last, so a folder that has one is finished. JSON knows neither infinity nor NaN: in `analysis`
they are written as null (a bound that is null is no bound), and a turn's figure that is no finite number is left out.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from sglang_patches.bench import readme
from sglang_patches.bench.model import Result, Sample, Turn
from sglang_patches.document import schema
from sglang_patches.document.unnamed import unnamed
from sglang_patches.errors import PatchError, of_file

RESULT, SAMPLES, PLOT, README = "result.json", "samples.jsonl", "plot.png", "README.md"
VERSION = 2
# Of version 1 every process lists its libraries itself.
_READ = (1, 2)
KINDS: tuple[str, ...] = get_args(Result.model_fields["kind"].annotation)


def write(folder: Path, result: Result, samples: Iterable[Sample] | None = None) -> None:
    """Write the files of a result folder, made if it is missing; each is replaced at once, never half written.

    Args:
        folder: its name becomes the result's.
        samples: for `samples.jsonl`; None leaves the file that a run has appended to as it is.

    Raises:
        OSError: a file cannot be written; those that were there before are untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    result = result.model_copy(update={"name": folder.resolve().name})
    if samples is not None:
        replace(folder / SAMPLES, "".join(f"{sample.model_dump_json()}\n" for sample in samples))
    count = count_samples(folder)
    replace(folder / README, readme.text(result, count.by_arm, (folder / PLOT).exists()))
    replace(folder / RESULT, dumps(result))


def replace(file: Path, content: str | bytes) -> None:
    """Write a file so that a reader, also after a crash, sees the former content or all of `content`."""
    with of_file(file):
        handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        try:
            with os.fdopen(handle, "wb") as new:
                new.write(content.encode() if isinstance(content, str) else content)
                new.flush()
                os.fsync(new.fileno())
            os.chmod(name, 0o644)  # mkstemp lets nobody else read it
            os.replace(name, file)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def when(folder: Path) -> str:
    """The time that a folder's result tells; empty where it has none."""
    try:
        told = json.loads((folder / RESULT).read_text(encoding="utf-8"))["when"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return str(told)


def measured(turns: Iterable[Turn], folder: Path) -> str:
    """When measuring ended: of the last turn, UTC, ISO 8601, whenever the result is written anew.

    Of turns that do not tell it, as those of earlier releases, what the folder's result told before; else now.
    """
    times = [turn.ended for turn in turns]
    known = [time for time in (*times, *([] if all(times) else [when(folder)])) if time]
    return max(known, default=datetime.now(UTC).isoformat(timespec="seconds"))


def dumps(result: Result) -> str:
    """`result.json` as text: strict JSON, a value a line so that versions of a file can be compared.

    Libraries are told once (`schema.shared`), and GPUs by a digest (`unnamed`).
    """
    turns = [
        turn.model_copy(update={"figures": {name: x for name, x in turn.figures.items() if math.isfinite(x)}})
        for turn in result.turns
    ]
    data = result.model_copy(update={"turns": turns}).model_dump(mode="json")
    return json.dumps(schema.shared(unnamed(_finite(data))), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def load(folder: Path) -> Result:
    """The result in a folder, or in its `result.json` when that is named.

    Raises:
        PatchError: it is not there, not JSON, no result of `sglang-patches bench`, one of another schema version, or
            it does not fit the schema; the message names the file, what was found and what to do.
    """
    file = folder / RESULT if folder.is_dir() else folder
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PatchError(_missing(folder)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise PatchError(f"{file}: cannot be read: {error}\n  remedy     name a result folder") from None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PatchError(
            f"{file}: not JSON: {error}\n"
            f"  seen       {len(text)} characters, beginning with {text[:40]!r}\n"
            f"  remedy     restore it (git checkout {file}), or run the command in {README} beside it again"
        ) from None
    return parse(data, str(file))


def parse(data: Any, name: str) -> Result:
    """The result in JSON data.

    Args:
        name: of the file, for messages.

    Raises:
        PatchError: as `load` says.
    """
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind not in KINDS:
        raise PatchError(
            f"{name}: no result of `sglang-patches bench`\n"
            f'  seen       "kind": {json.dumps(kind)}\n'
            f"  expected   one of {', '.join(KINDS)}\n"
            f"  remedy     name a folder that `sglang-patches bench` wrote"
        )
    version = data.get("schema_version")
    if version not in _READ or isinstance(version, bool):
        newer = isinstance(version, int) and version > VERSION
        raise PatchError(
            f"{name}: result of schema version {version!r}\n"
            f"  expected   version {' or '.join(map(str, _READ))}\n"
            f"  remedy     {'install the newer sglang-patches that wrote it' if newer else 'measure again'}"
        )
    try:
        return Result.model_validate({**schema.unshared(data), "schema_version": VERSION})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        seen = repr(first.get("input"))
        raise PatchError(
            f"{name}: not a result of version {VERSION}: {place}: {first['msg']}\n"
            f"  seen       {seen if len(seen) <= 100 else seen[:97] + '...'}\n"
            f"  expected   what docs/result.schema.json says ({error.error_count()} places differ from it)\n"
            f"  remedy     restore the file, or run the command in {README} beside it again"
        ) from None


def _missing(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: no such folder\n  remedy     name a result folder, such as benchmark/results/NAME"
    there = sorted(entry.name for entry in folder.iterdir())
    unfinished = any(name in there for name in ("turns.jsonl", SAMPLES))
    return (
        f"{folder}: holds no {RESULT}\n"
        f"  seen       {', '.join(there[:8]) or 'an empty folder'}{', ...' if len(there) > 8 else ''}\n"
        f"  remedy     "
        + ("the run did not finish: the same command continues it" if unfinished else "name a result folder")
    )


@dataclass
class Count:
    """How many samples a folder holds. `unreadable`: lines that are none, as a crash may leave the last one."""

    by_arm: dict[str, int] = field(default_factory=dict)
    failed: int = 0
    unreadable: int = 0

    @property
    def total(self) -> int:
        """Requests, failed ones included."""
        return sum(self.by_arm.values())


def count_samples(folder: Path) -> Count:
    """Count the samples by arm, without checking every field; none where there is no `samples.jsonl`.

    `bench verify-step` keeps records of several sorts instead of requests: those are counted by sort.
    """
    count = Count()
    try:
        with (folder / SAMPLES).open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    sample = json.loads(line)
                    arm = str(sample["arm"] if "arm" in sample else sample["record"])
                except (ValueError, KeyError, TypeError, RecursionError):
                    count.unreadable += 1
                    continue
                count.by_arm[arm] = count.by_arm.get(arm, 0) + 1
                count.failed += bool(sample.get("error"))
    except FileNotFoundError:
        pass
    return count


def samples(folder: Path) -> Iterator[Sample]:
    """The samples of a folder, one by one.

    Raises:
        PatchError: a line is no sample; names the line. A last line without its end, which a crash leaves, is no error.
        OSError: there is no `samples.jsonl`, or it cannot be read.
    """
    file = folder / SAMPLES
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield Sample.model_validate_json(line)
            except ValidationError as error:
                if not line.endswith("\n"):
                    return
                first = error.errors()[0]
                raise PatchError(
                    f"{file}: line {number} is no sample: {'.'.join(map(str, first['loc']))}: {first['msg']}\n"
                    f"  remedy     take the line away, or restore the file"
                ) from None


def json_schema() -> str:
    """The published JSON Schema of `result.json` (docs/result.schema.json), as text."""
    told = Result.model_json_schema()
    # As `schema.shared` has them.
    told["properties"]["libraries"] = {"type": "array", "items": {"$ref": "#/$defs/Library"}}
    told["required"] = [*told["required"], "libraries"]
    told["$defs"]["Process"]["properties"]["libraries"] = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0},
        "description": "Indices into the list at the top of the file.",
    }
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"sglang-patches.bench-result.v{VERSION}",
        **told,
    }
    return json.dumps(whole, indent=2) + "\n"
