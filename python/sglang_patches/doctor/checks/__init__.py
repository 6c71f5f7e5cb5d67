"""The checks: pure functions from a `Host` to findings. Each yields at least one, also where all is well."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sglang_patches.doctor.checks import gpus, process, serving, software
from sglang_patches.doctor.finding import Finding
from sglang_patches.doctor.host import Host

Check = Callable[[Host], Iterator[Finding]]

#: In the order of the report: what everything else rests on first.
CHECKS: tuple[Check, ...] = (
    gpus.driver,
    gpus.count,
    gpus.peer_access,
    gpus.pcie_link,
    gpus.numa,
    software.versions,
    software.nccl,
    software.kernels,
    software.patches,
    process.import_path,
    process.allocator,
    process.shared_memory,
    process.limits,
    serving.model,
    serving.draft,
    serving.memory,
    serving.port,
    process.unread,
)


def examine(host: Host) -> list[Finding]:
    """All findings on a host, in the order of `CHECKS`."""
    return [finding for check in CHECKS for finding in check(host)]
