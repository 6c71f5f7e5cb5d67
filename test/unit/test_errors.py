"""What a failed file operation says: the file that was named, what is wrong with it, and what to do about that."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_patches import named_model
from sglang_patches.bench import folder as folders
from sglang_patches.cli import app
from sglang_patches.errors import of_system


def said(do: Callable[[], object]) -> str:
    with pytest.raises(OSError, match=r"\S") as failed:
        do()
    return of_system(failed.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "a.json"
    told = said(missing.read_text)
    assert told == f"{missing}: No such file or directory\n  remedy     name a file that is there (ls {tmp_path})"
    assert "written" not in told, "it was to be read"


def test_a_file_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "no such" / "folder" / "a.json"
    told = said(lambda: file.write_text("x"))
    assert f"{file}: No such file or directory; already {tmp_path / 'no such'} is not there" in told
    assert f"to write one, first: mkdir -p '{file.parent}'" in told
    # And not the temporary file beside it.
    assert said(lambda: folders.replace(file, "x")) == told


def test_a_folder_in_a_files_place_and_the_other_way_round(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "name a file, such as one in it" in said(tmp_path.read_text)
    assert "name a folder, or a file in one" in said(lambda: os.listdir(tmp_path / "file"))


def test_what_is_forbidden_and_all_else(tmp_path: Path) -> None:
    assert f"change who may: ls -ld {tmp_path}" in of_system(
        PermissionError(13, "Permission denied", str(tmp_path / "a"))
    )
    assert of_system(OSError(errno.ENOSPC, "No space left on device", "/d/a")) == (
        "/d/a: No space left on device\n  remedy     make space: df -h /d; then the same command again"
    )
    assert "free space" in of_system(OSError(errno.EROFS, "Read-only file system", "a"))
    assert of_system(OSError("timed out")) == "timed out"


@pytest.mark.parametrize(
    "command",
    [
        ["draft", "check", "./nowhere", "./nowhere"],
        ["bench", "ab", "--a", "default", "--b", "none", "--model", "./nowhere"],
        ["bench", "verify-step", "--out", "nowhere", "--model", "./nowhere", "--draft", "./nowhere"],
        ["spec", "plan", "--costs", "{costs}", "--accept-length", "2", "--target", "./nowhere"],
        ["tune", "moe", "--out", "nowhere", "--cpu", "--model", "./nowhere"],
        ["launch", "tiny-cpu", "--dry-run", "--model", "./nowhere"],
    ],
    ids=lambda command: command[0],
)
def test_every_command_says_the_same_of_a_model_that_is_not_here(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = Path("benchmark/results/h200-verify-step").resolve()
    monkeypatch.chdir(tmp_path)
    for name in ("./nowhere", "nobody/nothing"):
        words = [name if word == "./nowhere" else word.format(costs=costs) for word in command]
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        missing = named_model.absence(name)
        assert missing is not None
        done = CliRunner().invoke(app, words)
        assert (done.exit_code, list(tmp_path.iterdir())) == (2, [])
        assert f" {name}: {missing}" in done.output
