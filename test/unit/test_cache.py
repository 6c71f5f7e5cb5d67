"""Patched copies on disk: races, and folders that are read-only, full, damaged or someone else's."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_patches import cache

from .sandbox import Sandbox, message

PATH = "sglang/srt/one.py"
ONE = "from sglang.srt.one import one; print(one())"
ROOT = os.geteuid() == 0


@pytest.fixture
def patched(sandbox: Sandbox) -> Sandbox:
    """A series whose copy is about 64 KiB large."""
    sandbox.add("big", {PATH: {0: "\n".join(f"# {number:060d}" for number in range(1000)), 1: "    return 'patched'"}})
    return sandbox


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 KiB; skips where the machine does not let the test mount one."""
    folder = tmp_path / "mount"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_many_processes_with_a_cold_cache_make_one_good_copy(patched: Sandbox) -> None:
    for _ in range(12):
        shutil.rmtree(patched.cache, ignore_errors=True)
        command = [sys.executable, "-c", ONE]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes = [subprocess.Popen(command, env=patched.environment(), **pipes) for _ in range(4)]  # type: ignore[call-overload]
        for process in processes:
            out, err = process.communicate(timeout=120)
            assert (out, process.returncode) == ("patched\n", 0), err
            assert "Error" not in err
        assert len(patched.copies()) == 1
        assert not list(patched.cache.rglob("*.tmp"))


RACE = """
import os, sys
from sglang_patches import cache
content = b"x = 7777777\\n" * 4096
while not os.path.exists(sys.argv[1]):
    pass
for entry in range(300):
    with open(cache.store(f"{entry:016x}", "sglang/x.py", content, "/none", b""), "rb") as file:
        assert file.read() == content, "half a file"
"""


