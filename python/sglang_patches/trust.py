"""Whether another user could change what a path leads to.

What is loaded from the cache folder runs with this user's rights, so nobody but this user and root may be able to write
there, to put a folder of their own in its place, or to lead it elsewhere by a link. Permission bits and owners are
read, access control lists are not.

In a user namespace (rootless containers, bubblewrap) all users from outside show as one, the machine's root and a
stranger alike. What is theirs is not trusted, but for folders on the way that are root's on every machine.
"""

from __future__ import annotations

import os
import stat


def distrusted(path: str) -> str | None:
    """Why the folder or file at `path` is not this user's alone; None where it is, or where it does not exist yet.

    Looks at every folder on the way from the root of the file system, at the links on it, and where these lead.

    Raises:
        OSError: something on the way cannot be examined (no permission, a file for a folder, links in a circle).
    """
    rest = [part for part in os.path.abspath(path).split(os.sep) if part]
    at, links = os.sep, 0
    reason = _writable_by_others(at, os.lstat(at), final=not rest)
    while rest and reason is None:
        part = rest.pop(0)
        if part in (os.curdir, os.pardir):
            # Only after a link; `at` has none, so its parent is what it says.
            at = os.path.dirname(at) if part == os.pardir else at
            continue
        here = os.path.join(at, part)
        try:
            state = os.lstat(here)
        except FileNotFoundError:
            return None  # this user makes it, in a folder that only this user can write to
        if stat.S_ISLNK(state.st_mode):
            links += 1
            if links > 40:
                return f"{path} leads through more than 40 links"
            if not _ours(here, state, final=False):
                return f"the link {here} belongs to {_another(state)}"
            target = os.readlink(here)
            rest = [part for part in target.split(os.sep) if part] + rest
            at = os.sep if os.path.isabs(target) else at
            continue
        at = here
        reason = _writable_by_others(at, state, final=not rest)
    # A link may end in '.' or '..', and what it leads to has been passed through only.
    return reason or _writable_by_others(at, os.lstat(at), final=True)


def folder_of_ones_own() -> str:
    """What to name in place of a folder that is not trusted, in words for a remedy: what this process could do."""
    if _unnamed("uid") is None:
        return "a writable folder of your own"
    # Here "of your own" is not enough: what lies below a folder from outside is not trusted, and to give that one to
    # somebody else is not in this namespace's power.
    for parent in ("/var/tmp", "/tmp", "/dev/shm"):
        folder = f"{parent}/sglang-patches-{os.geteuid()}"
        try:
            if os.access(parent, os.W_OK | os.X_OK) and distrusted(folder) is None:
                return f"a folder that does not lie below one from outside of this user namespace, such as {folder}"
        except OSError:
            continue
    return (
        "a folder that does not lie below one from outside of this user namespace; none of /var/tmp, /tmp and /dev/shm "
        "takes one, so give the container a tmpfs (--tmpfs /tmp) or a volume that its own user owns"
    )


def _ours(path: str, state: os.stat_result, final: bool) -> bool:
    if state.st_uid not in (os.geteuid(), _unnamed("uid")):
        return state.st_uid == 0
    if state.st_uid != _unnamed("uid"):
        return True
    # Whoever it is, or this user, where it is `nobody`: the number does not say.
    if state.st_uid == os.geteuid() and _owns(path):
        return True
    # Where no other user of the namespace has the number either, `/` and its like are the machine's root's.
    return not final and path in _OF_ROOT and (state.st_uid == os.geteuid() or not _is_mapped(state.st_uid))


# Folders that are root's on every Linux (Filesystem Hierarchy Standard 3.0, and systemd's file-hierarchy(7)).
_OF_ROOT = frozenset((
    "/", "/dev", "/dev/shm", "/home", "/media", "/mnt", "/opt", "/run", "/run/user", "/srv", "/tmp", "/usr",
    "/usr/local", "/var", "/var/cache", "/var/home", "/var/lib", "/var/tmp",
))  # fmt: skip


def _unnamed(kind: str) -> int | None:
    """The user (``uid``) or group (``gid``) that stands for all from outside of this user namespace; None in the
    machine's own, which has no outside."""
    try:
        with open(f"/proc/self/{kind}_map", encoding="ascii") as file:
            if file.read().split() == ["0", "0", "4294967295"]:
                return None
        with open(f"/proc/sys/kernel/overflow{kind}", encoding="ascii") as file:
            return int(file.read())
    except OSError:
        return None


def _is_mapped(user: int) -> bool:
    """Whether a user of this namespace has this number."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return any(first <= user < first + count for first, _, count in ranges)


def _owns(path: str) -> bool:
    """Whether the file or folder is this process's user's, by what the kernel lets its owner alone do (open(2),
    O_NOATIME)."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NOATIME | os.O_NOFOLLOW | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def _another(state: os.stat_result) -> str:
    if state.st_uid == _unnamed("uid"):
        return f"a user from outside of this user namespace, root or not (shown as uid {state.st_uid})"
    return f"another user (uid {state.st_uid})"


def _writable_by_others(path: str, state: os.stat_result, final: bool) -> str | None:
    """`final`: `path` itself is used, not only passed through on the way."""
    if not _ours(path, state, final):
        return f"{path} belongs to {_another(state)}"
    # As in /tmp: others may add entries there, but not touch those of this user.
    if state.st_mode & stat.S_ISVTX and stat.S_ISDIR(state.st_mode) and not final:
        return None
    mode = stat.S_IMODE(state.st_mode)
    if mode & stat.S_IWOTH:
        return f"every user can write to {path} (mode {mode:04o})"
    if mode & stat.S_IWGRP and not _own_group(state.st_gid):
        return f"group {state.st_gid} can write to {path} (mode {mode:04o})"
    return None


def _own_group(group: int) -> bool:
    """Whether a group has no member but this user: root's where root runs, or one named like its only user.

    Members are those that the group lists and those whose own group it is.
    """
    import grp
    import pwd

    if group == _unnamed("gid"):
        return False  # any group from outside, whatever group of this namespace has its number
    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    if entry.gr_name != user.pw_name or user.pw_gid != group or not set(entry.gr_mem) <= {user.pw_name}:
        return False
    return all(other.pw_uid == user.pw_uid for other in pwd.getpwall() if other.pw_gid == group)
