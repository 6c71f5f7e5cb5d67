"""What the server's processes inherit: allocator settings, shared memory, limits. And what could not be read."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_patches.doctor.checks.gpus import no_peer_access
from sglang_patches.doctor.finding import Finding, Level
from sglang_patches.doctor.host import Host

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# One segment for each channel of each directed connection without peer access (docs/patches/pcie-nccl-allreduce.md).
_SEGMENT = 9_637_888
_COMMUNICATORS = 2  # the least of a server: pynccl's in graphs, torch's outside
_GIB = 1 << 30
_MIB = 1 << 20
_NCCL_ADVICE = 1 * _GIB  # NCCL's guide, troubleshooting, Docker: --shm-size=1g
_OPEN_FILES = 65535  # what upstream raises its own limit to (utils/common.py, set_ulimit)


def allocator(host: Host) -> Iterator[Finding]:
    """``expandable_segments``, which memory shared between processes cannot come from."""
    name = "allocator"
    for variable in _ALLOCATOR:
        options = [part.partition(":") for part in host.environment.get(variable, "").split(",")]
        if any(
            key.strip() == "expandable_segments" and value.strip().lower() in ("true", "1") for key, _, value in options
        ):
            several = host.serving.tp > 1
            yield Finding(
                name,
                "warning" if several else "note",
                f"{variable} switches expandable_segments on",
                "such memory has no CUDA IPC handle, so all-reduce paths that share buffers between ranks fail or "
                "switch off: custom all-reduce takes 2.0 us where NCCL takes 17.8 (1 row, two H200s, "
                "benchmark/allreduce)"
                if several
                else "it concerns memory that ranks share, and there is 1 rank",
                f"unset {variable}, or take expandable_segments out of it",
            )
            return
    yield Finding(name, "ok", "no expandable_segments")


def nccl_shared_memory(host: Host) -> int:
    """Bytes of /dev/shm that NCCL takes, at most, with the built-in profile for this number of ranks."""
    ranks = host.serving.tp
    if not no_peer_access(host):
        return 0
    # A ring has one directed connection a rank, a tree two for each rank but its root; two ranks have the same two.
    connections = 2 if ranks == 2 else ranks + 2 * (ranks - 1)
    channels = 16 if ranks == 2 else 2
    return _SEGMENT * channels * connections * _COMMUNICATORS


def shared_memory(host: Host) -> Iterator[Finding]:
    """/dev/shm against what NCCL needs where there is no peer access."""
    name = "shared memory"
    if host.shm is None or host.shm_free is None:
        yield Finding(
            name,
            "warning",
            "/dev/shm could not be read",
            f"NCCL wants {_NCCL_ADVICE // _GIB} GiB there (NCCL's guide)",
            "mount a tmpfs on /dev/shm",
        )
        return
    seen = f"/dev/shm has {_size(host.shm_free)} free of {_size(host.shm)}"
    need = nccl_shared_memory(host)
    container = f" in container {host.container}" if host.container else ""
    larger = (
        "give the container --shm-size=16g or --ipc=host"
        if host.container
        else "mount -o remount,size=16g /dev/shm; remove what earlier servers left there"
    )
    if host.serving.tp > 1 and host.shm_free < need // _COMMUNICATORS:
        yield Finding(
            name,
            "failure",
            seen + container,
            f"NCCL needs up to {_size(need)} for {host.serving.tp} ranks without peer access (9,637,888 bytes a "
            "channel and connection, docs/patches/pcie-nccl-allreduce.md): the first communicator fails",
            larger,
        )
    elif host.serving.tp > 1 and host.shm_free < max(need, _NCCL_ADVICE):
        yield Finding(
            name,
            "warning",
            seen + container,
            f"NCCL's guide asks for {_size(_NCCL_ADVICE)}"
            + (f", and {host.serving.tp} ranks without peer access need up to {_size(need)} (reckoned)" if need else "")
            + "; images pass between processes there too",
            larger,
        )
    else:
        yield Finding(name, "ok", seen)


def import_path(host: Host) -> Iterator[Finding]:
    """Folders before the installed packages where another user can put modules."""
    name = "import path"
    for folder, reason in host.import_path.items():
        yield Finding(
            name,
            "warning",
            f"`python -m` started here looks for modules in {folder} first, and {reason}",
            "1 file that another user puts there (json.py, sglang/) is the server's, with its rights and its API key",
            "`sglang-patches launch` and `make serve` leave the current folder out; so does PYTHONSAFEPATH=1 before "
            "`python -m sglang.launch_server`. A folder that PYTHONPATH names has to be this user's",
        )
    if not host.import_path:
        yield Finding(name, "ok", "no module comes from a folder that another user can write to")


def limits(host: Host) -> Iterator[Finding]:
    """Hard limits; upstream raises the soft ones itself."""
    name, fine = "limits", True
    files = host.limits.get("nofile", -1)
    if 0 <= files < _OPEN_FILES:
        fine = False
        level: Level = "note" if files >= 4096 else "warning"
        yield Finding(
            name,
            level,
            f"at most {files} open files (hard limit)",
            f"upstream asks for {_OPEN_FILES}; each connection takes one, so about {files} clients at once",
            f"ulimit -Hn {_OPEN_FILES}, LimitNOFILE= in the unit, or --ulimit nofile={_OPEN_FILES}",
        )
    processes, wanted = host.limits.get("nproc", -1), (host.serving.tp + 2) * max(1, len(host.cpus))
    if 0 <= processes < wanted:
        fine = False
        yield Finding(
            name,
            "warning",
            f"at most {processes} processes and threads",
            f"{host.serving.tp + 2} processes with a pool of one thread a CPU each ({len(host.cpus)}) make {wanted} "
            "(reckoned)",
            f"ulimit -u {2 * wanted}, or OMP_NUM_THREADS=1",
        )
    locked = host.limits.get("memlock", -1)
    if 0 <= locked < 64 * _MIB and host.serving.tp > 1:
        fine = False
        yield Finding(
            name,
            "note",
            f"at most {_size(locked)} of locked memory",
            "InfiniBand and some NCCL plugins register buffers of 4 MiB a channel (NCCL_BUFFSIZE's default); one "
            "host without them does not need it",
            "only where several hosts serve together: --ulimit memlock=-1",
        )
    if fine:
        yield Finding(name, "ok", f"open files {_limit(files)}, processes {_limit(processes)}")


def unread(host: Host) -> Iterator[Finding]:
    """Sources that could not be read, so that silence about them is not taken for health."""
    if not host.unread:
        yield Finding("could not be read", "ok", "nothing: every source answered")
    for source, why in host.unread.items():
        # Whether peer traffic is redirected concerns hosts with several GPUs only.
        harmless = source == "ACS" and len(host.topology.gpus) < 2
        yield Finding(
            "could not be read",
            "ok" if harmless else "note",
            f"{source}: {why}",
            "" if harmless else "1 source less: what it would show is not in this report",
            "" if harmless else "run as the user, and in the container, that will serve; as root for ACS",
        )


def _size(number: int) -> str:
    if number >= _GIB:
        return f"{number / _GIB:.1f} GiB"
    return f"{number / _MIB:.0f} MiB" if number >= _MIB else f"{number / 1024:.0f} KiB"


def _limit(number: int) -> str:
    return "unlimited" if number < 0 else str(number)
