"""Patches and their order: `patches/<release>/series` and the DEP-3-like header of each `<name>.patch`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

from sglang_patches import hunks
from sglang_patches.errors import PatchError
from sglang_patches.upstream import digest

Default = Literal["on", "off", "no-gpu"]

REQUIRED_FIELDS = ("Description", "Why", "Forwarded", "Last-Update", "Remove-When", "Default", "Pre-Image")
OPTIONAL_FIELDS = (
    "Origin",
    "Author",
    "Bug",
    "Applied-Upstream",
    "Requires",
    "Conflicts",
    "Provides",
    "Changes",
    "Lossless",
    "Adds",
)
REPEATABLE_FIELDS = ("Pre-Image", "Bug", "Provides", "Adds")

_NAME = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
_FIELD = re.compile(r"([A-Z][A-Za-z0-9-]*):(?: (.*))?")
_PRE_IMAGE = re.compile(r"([0-9a-f]{64}) (sglang/\S+\.py)")
_ADDS = re.compile(r"(sglang/\S+\.py) ([A-Za-z_][\w.]*)")
_PROVIDES = re.compile(r"([a-z_]\w*) = ([a-z_]\w*)")
_LEFT_OUT = re.compile(r"# Left out: (\S+) \((.*)\)\s*")


@dataclass(frozen=True)
class Patch:
    """One patch of a series.

    Attributes:
        header: the file's text before the diff, as it stands there.
        fields: header field to its values, in order; continuation lines joined with line feeds.
        pre_images: upstream path to the sha256 of the file the patch was made against.
        provides: module name to the package of this distribution that stands in for it (see `activate`).
        insertions: upstream path to what the patch inserts there.
        sha256: of the patch file.
        adds: upstream path and dotted name of what upstream lacks and the patch's code gives it (see `port`).
    """

    name: str
    file: Path
    header: str
    fields: dict[str, list[str]]
    default: Default
    requires: tuple[str, ...]
    conflicts: tuple[str, ...]
    provides: dict[str, str]
    pre_images: dict[str, str]
    insertions: dict[str, hunks.Insertions]
    sha256: str
    adds: tuple[tuple[str, str], ...] = ()

    def field(self, name: str) -> str:
        """A field's (first) value, or the empty string."""
        return self.fields.get(name, [""])[0]

    @property
    def summary(self) -> str:
        """The first line of the description."""
        return self.field("Description").partition("\n")[0]

    @cached_property
    def changes(self) -> tuple[str, ...]:
        """Patterns (`fnmatch`) of the variables and `--options` of a server that the patch itself sets."""
        return tuple(" ".join(self.fields.get("Changes", [])).replace(",", " ").split())

    @property
    def lossless(self) -> bool:
        """Whether a server answers the same with the patch and without, rounding aside."""
        return self.field("Lossless") != "no"

    @cached_property
    def touches(self) -> tuple[str, ...]:
        """Upstream paths the patch adds lines to."""
        return tuple(self.insertions)


@dataclass(frozen=True)
class Series:
    """The patches for one upstream release, in order.

    Attributes:
        left_out: patches of another lane that `sglang-patches port` did not carry to this one, and why.
    """

    release: str
    folder: Path
    patches: tuple[Patch, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def by_name(self) -> dict[str, Patch]:
        return {patch.name: patch for patch in self.patches}

    def __getitem__(self, name: str) -> Patch:
        try:
            return self.by_name[name]
        except KeyError:
            raise PatchError(unknown_patches([name], self)) from None


def unknown_patches(names: Iterable[str], series: Series) -> str:
    """The message about names that are no patches of this series."""
    names = list(names)
    without = "".join(
        f"  left out   {name}: {series.left_out[name]} (`sglang-patches port`, docs/lanes.md)\n"
        for name in names
        if name in series.left_out
    )
    return (
        f"unknown patch: {', '.join(names)}\n"
        f"  known      {', '.join(series.by_name) or '(none)'} (release {series.release})\n"
        f"{without}"
        f"  remedy     correct the name; `sglang-patches list` shows what each patch does"
    )


def patches_folder() -> Path:
    """The folder with one lane a release: `SGLANG_PATCHES_DIR`, else in the installed package, else the checkout's."""
    override = os.environ.get("SGLANG_PATCHES_DIR")
    if override:
        return Path(override)
    package = Path(__file__).resolve().parent
    inside = package / "patches"
    return inside if inside.is_dir() else package.parents[1] / "patches"


def releases(folder: Path) -> list[str]:
    """Upstream releases that `folder` has a lane (a series) for, oldest first."""
    found = [entry.parent.name for entry in folder.glob("*/series")]
    return sorted(found, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])


def load(release: str, folder: Path | None = None) -> Series:
    """Read the series for an upstream release.

    Raises:
        PatchError: no lane for this release, a missing patch file, or a patch that is not well-formed.
    """
    folder = folder or patches_folder()
    lane = folder / release
    try:
        lines = (lane / "series").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        known = ", ".join(releases(folder)) or "(none)"
        raise PatchError(
            f"no patches for SGLang {release}\n"
            f"  installed  sglang {release}\n"
            f"  lanes      {known} (in {folder})\n"
            f"  remedy     install a release with a lane: pip install 'sglang=={known.rpartition(', ')[2]}'; "
            f"carry the patches to this one: sglang-patches port --to {release}; "
            f"or run upstream without patches: SGLANG_PATCHES=none"
        ) from None
    names = [entry for line in lines if (entry := line.partition("#")[0].strip())]
    patches: list[Patch] = []
    for entry in names:
        name = entry.removesuffix(".patch")
        if entry == name:
            raise PatchError(f"{lane / 'series'}: {entry!r} is not a patch file name\n  remedy     add .patch to it")
        check_name(name)
        if any(patch.name == name for patch in patches):
            raise PatchError(f"{lane / 'series'}: {entry} is listed twice\n  remedy     remove one of the two lines")
        patches.append(load_patch(lane / entry))
    left_out = {match[1]: match[2] for line in lines if (match := left_out_line(line))}
    return Series(release, lane, tuple(patches), left_out)


