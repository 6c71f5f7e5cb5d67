"""Upstream releases as wheels from the package index: listed, fetched once into a cache folder, never installed."""

from __future__ import annotations

import base64
import csv
import io
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from packaging.version import InvalidVersion, Version

from sglang_patches import cache
from sglang_patches.errors import PatchError
from sglang_patches.upstream import Upstream

Echo = Callable[[str], None]

_VERSIONS = re.compile(r"^Available versions: (.+)$", re.MULTILINE)


class Wheel(Upstream):
    """A release read out of its wheel; `root` is the wheel file."""

    def read(self, relative: str) -> bytes | None:
        """An upstream file's bytes, checked against the wheel's own RECORD; None where the release has no such file.

        Raises:
            PatchError: the wheel is damaged.
        """
        archive, recorded = _opened(self.root)
        if relative not in recorded:
            return None
        try:
            data = archive.read(relative)
        except (KeyError, OSError, zipfile.BadZipFile, EOFError) as error:
            raise damaged(self.root, f"{relative}: {error}") from None
        found = "sha256=" + base64.urlsafe_b64encode(sha256(data).digest()).rstrip(b"=").decode()
        if recorded[relative] != found:
            raise damaged(self.root, f"{relative}: RECORD says {recorded[relative]}, found {found}")
        return data

    def modules(self) -> list[str]:
        """Paths of the release's Python files."""
        return sorted(path for path in _opened(self.root)[1] if path.endswith(".py") and path.startswith("sglang/"))


@lru_cache(maxsize=16)
def _opened(file: str) -> tuple[zipfile.ZipFile, dict[str, str]]:
    try:
        archive = zipfile.ZipFile(file)
        record = next(name for name in archive.namelist() if re.fullmatch(r"sglang-[^/]+\.dist-info/RECORD", name))
        rows = csv.reader(io.StringIO(archive.read(record).decode()))
        return archive, {row[0]: row[1] for row in rows if len(row) == 3 and row[1]}
    except (OSError, StopIteration, UnicodeDecodeError, zipfile.BadZipFile, EOFError) as error:
        raise damaged(file, str(error) or "it has no RECORD") from None


def damaged(file: str, problem: str) -> PatchError:
    """The error about a wheel that is not whole."""
    return PatchError(
        f"{file} is not a whole wheel of sglang\n"
        f"  seen       {problem}\n"
        f"  remedy     remove the file and run the command again, which fetches it anew"
    )


def folder() -> Path:
    """Where fetched wheels are kept: `wheels` in the cache folder of the patched copies."""
    return Path(cache.folder()) / "wheels"


def release(text: str) -> Version:
    """Parse a release number.

    Raises:
        PatchError: it is none.
    """
    try:
        return Version(text)
    except InvalidVersion:
        raise PatchError(
            f"{text!r} is not a release of sglang\n"
            f"  expected   a number such as 0.5.23; with --dry-run also a range such as 0.5.17..0.5.23 or 0.5.17..\n"
            f"  remedy     correct it; `pip index versions sglang` lists the releases"
        ) from None


def available() -> list[str]:
    """Releases on the package index that pip is set up with, oldest first, without pre-releases.

    Raises:
        PatchError: the index cannot be asked.
    """
    done = _pip("index", "versions", "sglang")
    match = _VERSIONS.search(done.stdout)
    if done.returncode or match is None:
        raise _no_index("cannot list the releases of sglang", done)
    return [str(version) for version in sorted(Version(entry) for entry in match[1].split(", "))]


def between(text: str, listed: Callable[[], list[str]] = available) -> list[str]:
    """The releases that `text` names: one, or a range `A..B`, both ends included, either may be left out.

    Raises:
        PatchError: not a release or range, or no release is in the range.
    """
    first, dots, last = text.partition("..")
    if not dots:
        return [str(release(text))]
    if not first and not last:
        release(text)  # raises: a release each since 0.1 is gigabytes, and nobody's wish
    low = release(first) if first else None
    high = release(last) if last else None
    found = [
        name for name in listed() if (low is None or low <= Version(name)) and (high is None or Version(name) <= high)
    ]
    if not found:
        raise PatchError(
            f"no release of sglang is in {text}\n"
            f"  remedy     name the older release first; `pip index versions sglang` lists them"
        )
    return found


def fetch(name: str, echo: Echo, into: Path | None = None) -> Wheel:
    """The wheel of a release, from the cache folder or else from the package index; nothing is installed.

    A download appears in the folder only when it is whole. Python's and the machine's tags are those of this
    interpreter, as for an installation.

    Raises:
        PatchError: the index cannot be reached, has no such wheel for this machine, or the wheel is damaged.
        OSError: the folder cannot be written.
    """
    into = into or folder()
    wanted = str(release(name))
    have = sorted(into.glob(f"sglang-{wanted}-*.whl"))
    if not have:
        into.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=into, prefix=".fetch-") as scratch:
            echo(f"sglang {wanted}: fetching the wheel from the package index ...")
            command = ("download", "--no-deps", "--only-binary=:all:", "--dest", scratch, f"sglang=={wanted}")
            done = _pip(*command, quiet=not sys.stderr.isatty())
            got = sorted(Path(scratch).glob("sglang-*.whl"))
            if done.returncode or len(got) != 1:
                raise _no_index(f"cannot fetch the wheel of sglang {wanted}", done)
            echo(f"sglang {wanted}: {got[0].stat().st_size / 1e6:.0f} MB in {into}")
            have = [got[0].rename(into / got[0].name)]
    wheel = Wheel(str(have[0]), wanted, str(have[0]))
    _opened(wheel.root)
    return wheel


def _pip(*arguments: str, quiet: bool = True) -> subprocess.CompletedProcess[str]:
    """Run this interpreter's pip; unless `quiet`, its progress bar goes to the terminal."""
    options = ("--disable-pip-version-check", "--no-input", "--retries=2")
    command = [sys.executable, "-P", "-m", "pip", *arguments, *options]
    # A selection that cannot be used must not matter to pip, which is no SGLang.
    environment = {**os.environ, "SGLANG_PATCHES": "none"}
    return subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if quiet else sys.stderr.fileno(),
        stderr=subprocess.PIPE,
        text=True,
    )


def _shortened(line: str, most: int = 400) -> str:
    """Without its middle: pip lists every release that there is, oldest first."""
    return line if len(line) <= most else f"{line[: most // 2]} ... {line[-most // 2 :]}"


def _no_index(what: str, done: subprocess.CompletedProcess[str]) -> PatchError:
    said = [line.strip() for line in (done.stderr or "").splitlines() if line.strip()]
    told = ("ERROR", "No module named pip", "connection broken")
    errors = [_shortened(line) for line in said if any(part in line for part in told)][-3:] or said[-3:]
    return PatchError(
        f"{what}\n"
        f"  command    {' '.join(map(str, done.args[1:]))}\n"
        f"  seen       {f'{os.linesep}             '.join(errors) or 'nothing'}\n"
        f"  remedy     check the release number (`pip index versions sglang`) and that this machine reaches the "
        f"package index; offline, copy the wheel to {folder()}"
    )
