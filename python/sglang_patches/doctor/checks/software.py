"""Versions, NCCL, sgl_kernel and patches."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sglang_patches.doctor.checks.gpus import positions
from sglang_patches.doctor.finding import Finding
from sglang_patches.doctor.host import Host, Kernels
from sglang_patches.nccl.bindings import GRAPHS_ONLY_SINCE

_HOPPER = 90


def versions(host: Host) -> Iterator[Finding]:
    """Installed distributions against what SGLang pins."""
    name = "versions"
    odd = {
        package: (host.installed.get(package), wanted)
        for package, wanted in host.pinned.items()
        # NCCL has a check of its own, on what is loaded.
        if not package.startswith("nvidia-nccl") and _base(host.installed.get(package)) != _base(wanted)
    }
    if not host.pinned:
        yield Finding(
            name,
            "warning",
            "what SGLang pins could not be read",
            "0 versions were compared",
            "pip install sglang-patches into this environment",
        )
    elif odd:
        shown = ", ".join(
            f"{package} {there or 'missing'} (pinned {wanted})" for package, (there, wanted) in odd.items()
        )
        missing = [package for package, (there, _) in odd.items() if there is None]
        yield Finding(
            name,
            "failure" if missing or "sglang" in odd else "warning",
            shown,
            "a library that is missing or another shows as speed, not as an error: an EAGLE-3 cycle took 4.6 ms in "
            "place of 3.3 on one H200 where one was missing (docs/doctor.md)",
            "pip install " + " ".join(f"{package}=={wanted}" for package, (_, wanted) in odd.items()),
        )
    else:
        yield Finding(name, "ok", ", ".join(f"{package} {host.installed[package]}" for package in sorted(host.pinned)))


def nccl(host: Host) -> Iterator[Finding]:
    """NCCL loaded once, and not older than pinned."""
    name = "NCCL"
    several = host.serving.tp > 1
    if host.nccl is None:
        yield Finding(
            name,
            "warning" if several else "ok",
            "could not be looked at",
            "which of several libraries a rank loads decides which settings act" if several else "",
            "see `could not be read` below" if several else "",
        )
        return
    if not host.nccl:
        yield Finding(
            name,
            "failure" if several else "ok",
            "no NCCL is loaded by torch",
            f"{host.serving.tp} ranks have nothing to sum with" if several else "",
            "install the CUDA build of torch that SGLang pins" if several else "",
        )
        return
    shown = ", ".join(f"{library.version or 'version untold'} from {library.path}" for library in host.nccl)
    if len(host.nccl) > 1:
        culprits = [key for key in ("SGLANG_NCCL_SO_PATH", "LD_PRELOAD", "LD_LIBRARY_PATH") if key in host.environment]
        yield Finding(
            name,
            "warning",
            f"loaded {len(host.nccl)} times: {shown}",
            "graphs use one (pynccl) and eager passes the other (torch), each with defaults and bugs of its own; a "
            "profile is measured for 1 version",
            f"unset {' and '.join(culprits)}" if culprits else "remove the one that is not torch's",
        )
    pinned = next((version for package, version in host.pinned.items() if package.startswith("nvidia-nccl")), None)
    old = [
        library for library in host.nccl if library.version and pinned and _number(library.version) < _number(pinned)
    ]
    if old:
        since = ".".join(map(str, GRAPHS_ONLY_SINCE))
        lacks = _number(old[0].version or "") < GRAPHS_ONLY_SINCE
        yield Finding(
            name,
            "warning" if several else "note",
            f"{old[0].version} is loaded, torch pins {pinned} ({old[0].path})",
            f"before {since} there are no communicators for graphs alone, which take 11.0 us where NCCL as it comes "
            "takes 24.8 (1 row, peer access off, benchmark/allreduce)"
            if lacks
            else f"figures and profiles here were measured with {pinned}",
            f"pip install {next(p for p in host.pinned if p.startswith('nvidia-nccl'))}=={pinned}, and let no "
            "LD_LIBRARY_PATH or SGLANG_NCCL_SO_PATH name another",
        )
    if len(host.nccl) == 1 and not old:
        yield Finding(name, "ok", shown)


def runs_on(kernels: Kernels, sm: int) -> bool:
    """Whether a library has code for this GPU: machine code of the same major and no higher minor, or older PTX."""
    same = any(arch // 10 == sm // 10 and arch <= sm for arch in kernels.archs)
    return same or any(arch <= sm for arch in kernels.ptx)


def kernels(host: Host) -> Iterator[Finding]:
    """Whether `sgl_kernel` imports and has code for these GPUs, and the right build of it is loaded."""
    name, found = "sgl_kernel", host.kernels
    gpus = bool(host.topology.gpus)
    if found is None:
        yield Finding(
            name,
            "warning",
            "could not be looked at",
            "without its kernels 0 requests are served",
            "see `could not be read` below",
        )
        return
    if found.error:
        yield Finding(
            name,
            "failure",
            f"does not import: {found.error}",
            "every scheduler imports it at start, so 0 ranks come up",
            "pip install --force-reinstall sglang-kernel, and check the driver above"
            if gpus
            else "switch patch cpu-eagle3 on, which brings a build for CPUs (unset SGLANG_PATCHES)",
        )
        return
    taken = [host.gpus[position] for position in positions(host) if position < len(host.gpus)]
    sms = sorted({gpu.sm for gpu in taken if gpu.sm is not None})
    if not gpus or not sms:
        yield Finding(name, "ok", f"{found.file}")
        return
    bare = [sm for sm in sms if not runs_on(found, sm)]
    if bare:
        shown = ", ".join(map(str, found.archs)) or "no GPU"
        yield Finding(
            name,
            "failure",
            f"{found.file} has code for SM {shown}, these GPUs are SM {', '.join(map(str, bare))}",
            "the first kernel fails with `no kernel image is available`, 0 requests are served",
            "install a build of sglang-kernel for this SM, or build it from upstream's source with "
            "TORCH_CUDA_ARCH_LIST=" + f"{bare[0] // 10}.{bare[0] % 10}",
        )
        return
    # sgl_kernel/load_utils.py in 0.4.10: sm90 for Hopper, sm100 for everything else.
    folder = re.search(r"/(sm\d+)/[^/]+$", found.file or "")
    wanted = "sm90" if sms[0] == _HOPPER else "sm100"
    if folder and folder[1] != wanted:
        yield Finding(
            name,
            "warning",
            f"{found.file} is loaded, but SM {sms[0]} takes {wanted}",
            "sm90 is built with fast, less exact mathematics for Hopper, sm100 exactly for the rest (2 builds in one "
            "wheel): answers differ from those of other hosts",
            "look for a second sgl_kernel on PYTHONPATH; pip install --force-reinstall sglang-kernel",
        )
        return
    yield Finding(name, "ok", f"{found.file} has code for SM {', '.join(map(str, sms))}")


def patches(host: Host) -> Iterator[Finding]:
    """The state of every patch of the series."""
    name = "patches"
    if host.patch_problem:
        yield Finding(
            name,
            "failure",
            host.patch_problem.splitlines()[0],
            "a process with an unusable selection stops at once: 0 ranks start",
            _remedy_in(host.patch_problem) or "sglang-patches status",
        )
        return
    bad = [patch for patch in host.patches if patch.state in ("mismatch", "inactive")]
    if bad:
        inactive = all(patch.state == "inactive" for patch in bad)
        yield Finding(
            name,
            "failure",
            ", ".join(f"{patch.name}: {patch.state}" for patch in bad),
            f"{len(bad)} of the selected patches are not in the process"
            if inactive
            else f"upstream's files differ from those that {len(bad)} patches were made for, so nothing starts",
            "install this distribution into the environment (PYTHONPATH is not enough)"
            if inactive
            else "sglang-patches status names the files; pip install --force-reinstall --no-deps sglang restores them",
        )
        return
    if not host.patches:
        yield Finding(
            name,
            "warning",
            "their state could not be read",
            "0 patches were checked",
            "sglang-patches status",
        )
        return
    applied = [patch.name for patch in host.patches if patch.state == "applied"]
    rest = [f"{patch.name} {patch.state}" for patch in host.patches if patch.state != "applied"]
    yield Finding(name, "ok", f"{len(applied)} applied" + (f"; {', '.join(rest)}" if rest else ""))


def _remedy_in(message: str) -> str:
    found = re.search(r"^\s*remedy\s+(.+)$", message, re.MULTILINE)
    return found[1] if found else ""


def _base(version: str | None) -> str | None:
    """Without the local part: torch's +cu130 is the pinned version all the same."""
    return version.partition("+")[0] if version else None


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
