"""Wheels: whole or refused, and what is said where the index cannot be reached."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from sglang_patches.errors import PatchError
from sglang_patches.port import wheels

from .upstreams import make_wheel


def refuse(line: str) -> None:
    pytest.fail(f"a wheel in the folder was fetched again: {line}")


def test_reads_without_installing(tmp_path: Path) -> None:
    make_wheel(tmp_path, "0.5.23", {"sglang/a.py": "A = 1\n", "sglang/data.txt": "x"})
    wheel = wheels.fetch("0.5.23", refuse, tmp_path)
    assert (wheel.release, wheel.read("sglang/a.py"), wheel.read("sglang/b.py")) == ("0.5.23", b"A = 1\n", None)
    assert wheel.modules() == ["sglang/a.py"]


@pytest.mark.parametrize("damage", ["truncated", "edited", "no RECORD"])
def test_a_damaged_wheel_is_refused(tmp_path: Path, damage: str) -> None:
    file = Path(make_wheel(tmp_path, "0.5.23", {"sglang/a.py": "A = 1\n"}).root)
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:100])
    elif damage == "edited":
        with zipfile.ZipFile(file) as archive:
            record = archive.read("sglang-0.5.23.dist-info/RECORD")
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("sglang/a.py", "A = 2\n")
            archive.writestr("sglang-0.5.23.dist-info/RECORD", record)
    else:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("sglang/a.py", "A = 2\n")
    with pytest.raises(PatchError, match=r"is not a whole wheel of sglang\n.*\n  remedy     remove the file"):
        wheels.fetch("0.5.23", refuse, tmp_path).read("sglang/a.py")


def test_of_a_long_message_both_ends_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pip names every release it found, oldest first; the newest is what one looks for."""
    listed = ", ".join(f"0.5.{number}" for number in range(200))
    failed = subprocess.CompletedProcess(["python"], 1, "", f"ERROR: no sglang==9 (from versions: {listed})\n")
    monkeypatch.setattr(wheels, "_pip", lambda *arguments, quiet: failed)
    with pytest.raises(PatchError, match=r"ERROR: no sglang==9 \(from versions: 0\.5\.0, .* \.\.\. .*0\.5\.199\)\n"):
        wheels.fetch("9", print, tmp_path)


def test_offline_says_so_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"INDEX_URL": "http://127.0.0.1:9/simple", "NO_INDEX": "0", "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    said: list[str] = []
    with pytest.raises(PatchError) as caught:
        wheels.fetch("0.5.23", said.append, tmp_path)
    assert said == ["sglang 0.5.23: fetching the wheel from the package index ..."]
    message = str(caught.value)
    assert message.startswith("cannot fetch the wheel of sglang 0.5.23\n  command    -P -m pip download --no-deps ")
    assert "Connection refused" in message
    assert f"offline, copy the wheel to {wheels.folder()}" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("0.5.10", ["0.5.10"]),
        ("0.5.9..0.5.10", ["0.5.9", "0.5.9.post1", "0.5.10"]),
        ("0.5.10..", ["0.5.10", "0.5.23"]),
        ("..0.5.8", ["0.5.8"]),
    ],
)
def test_ranges(text: str, names: list[str]) -> None:
    assert wheels.between(text, lambda: ["0.5.8", "0.5.9", "0.5.9.post1", "0.5.10", "0.5.23"]) == names


@pytest.mark.parametrize("text", ["0.5.23..0.5.17", "0.9..", "", "..", "..x", "0.5.x"])
def test_refuses_what_is_no_range(text: str) -> None:
    with pytest.raises(PatchError, match=r"(is not a release of sglang|no release of sglang is in )"):
        wheels.between(text, lambda: ["0.5.17", "0.5.23"])