def left_out_line(line: str) -> re.Match[str] | None:
    """Match a line of a `series` that stands where a patch would, with its name and why it is left out."""
    return _LEFT_OUT.fullmatch(line)


def check_name(name: str) -> None:
    """Raise PatchError where `name` cannot name a patch."""
    if not _NAME.fullmatch(name):
        raise PatchError(
            f"{name!r} is not a name for a patch\n"
            f"  expected   lower-case words joined with hyphens, such as eagle-verify-cuda-graph\n"
            f"  remedy     choose such a name; the file in the series is called NAME.patch"
        )


def load_patch(file: Path) -> Patch:
    """Read one patch.

    Raises:
        PatchError: it is missing, or header or diff are not well-formed.
    """
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise PatchError(
            f"{file}: no such patch, but {file.parent / 'series'} lists it\n"
            f"  remedy     restore the file from version control, or remove the line from the series"
        ) from None
    return parse_patch(data, file)


def parse_patch(data: bytes, file: Path) -> Patch:
    """`load_patch` for bytes at hand; `file` names the patch."""
    lines = data.split(b"\n")
    if lines.pop() != b"":
        raise _malformed(file, len(lines) + 1, "the file does not end with a line feed; is it truncated?")
    start = next((at for at, line in enumerate(lines) if line.startswith(b"--- ")), len(lines))
    header = b"".join(line + b"\n" for line in lines[:start])
    try:
        text = header.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _malformed(file, 1, f"the header is not UTF-8: {error}") from None
    fields = _parse_header(text, file)
    insertions = hunks.parse_diff(lines[start:], str(file), start + 1)

    default = fields["Default"][0]
    if default not in get_args(Default):
        raise _malformed(file, 1, f"Default is {default!r}, expected one of: {', '.join(get_args(Default))}")
    if fields.get("Lossless", ["no"]) != ["no"]:
        raise _malformed(file, 1, f"Lossless is {fields['Lossless'][0]!r}, expected 'no', or no such field")
    images = list(_matches(_PRE_IMAGE, fields["Pre-Image"], "Pre-Image", "SHA256 sglang/PATH.py", file))
    pre_images = {path: sha for sha, path in images}
    if sorted(path for _, path in images) != sorted(insertions):
        raise _malformed(
            file,
            1,
            f"Pre-Image names {', '.join(sorted(pre_images))}, the diff touches "
            f"{', '.join(sorted(insertions)) or 'nothing'}; one Pre-Image line is needed for each touched file",
        )
    return Patch(
        name=file.name.removesuffix(".patch"),
        file=file,
        header=text,
        fields=fields,
        default=default,  # type: ignore[arg-type]  # checked above
        requires=_names(fields.get("Requires", [])),
        conflicts=_names(fields.get("Conflicts", [])),
        provides=dict(_matches(_PROVIDES, fields.get("Provides", []), "Provides", "MODULE = PACKAGE", file)),
        pre_images=pre_images,
        insertions=insertions,
        adds=tuple(_matches(_ADDS, fields.get("Adds", []), "Adds", "sglang/PATH.py NAME", file)),
        sha256=digest(data),
    )


def _parse_header(text: str, file: Path) -> dict[str, list[str]]:
    fields: dict[str, list[str]] = {}
    current: list[str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith(" "):
            if current is None:
                raise _malformed(file, number, "a continuation line with no field before it")
            current[-1] += "\n" + line.strip().removeprefix(".")
        elif line:
            match = _FIELD.fullmatch(line)
            if match is None:
                raise _malformed(file, number, f"{line!r} is neither 'Field: value' nor a continuation (one space)")
            name, value = match[1], match[2] or ""
            if name not in REQUIRED_FIELDS + OPTIONAL_FIELDS:
                known = ", ".join(REQUIRED_FIELDS + OPTIONAL_FIELDS)
                raise _malformed(file, number, f"unknown field {name!r}; known: {known}")
            if name in fields and name not in REPEATABLE_FIELDS:
                raise _malformed(file, number, f"{name} appears twice")
            current = fields.setdefault(name, [])
            current.append(value)
    missing = [name for name in REQUIRED_FIELDS if not fields.get(name)]
    if missing:
        raise _malformed(file, 1, f"missing header field: {', '.join(missing)}")
    return fields


def _names(values: list[str]) -> tuple[str, ...]:
    return tuple(name for value in values for name in re.split(r"[,\s]+", value) if name)


def _matches(
    pattern: re.Pattern[str], values: list[str], field: str, expected: str, file: Path
) -> Iterator[tuple[str, str]]:
    for value in values:
        match = pattern.fullmatch(value)
        if match is None:
            raise _malformed(file, 1, f"{field} is {value!r}, expected '{expected}'")
        yield match[1], match[2]


def _malformed(file: Path, line: int, problem: str) -> PatchError:
    return PatchError(
        f"{file}:{line}: corrupt patch: {problem}\n"
        f"  remedy     restore the file from version control, or mend its header and run: sglang-patches verify"
    )
