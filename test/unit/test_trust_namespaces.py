"""Who is trusted in a user namespace, where users from outside all show as one."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_patches import trust

CAN_UNSHARE = pytest.mark.skipif(
    os.geteuid() != 0
    or not shutil.which("unshare")
    or subprocess.run(["unshare", "--user", "true"], capture_output=True).returncode != 0,
    reason="user namespaces, and giving files away, need root here",
)
OWNER, OUTSIDER = 10001, 10002
# How a user namespace is made for OWNER, and as which of its users OWNER runs there.
NAMESPACES = {"as root": ["--map-user=0"], "as nobody": ["--map-user=65534"], "as nobody that can be named": []}


def trusted_there(namespace: list[str], path: Path, group: int = OWNER) -> str | None:
    """What `trust.distrusted` says in a real user namespace of OWNER."""
    return said_there(namespace, f"trust.distrusted({str(path)!r})", group)


def said_there(namespace: list[str], expression: str, group: int = OWNER) -> str | None:
    """What an expression over module `trust` gives in a real user namespace of OWNER."""
    code = f"import sys; sys.path.insert(0, {str(Path(trust.__file__).parent)!r}); import trust; print({expression})"
    python = shutil.which("python3", path="/usr/bin:/bin") or "python3"  # one that OWNER can reach
    command = ["unshare", "--user", *namespace, python, "-I", "-S", "-c", code]
    done = subprocess.run(command, user=OWNER, group=group, extra_groups=[], capture_output=True, text=True, cwd="/")
    if done.returncode and "Permission denied" in done.stderr:
        pytest.skip(f"user {OWNER} cannot reach this checkout: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return None if done.stdout == "None\n" else done.stdout.strip()


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder of OWNER below the machine's /tmp, to which others can go (pytest's own are root's alone)."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder)
        path.chmod(0o755)
        os.chown(path, OWNER, OWNER)
        yield path


@CAN_UNSHARE
@pytest.mark.parametrize("namespace", NAMESPACES.values(), ids=NAMESPACES)
def test_a_user_namespace(namespace: list[str], reachable: Path) -> None:
    """There root's `/` and a stranger's folder show one owner, and where OWNER is `nobody`, OWNER's folders do, too."""

    def folder(name: str, owner: int, mode: int = 0o755) -> Path:
        made = reachable / name
        made.mkdir()
        made.chmod(mode)
        os.chown(made, owner, owner)
        return made

    own, strange = folder("own", OWNER), folder("strange", OUTSIDER)
    assert trusted_there(namespace, own) is None
    assert trusted_there(namespace, own / "new") is None
    outside = "belongs to a user from outside of this user namespace, root or not (shown as uid 65534)"
    assert trusted_there(namespace, strange) == f"{strange} {outside}"
    # On the way to a folder of OWNER: its owner could put another in its place. So for root's, which shows no other.
    for owner in (OUTSIDER, 0):
        os.chown(strange, owner, owner)
        shutil.rmtree(strange / "inside", ignore_errors=True)
        os.chown(folder("strange/inside", OWNER), OWNER, OWNER)
        assert trusted_there(namespace, strange / "inside") == f"{strange} {outside}", owner
    assert trusted_there(namespace, Path("/tmp")) == f"/tmp {outside}"
    os.symlink(own, reachable / "link")
    os.chown(reachable / "link", OUTSIDER, -1, follow_symlinks=False)
    assert trusted_there(namespace, reachable / "link") == f"the link {reachable / 'link'} {outside}"
    # Any group from outside shows as the same one, too.
    grouped = folder("grouped", OWNER, 0o775)
    os.chown(grouped, OWNER, OUTSIDER)
    assert "can write to" in (trusted_there(namespace, grouped) or "")


@CAN_UNSHARE
@pytest.mark.parametrize("namespace", NAMESPACES.values(), ids=NAMESPACES)
def test_the_remedy_in_a_user_namespace_can_be_done_there(namespace: list[str]) -> None:
    """What it names is trusted and can be made; "a folder of your own" need not be, and no owner can be changed."""
    user = {"as root": 0}.get(next(name for name in NAMESPACES if NAMESPACES[name] is namespace), 65534)
    remedy = said_there(namespace, "trust.folder_of_ones_own()")
    assert remedy is not None
    folder = remedy.rpartition(" ")[2]
    assert folder == f"/var/tmp/sglang-patches-{user}"
    assert trusted_there(namespace, Path(folder)) is None
    made = said_there(
        namespace, f"(trust.os.mkdir({folder!r}), trust.distrusted({folder!r}), trust.os.rmdir({folder!r}))"
    )
    assert made == "(None, None, None)"


def test_the_remedy_outside_of_one_and_where_there_is_no_such_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_unnamed", lambda kind: None)
    assert trust.folder_of_ones_own() == "a writable folder of your own"
    monkeypatch.setattr(trust, "_unnamed", lambda kind: 65534)
    monkeypatch.setattr(trust, "distrusted", lambda path: "not this user's")
    assert "give the container a tmpfs" in trust.folder_of_ones_own()


def test_a_user_namespace_that_has_a_nobody_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in rootless podman: then `/home` may be that user's. Simulated: to map several users takes newuidmap."""
    real = os.lstat

    def lstat(path: str | Path) -> os.stat_result:
        state = list(real(path))
        state[stat.ST_UID] = 65534 if str(path) in ("/", "/tmp") else os.geteuid()
        return os.stat_result(state)

    monkeypatch.setattr(os, "lstat", lstat)
    monkeypatch.setattr(trust, "_unnamed", lambda kind: 65534)
    monkeypatch.setattr(trust, "_is_mapped", lambda user: False)
    assert trust.distrusted("/tmp/sglang-patches-not-there") is None
    monkeypatch.setattr(trust, "_is_mapped", lambda user: True)
    assert (trust.distrusted("/tmp/sglang-patches-not-there") or "").startswith("/ belongs to a user from outside")
    monkeypatch.setattr(trust, "_unnamed", lambda kind: None)
    assert trust.distrusted("/tmp/sglang-patches-not-there") == "/ belongs to another user (uid 65534)"