def test_readers_never_see_half_a_file_while_others_write(sandbox: Sandbox, tmp_path: Path) -> None:
    start = tmp_path / "start"
    command = [sys.executable, "-c", RACE, str(start)]
    pipes = {"stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=sandbox.environment("none"), **pipes) for _ in range(3)]  # type: ignore[call-overload]
    start.touch()
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err


@pytest.mark.parametrize("damage", ["", "def one(:", "def one():\n    return 'evil'\n", None])
def test_a_damaged_copy_is_replaced(patched: Sandbox, damage: str | None) -> None:
    assert patched.run("-c", ONE).stdout == "patched\n"
    (copy,) = patched.copies()
    good = copy.read_bytes()
    copy.write_bytes(good[:100] if damage is None else damage.encode())
    done = patched.run("-c", ONE)
    assert done.stdout == "patched\n", done.stderr
    assert copy.read_bytes() == good


def test_damage_of_equal_size_is_replaced(patched: Sandbox) -> None:
    assert patched.run("-c", ONE).stdout == "patched\n"
    (copy,) = patched.copies()
    good = copy.read_bytes()
    times = copy.stat()
    copy.write_bytes(good.replace(b"'patched'", b"'wrecked'"))
    os.utime(copy, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert patched.run("-c", ONE).stdout == "patched\n"
    assert copy.read_bytes() == good


def test_a_warm_cache_is_only_read(patched: Sandbox) -> None:
    patched.run("-c", ONE)
    before = {file: file.stat().st_mtime_ns for file in patched.cache.rglob("*")}
    patched.run("-c", ONE)
    assert {file: file.stat().st_mtime_ns for file in patched.cache.rglob("*")} == before


def fell_back(patched: Sandbox, folder: Path, temporary: Path) -> str:
    temporary.mkdir()
    code = f"{ONE}; import sglang.srt.one as m; print(m.__file__)"
    done = patched.run("-c", code, SGLANG_PATCHES_CACHE=str(folder), TMPDIR=str(temporary))
    value, file = done.stdout.split()
    assert value == "patched"
    assert Path(file).is_relative_to(temporary)
    assert not list(temporary.iterdir())  # removed at the end
    assert f"cannot use the cache folder {folder} (" in done.stderr
    assert "set SGLANG_PATCHES_CACHE to a writable folder of your own" in done.stderr
    return done.stderr


def test_a_full_file_system_falls_back_to_a_private_folder(patched: Sandbox, mount: Path, tmp_path: Path) -> None:
    assert "No space left on device" in fell_back(patched, mount, tmp_path / "tmp")
    assert not [file for file in mount.rglob("*") if file.is_file()]


def test_a_read_only_file_system_falls_back(patched: Sandbox, mount: Path, tmp_path: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", mount], check=True)
    assert "Read-only file system" in fell_back(patched, mount, tmp_path / "tmp")


@pytest.mark.skipif(ROOT, reason="root may write anywhere; the mounted variant covers it")
def test_a_read_only_folder_falls_back(patched: Sandbox, tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    assert "Permission denied" in fell_back(patched, folder, tmp_path / "tmp")


def test_a_cache_path_that_is_a_file_falls_back(patched: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    fell_back(patched, tmp_path / "file" / "cache", tmp_path / "tmp")


def test_a_read_only_cache_that_is_warm_needs_no_fallback(patched: Sandbox, tmp_path: Path) -> None:
    patched.run("-c", ONE)
    moved = tmp_path / "image"
    shutil.move(patched.cache, moved)
    for folder, _, files in os.walk(moved):
        for name in [folder, *(os.path.join(folder, file) for file in files)]:
            os.chmod(name, 0o500)
    done = patched.run("-c", ONE, SGLANG_PATCHES_CACHE=str(moved))
    assert done.stdout == "patched\n"
    assert "cannot use" not in done.stderr


@pytest.mark.skipif(not ROOT, reason="giving a folder away needs root")
def test_another_users_folder_is_not_used(patched: Sandbox, tmp_path: Path) -> None:
    patched.run("-c", ONE)
    os.chown(patched.copies()[0].parent, 12345, -1)
    assert "belongs to another user (uid 12345)" in fell_back(patched, patched.cache, tmp_path / "tmp")


def test_nowhere_to_write_is_a_clear_error_and_leaves_nothing(patched: Sandbox, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", ONE],
        env=patched.environment(TMPDIR=str(temporary), PYTHONDONTWRITEBYTECODE="1"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (1, "")
    first, cached, fallback, remedy = message(done).splitlines()[-4:]
    assert first == "sglang-patches: cannot write patched files"
    assert cached == f"  cache      {patched.cache}: [Errno 27] File too large"
    assert fallback.startswith(f"  temporary  {temporary}/sglang-patches-")
    assert remedy == (
        "  remedy     set SGLANG_PATCHES_CACHE to a writable folder of your own with a few megabytes free, "
        "or run without patches: SGLANG_PATCHES=none"
    )
    assert not patched.copies()
    assert not [file for file in patched.cache.rglob("*") if file.is_file()]
    assert not list(temporary.iterdir())


def test_files_beside_a_patched_module_are_found(sandbox: Sandbox) -> None:
    """`__file__` is the copy; upstream modules that look for files beside or above it still find them."""
    sandbox.add("data", {"sglang/srt/data.py": {5: "PATCHED = True"}})
    done = sandbox.run("-c", "from sglang.srt import data as d; print(d.TEXT.strip(), d.UP.strip(), d.PATCHED, d.HERE)")
    text, above, patched, here = done.stdout.split()
    assert (text, above, patched) == ("data", "up", "True")
    assert Path(here).is_relative_to(sandbox.cache)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("SGLANG_PATCHES_CACHE", raising=False)
    assert cache.folder() == "/home/someone/.cache/sglang-patches"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache.folder() == "/caches/sglang-patches"
    monkeypatch.setenv("SGLANG_PATCHES_CACHE", "/elsewhere")
    assert cache.folder() == "/elsewhere"
