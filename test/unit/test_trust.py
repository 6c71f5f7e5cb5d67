"""Folders that another user could write to, replace, or lead elsewhere: no patched module is loaded from there."""

from __future__ import annotations

import errno
import grp
import logging
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_patches import cache, trust

from .sandbox import Sandbox, message

PATH = "sglang/srt/one.py"
ONE = "from sglang.srt.one import one; import sglang.srt.one as m; print(one(), m.__file__)"
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
STRANGER = 12345


@pytest.fixture
def patched(sandbox: Sandbox) -> Sandbox:
    """A series whose copies are in the cache."""
    sandbox.add("p", {PATH: {1: "    return 'patched'"}})
    assert sandbox.run("-c", ONE).stdout.startswith(f"patched {sandbox.cache}")
    return sandbox


def plant(patched: Sandbox) -> None:
    """What another user would do: bytecode that passes for the copy's, by size and time."""
    (copy,) = patched.copies()
    times = copy.stat()
    good = copy.read_bytes()
    copy.write_bytes(good.replace(b"'patched'", b"'planted'"))
    os.utime(copy, ns=(times.st_atime_ns, times.st_mtime_ns))
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-f", copy], check=True)
    copy.write_bytes(good)
    os.utime(copy, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_planted_bytecode_would_be_loaded(patched: Sandbox) -> None:
    """Why all this: the other tests would pass with a plant that does nothing."""
    plant(patched)
    assert patched.run("-c", ONE).stdout.startswith(f"planted {patched.cache}")


def give_away(path: Path) -> None:
    os.chown(path, STRANGER, -1)


def open_to_all(path: Path) -> None:
    path.chmod(0o777)


def open_to_a_group(path: Path) -> None:
    os.chown(path, -1, STRANGER)
    path.chmod(0o770)


FOLDERS: dict[str, Callable[[Sandbox], Path]] = {
    "above the cache": lambda sandbox: sandbox.cache.parent,
    "the cache": lambda sandbox: sandbox.cache,
    "the key": lambda sandbox: sandbox.copies()[0].parents[2],
    "the package": lambda sandbox: sandbox.copies()[0].parent,
    "the bytecode": lambda sandbox: sandbox.copies()[0].parent / "__pycache__",
}


SAID: dict[Callable[[Path], None], str] = {
    give_away: f"belongs to another user (uid {STRANGER})",
    open_to_all: "every user can write to",
    open_to_a_group: f"group {STRANGER} can write to",
}


@NEEDS_ROOT
@pytest.mark.parametrize(
    ("folder", "expose"),
    [
        *((folder, open_to_all) for folder in FOLDERS),
        *((folder, give_away) for folder in ("above the cache", "the bytecode")),
        ("the cache", open_to_a_group),
    ],
)
def test_a_folder_that_another_user_can_write_to_is_not_used(
    patched: Sandbox, folder: str, expose: Callable[[Path], None], tmp_path_factory: pytest.TempPathFactory
) -> None:
    temporary = tmp_path_factory.mktemp("tmp")
    plant(patched)
    path = FOLDERS[folder](patched)
    expose(path)
    done = patched.run("-c", ONE, TMPDIR=str(temporary))
    assert done.stdout.startswith(f"patched {temporary}/"), done.stderr
    assert "cannot use the cache folder" in done.stderr
    assert SAID[expose] in done.stderr
    assert str(path) in done.stderr


@pytest.mark.parametrize("expose", [pytest.param(give_away, marks=NEEDS_ROOT), lambda path: path.chmod(0o666)])
def test_bytecode_that_others_can_write_to_is_removed(patched: Sandbox, expose: Callable[[Path], None]) -> None:
    plant(patched)
    (bytecode,) = (patched.copies()[0].parent / "__pycache__").iterdir()
    expose(bytecode)
    done = patched.run("-c", ONE)
    assert done.stdout.startswith(f"patched {patched.cache}"), done.stderr
    assert trust.distrusted(str(bytecode)) is None


@NEEDS_ROOT
def test_files_beside_a_copy_that_others_can_write_to_are_replaced(sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.add("data", {"sglang/srt/data.py": {5: "PATCHED = True"}})
    read = "from sglang.srt import data; print(data.TEXT, data.HERE)"
    text, folder = sandbox.run("-c", read).stdout.split()
    assert text == "data"
    beside = Path(folder, "data.txt")
    (tmp_path / "planted").write_text("planted")

    def link() -> None:
        beside.symlink_to(tmp_path / "planted")
        os.chown(beside, STRANGER, -1, follow_symlinks=False)

    def file() -> None:
        beside.write_text("planted")
        beside.chmod(0o666)

    for plant_it in (link, file):
        beside.unlink()
        plant_it()
        done = sandbox.run("-c", read)
        assert done.stdout.split() == ["data", folder], done.stderr
        assert beside.readlink() == sandbox.site / "sglang/srt/data.txt"


def test_a_file_that_others_can_write_to_is_replaced(patched: Sandbox) -> None:
    (copy,) = patched.copies()
    copy.chmod(0o666)
    before = copy.stat().st_ino
    assert patched.run("-c", ONE).stdout.startswith(f"patched {patched.cache}")
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert copy.stat().st_ino != before


def modes(folder: Path) -> dict[str, int]:
    """Permissions of a folder and of all folders in it."""
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir() and not path.is_symlink())]
    return {str(path): stat.S_IMODE(path.stat().st_mode) for path in folders}


