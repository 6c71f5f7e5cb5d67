"""Checks of what the image installs that need no network: part of `make lint`. Exit code 1 where one fails.

- Each package of docker/lock is pinned to one version and has the hashes of its files; nothing leads to another source.
- Everything that pyproject.toml and lanes/ (the newest lane's lock) and docker/lock/tools.in (the tools') ask for is
  locked, at a version that they allow.
- Each locked package that is installed here, in that version, has a known licence that lets the image be passed on.

Known vulnerabilities and withdrawn releases are on the package index only: `make audit`.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
# Read as words of a statement; GNU's lesser licences let a program import a library.
_KNOWN = re.compile(
    r"(?i)\b(mit|mit-0|mit-cmu|apache|bsd|isc|mpl|psf-2\.0|python software foundation|lgpl|public domain|"
    r"nvidia.proprietary|other/proprietary)\b"
)
_REFUSED = re.compile(r"(?i)(?<!L)GPL|affero|SSPL|BUSL|non-?commercial|CC-BY-NC")
# They say "Other/Proprietary" or nothing; the terms of CUDA's libraries allow passing them on with a program.
_PROPRIETARY = re.compile(r"nvidia-|cuda-toolkit$|nvshmem4py-")
# Wheels without a licence, in their metadata or as a file; both projects are under the Apache License 2.0.
_SAYS_NOTHING = ("kernels-data", "sentencepiece")


def entries(text: str) -> list[tuple[int, str]]:
    """(line number, logical line) of a requirements file: comments and empty lines left out, continued lines joined."""
    found: list[tuple[int, str]] = []
    continued = False
    for number, line in enumerate(text.splitlines(), 1):
        words = line.removesuffix("\\").strip()
        if not words or words.startswith("#"):
            continue
        if continued:
            start, joined = found.pop()
            found.append((start, f"{joined} {words}"))
        else:
            found.append((number, words))
        continued = line.endswith("\\")
    return found


def read_lock(name: str, text: str) -> tuple[dict[str, str], list[str]]:
    """Canonical name to version of what a lock pins, and what is wrong with the lock."""
    locked: dict[str, str] = {}
    problems = []
    for number, line in entries(text):
        where = f"{name}:{number}"
        words, *hashes = re.split(r"\s+(?=--)", line)
        try:
            requirement = Requirement(words)
        except InvalidRequirement:
            problems.append(f"{where}: {line[:60]!r} is no package; a lock names packages and nothing else")
            continue
        pins = list(requirement.specifier)
        if requirement.url or len(pins) != 1 or pins[0].operator != "==" or "*" in pins[0].version:
            problems.append(f"{where}: {words!r} does not pin one version from the package index (NAME==VERSION)")
            continue
        if not hashes or not all(_HASH.fullmatch(entry) for entry in hashes):
            problems.append(f"{where}: {words!r} has {len(hashes)} hashes; every file needs --hash=sha256:...")
        key = canonicalize_name(requirement.name)
        if key in locked:
            problems.append(f"{where}: {key} is locked twice")
        locked[key] = pins[0].version
    return locked, problems


def in_step(name: str, locked: dict[str, str], wanted: Iterable[str]) -> list[str]:
    """Which of the requirements `wanted` a lock does not satisfy."""
    problems = []
    for requirement in map(Requirement, wanted):
        version = locked.get(canonicalize_name(requirement.name))
        if version is None or version not in requirement.specifier:
            problems.append(f"{name}: has {requirement.name} {version}, wanted is '{requirement}'; run docker/lock.sh")
    return problems


def licence(name: str, version: str) -> str | None:
    """What a distribution says of its licence; empty if nothing, None if that version is not installed here."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if distribution.version != version:
        return None
    metadata = distribution.metadata
    if "License-Expression" in metadata:
        return metadata["License-Expression"]
    classifiers = [
        entry.rpartition(" :: ")[2] for entry in metadata.get_all("Classifier") or () if "License ::" in entry
    ]
    stated = "; ".join(entry for entry in classifiers if entry != "OSI Approved")
    if not stated and "License" in metadata:
        stated = metadata["License"].strip()
    if stated:
        return stated.splitlines()[0]
    for file in distribution.files or ():
        if "licen" in file.name.lower() and ".dist-info" in str(file):
            return " ".join(Path(str(file.locate())).read_text(encoding="utf-8", errors="replace").split())[:80]
    return ""


def unlicensed(locked: Mapping[str, str]) -> list[str]:
    """What is wrong with the licences of locked packages (name to version) that are installed here."""
    problems = []
    for name, version in sorted(locked.items()):
        stated = licence(name, version)
        if stated is None or _PROPRIETARY.match(name) or (not stated and name in _SAYS_NOTHING):
            continue
        if _REFUSED.search(stated) or not _KNOWN.search(stated):
            problems.append(f"{name}: licence {stated!r} is not among those that scripts/audit.py knows")
    return problems


def audit(root: Path) -> tuple[list[str], int]:
    """What is wrong in the checkout at `root`, and how many packages are locked."""

    def wants(name: str) -> list[str]:
        return [line for _, line in entries((root / name).read_text(encoding="utf-8"))]

    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    # As docker/lock.sh: pyproject.toml admits every lane, and the image has the newest.
    lane = max((folder.name for folder in (root / "patches").iterdir() if folder.is_dir()), key=Version)
    stack, tools = wants(f"lanes/{lane}.txt"), wants("docker/lock/tools.in")
    problems: list[str] = []
    packages: dict[str, str] = {}
    for name, wanted in ((f"docker/lock/{lane}-cu13.txt", project + stack), ("docker/lock/tools.txt", tools)):
        locked, found = read_lock(name, (root / name).read_text(encoding="utf-8"))
        problems += found + in_step(name, locked, wanted)
        packages |= locked
    return problems + unlicensed(packages), len(packages)


def main(arguments: Sequence[str] = ()) -> int:
    """Print what is wrong; the exit code."""
    problems, count = audit(Path(arguments[0]) if arguments else ROOT)
    for problem in problems:
        print(f"audit: {problem}", file=sys.stderr)
    if not problems:
        print(f"audit: {count} locked packages: pinned, hashed, in step with pyproject.toml and lanes/, licences known")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