def test_what_is_made_is_this_users_alone_whatever_the_umask(patched: Sandbox) -> None:
    shutil.rmtree(patched.cache)
    environment = patched.environment(SGLANG_PATCHES_CACHE=str(patched.cache / "deep" / "down"))
    done = subprocess.run(
        [sys.executable, "-c", ONE], env=environment, preexec_fn=lambda: os.umask(0), capture_output=True
    )
    assert done.stdout.startswith(f"patched {patched.cache}/deep/down".encode()), done.stderr
    assert set(modes(patched.cache).values()) == {0o700}, modes(patched.cache)
    (copy,) = patched.copies()
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600


@NEEDS_ROOT
def test_nowhere_safe_to_write_stops_the_process(patched: Sandbox, tmp_path: Path) -> None:
    """The temporary folder is held to the same."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    patched.cache.chmod(0o777)
    done = patched.run("-c", ONE, TMPDIR=str(tmp_path / "open"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "cannot write patched files" in message(done)
    assert f"every user can write to {patched.cache}" in message(done)
    assert f"every user can write to {tmp_path / 'open'}" in message(done)


def test_bytecode_that_is_kept_elsewhere(patched: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "bytecode").mkdir()
    prefix = {"PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode")}
    assert patched.run("-c", ONE, **prefix).returncode == 0
    (tmp_path / "bytecode").chmod(0o777)
    done = patched.run("-c", ONE, **prefix)
    assert done.returncode == 1
    assert f"every user can write to {tmp_path / 'bytecode'}" in message(done)


def test_bytecode_in_a_shared_folder_is_this_users_alone(tmp_path: Path) -> None:
    """As in /tmp: there another user could be first with a folder that is not made yet."""
    tmp_path.chmod(0o1777)
    before = os.umask(0)
    try:
        cache._secure_bytecode(str(tmp_path / "a" / "b" / "x.pyc"))
    finally:
        os.umask(before)
    assert modes(tmp_path / "a") == {str(tmp_path / "a"): 0o700, str(tmp_path / "a" / "b"): 0o700}


def test_the_folder_of_bytecode_is_made_before_it_is_used(patched: Sandbox, tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    code = f"import sys; sys.dont_write_bytecode = True; {ONE}"
    done = patched.run("-c", code, PYTHONPYCACHEPREFIX=str(tmp_path / "bytecode"))
    assert done.stdout.startswith(f"patched {patched.cache}"), done.stderr
    made = Path(f"{tmp_path}/bytecode{patched.copies()[0].parent}")
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_bytecode_that_has_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it cannot be made nobody else must be able to make it."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "mkdir", full)
    cache._secure_bytecode(str(tmp_path / "a" / "__pycache__" / "x.pyc"))
    tmp_path.chmod(0o1777)
    with pytest.raises(PermissionError, match="every user can write to"):
        cache._secure_bytecode(str(tmp_path / "a" / "__pycache__" / "x.pyc"))


def test_a_link_of_ones_own_is_followed(patched: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(patched.cache)
    done = patched.run("-c", ONE, SGLANG_PATCHES_CACHE=str(tmp_path / "link"))
    assert done.stdout.startswith(f"patched {tmp_path}/link/"), done.stderr


def test_links(tmp_path: Path) -> None:
    (tmp_path / "real" / "inside").mkdir(parents=True)
    (tmp_path / "public").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "up").symlink_to("public/../real")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "public" / "to").symlink_to(tmp_path / "real")
    assert trust.distrusted(str(tmp_path / "link" / "inside")) is None
    assert trust.distrusted(str(tmp_path / "up" / "inside")) is None
    assert "more than 40 links" in (trust.distrusted(str(tmp_path / "circle" / "x")) or "")
    (tmp_path / "public").chmod(0o777)
    # The folder it leads to is safe, the one that the link is in is not; and not where a link only passes through.
    for path in (tmp_path / "public" / "to" / "inside", tmp_path / "up" / "inside"):
        assert (trust.distrusted(str(path)) or "").startswith("every user can write to"), path
    # As in /tmp: what is this user's in there, nobody else can rename.
    (tmp_path / "public").chmod(0o1777)
    assert trust.distrusted(str(tmp_path / "public" / "to" / "inside")) is None
    assert (trust.distrusted(str(tmp_path / "public")) or "").startswith("every user can write to")
    # Also where the last link ends in a word that names no folder.
    (tmp_path / "dot").symlink_to("public/.")
    (tmp_path / "dots").symlink_to("public/to/..")
    (tmp_path / "public" / "inside").mkdir()
    (tmp_path / "public" / "back").symlink_to("inside/..")
    for link in ("dot", "public/back"):
        assert (trust.distrusted(str(tmp_path / link)) or "").startswith("every user can write to"), link
    assert trust.distrusted(str(tmp_path / "dots")) is None  # the parent of what `to` leads to


@NEEDS_ROOT
def test_a_strangers_link_in_a_shared_folder(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "link").symlink_to(tmp_path)
    assert trust.distrusted(str(shared / "link")) is None
    os.chown(shared / "link", STRANGER, -1, follow_symlinks=False)
    assert trust.distrusted(str(shared / "link")) == (
        f"the link {shared / 'link'} belongs to another user (uid {STRANGER})"
    )


def test_the_group_of_one_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a umask of 002 and a group for each user, ~/.cache has mode 0775 and nobody else can write to it."""
    tmp_path.chmod(0o775)
    me = pwd.getpwuid(os.geteuid())

    def group(name: str, members: list[str], gid: int = me.pw_gid) -> None:
        monkeypatch.setattr(grp, "getgrgid", lambda _: grp.struct_group((name, "x", gid, members)))

    os.chown(tmp_path, -1, me.pw_gid)
    monkeypatch.setattr(pwd, "getpwall", lambda: [me])
    group(me.pw_name, [])
    assert trust.distrusted(str(tmp_path)) is None
    other = pwd.struct_passwd(("bob", "x", me.pw_uid + 1, me.pw_gid, "", "/", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwall", lambda: [me, other])
    assert f"group {me.pw_gid} can write to {tmp_path}" in (trust.distrusted(str(tmp_path)) or "")
    monkeypatch.setattr(pwd, "getpwall", lambda: [me])
    for name, members in ((me.pw_name, ["alice"]), ("users", [])):
        group(name, members)
        assert f"group {me.pw_gid} can write to {tmp_path}" in (trust.distrusted(str(tmp_path)) or ""), name
    # In a user namespace, the number that any group from outside has there.
    group(me.pw_name, [])
    assert trust.distrusted(str(tmp_path)) is None
    monkeypatch.setattr(trust, "_unnamed", {"gid": me.pw_gid}.get)
    assert f"group {me.pw_gid} can write to {tmp_path}" in (trust.distrusted(str(tmp_path)) or "")


def test_the_private_folder_of_a_process_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PATCHES_CACHE", str(tmp_path / "cache"))
    copy = Path(cache.store("k", "sglang/x.py", b"x = 1\n", "/none", b""))
    assert copy.read_bytes() == b"x = 1\n"
    assert trust.distrusted(str(copy)) is None


def test_a_user_without_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container with a user id of its own: `~` stays `~`, and is no folder here."""

    def unknown(_: int) -> pwd.struct_passwd:
        raise KeyError

    for variable in ("HOME", "XDG_CACHE_HOME", "SGLANG_PATCHES_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path)
    cache._without_home.cache_clear()
    with caplog.at_level(logging.WARNING, logger="sglang_patches"):
        made = Path(cache.folder())
    assert (made.parent, made) == (tmp_path / "tmp", Path(cache.folder()))
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert "has no home folder" in caplog.text
    assert not (tmp_path / "~").exists()
    cache._without_home.cache_clear()


def test_warm_writes_what_a_read_only_image_needs(patched: Sandbox) -> None:
    shutil.rmtree(patched.cache)
    done = patched.cli("warm")
    (copy,) = patched.copies()
    assert done.stdout == f"{PATH}\t{copy}\n"
    patched.cache.chmod(0o777)
    done = patched.cli("warm")
    assert done.returncode == 2
    assert f"{patched.cache} was not used" in done.stderr
