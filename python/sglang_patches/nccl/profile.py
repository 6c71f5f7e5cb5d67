"""NCCL settings that were measured as a whole, where they are kept, and which of them a host gets.

A profile is named by what it was measured on: the fingerprint of the GPUs of one group (`topology.Topology`) and the
NCCL version. ``sglang-patches nccl tune`` writes profiles; the server picks one with `choose`.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_patches.nccl.topology import Topology

logger = logging.getLogger("sglang_patches")

SELECTION = "SGLANG_PATCHES_NCCL_PROFILE"
FOLDER = "SGLANG_PATCHES_PROFILES"
GRAPH_MIXING = "NCCL_GRAPH_MIXING_SUPPORT"
STREAM_ORDERING = "NCCL_GRAPH_STREAM_ORDERING"
PCIE_IPC = "pcie_ipc"

# From the first release whose ncclConfig_t has graphUsageMode, so that one communicator alone can do without graph
# mixing, to the first that nobody has read and measured: NCCL changes what the mode does (2.30 made it depend on
# another setting).
_GRAPH_USAGE_MODE_SINCE, _GRAPH_USAGE_MODE_BEFORE = (2, 29), (2, 31)
_FORMAT = 1

# What a profile may set. An operator who sets one of them has tuned by hand, and a profile measured without that
# setting says nothing about the mixture.
TUNING = (
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_P2P_LEVEL",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
    "NCCL_BUFFSIZE",
    "NCCL_NTHREADS",
    "NCCL_LL_BUFFSIZE",
    "NCCL_LL128_BUFFSIZE",
    "NCCL_LL128_NTHREADS",
    "NCCL_TUNER_PLUGIN",
    GRAPH_MIXING,
)
# What all ranks must have alike: also what takes effect only in a communicator that a profile asks for.
CHECKED = (*TUNING, STREAM_ORDERING)


class ProfileError(ValueError):
    """A profile that cannot be read, or that does not exist."""


@dataclass(frozen=True, slots=True)
class Crossover:
    """The largest all-reduce for which one path beat NCCL: `rows` of the hidden size, `size_bytes` in all."""

    rows: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Profile:
    """NCCL settings of one group of GPUs.

    Attributes:
        name: for people, and for ``SGLANG_PATCHES_NCCL_PROFILE=<name>``.
        environment: variables to set before any worker starts, by name.
        graphs_only: the communicator that CUDA graphs use is made for graphs alone (``graphUsageMode`` 1), which
            drops the events that NCCL puts around every captured call otherwise. Needs NCCL 2.29 or 2.30.
        fingerprint: of the topology it was measured on; None for a built-in, which fits any.
        nccl_version: it was measured with, such as "2.30.7"; None for a built-in.
        crossovers: by path (``pcie_ipc``, ``custom``), up to which size that path beat NCCL with these settings.
        provenance: where the figures come from, JSON-able.
        source: "built-in", or the file it was read from.
        why: why `choose` picked it.
        kept: variables of `environment` that were set already, with the values they keep.
    """

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    graphs_only: bool = False
    fingerprint: str | None = None
    nccl_version: str | None = None
    crossovers: Mapping[str, Crossover] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    source: str = "built-in"
    why: str = ""
    kept: Mapping[str, str] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """It changes nothing."""
        return not (self.environment or self.graphs_only or self.crossovers)


_MEASURED = {
    "what": "all-reduce of rows x 7168 bf16 in a captured graph, 50 in a row, medians of 40 replays",
    "machine": "2x NVIDIA H200, peer access off (NCCL_P2P_DISABLE=1)",
    "nccl_version": "2.30.7",
    "results": "benchmark/allreduce/results/2xh200-nccl2.30.7",
    "not_measured": "hosts of more than two GPUs; a tuned profile replaces this one there",
}
_MEASURED_BEFORE = {name: value for name, value in _MEASURED.items() if name != "results"} | {"nccl_version": "2.28.9"}

NONE = Profile("none")
# No channels: with cuMem off, as upstream sets it, NCCL takes some 9 MiB of /dev/shm for each of them, each connection
# without peer access and each communicator, which eight GPUs of a container may not have.
DEFAULT = Profile("default", graphs_only=True, provenance=_MEASURED)
TWO_GPUS = Profile("two-gpus", {"NCCL_MIN_NCHANNELS": "16"}, graphs_only=True, provenance=_MEASURED)
BUILT_IN: dict[str, Profile] = {
    "none": NONE,
    "default": DEFAULT,
    "two-gpus": TWO_GPUS,
    # The settings of the story this project came from. They gain nothing up to 16 rows and halve the speed at 64.
    "story": Profile(
        "story",
        {
            "NCCL_PROTO": "LL",
            "NCCL_ALGO": "Ring",
            "NCCL_P2P_LEVEL": "SYS",
            "NCCL_MAX_NCHANNELS": "16",
            "NCCL_BUFFSIZE": "16777216",
            "NCCL_NTHREADS": "512",
        },
        provenance=_MEASURED_BEFORE,
    ),
    # Process-wide, so it takes ProcessGroupNCCL's communicators too: only for who knows that none of them is both in a
    # graph and called outside of it, and only before NCCL 2.29 (see `choose`).
    "graph-mixing-off": Profile("graph-mixing-off", {GRAPH_MIXING: "0"}, provenance=_MEASURED_BEFORE),
}


def folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where profiles are kept: ``SGLANG_PATCHES_PROFILES``, else ``~/.config/sglang-patches/profiles``."""
    named = (os.environ if environ is None else environ).get(FOLDER)
    return Path(named).expanduser() if named else Path("~/.config/sglang-patches/profiles").expanduser()


def version_text(code: int) -> str:
    """``ncclGetVersion``'s number as people write it: 23007 is "2.30.7"."""
    major, rest = (code // 1000, code % 1000) if code < 10000 else (code // 10000, code % 10000)
    return f"{major}.{rest // 100}.{rest % 100}"


def save(profile: Profile, into: Path | None = None) -> Path:
    """Write `profile` to its file in the folder (`folder()` by default), replacing one of the same host and NCCL.

    Returns the file. Raises ProfileError for one that names no fingerprint or NCCL version: it could never be chosen.
    """
    if not profile.fingerprint or not profile.nccl_version:
        raise ProfileError(
            f"profile {profile.name!r}: fingerprint {profile.fingerprint!r}, nccl_version {profile.nccl_version!r}; "
            "both are needed to find it again"
        )
    target = into or folder()
    target.mkdir(parents=True, exist_ok=True)
    path = target / f"{profile.fingerprint}-nccl{profile.nccl_version}.json"
    content = {"format": _FORMAT, **asdict(profile)}
    for decided in ("source", "why", "kept"):
        del content[decided]
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def load(path: Path) -> Profile:
    """The profile in a file. Raises ProfileError, which names the file and what is wrong with it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("format") != _FORMAT:
            raise ValueError(f"not format {_FORMAT}")
        environment = {_variable(name): str(value) for name, value in data.pop("environment").items()}
        crossovers = {place: Crossover(**values) for place, values in data.pop("crossovers", {}).items()}
        # Set process-wide it would take communicators that no one measured (docs/patches/pcie-nccl-allreduce.md).
        graphs_only = bool(data.pop("graphs_only", False)) or environment.get(GRAPH_MIXING) == "0"
        environment.pop(GRAPH_MIXING, None)
        return Profile(
            environment=environment, crossovers=crossovers, graphs_only=graphs_only, source=str(path), **data
        )
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ProfileError(
            f"{path}: not a profile ({error})\n  remedy     write it anew with `sglang-patches nccl tune`, or delete it"
        ) from error


def find(topology: Topology, nccl_version: str | None, environ: Mapping[str, str] | None = None) -> Profile | None:
    """The tuned profile for these GPUs and this NCCL, if there is one. Raises ProfileError if it cannot be read.

    A folder that this user cannot look into, or a user without a home, has none: the server starts all the same.
    """
    try:
        path = folder(environ) / f"{topology.fingerprint()}-nccl{nccl_version}.json"
        there = path.is_file()
    except (OSError, RuntimeError) as error:
        logger.warning(
            "sglang-patches: tuned NCCL profiles cannot be looked for (%s); %s names a folder", error, FOLDER
        )
        return None
    return load(path) if there else None


def choose(topology: Topology, nccl_version: str | None, environ: Mapping[str, str] | None = None) -> Profile:
    """What to set for the group of all GPUs in `topology` (see `Topology.subset`), and why.

    In this order: nothing without two GPUs or where every pair has NVLink; what ``SGLANG_PATCHES_NCCL_PROFILE`` names
    (a built-in or a saved profile, or ``auto``, which is also its default); nothing where the environment or a
    configuration file of NCCL tunes it already; the tuned profile of these GPUs and this NCCL; nothing where NVML does
    not tell whether there is NVLink; the built-in for two GPUs, or the built-in default for more.
    Variables that are set already are never replaced.

    Args:
        nccl_version: of the library that will be used, such as "2.30.7"; None where it is unknown.
        environ: instead of `os.environ`.

    Raises:
        ProfileError: a named profile does not exist or is not for this NCCL, or a file cannot be read.
    """
    environ = os.environ if environ is None else environ
    wanted = environ.get(SELECTION, "auto").strip() or "auto"
    named = None if wanted == "auto" else _named(wanted, environ)
    if topology.absent or len(topology.gpus) < 2:
        return replace(NONE, why=topology.describe())
    if topology.full_nvlink():
        return replace(NONE, why=f"every pair of the {len(topology.gpus)} GPUs has NVLink")
    if named is not None:
        return _fit(named, nccl_version, environ, f"{SELECTION}={wanted}")
    own = {name: environ[name] for name in TUNING if name in environ}
    in_files = {name: told for name, told in nccl_files(environ).items() if name in TUNING and name not in own}
    if own or in_files:
        told = [f"{name}={value}" for name, value in own.items()]
        told += [f"{name}={value} (in {file})" for name, (value, file) in in_files.items()]
        return replace(NONE, kept=own, why=f"NCCL is tuned already, by the operator or upstream: {', '.join(told)}")
    tuned = find(topology, nccl_version, environ)
    if tuned is not None:
        return _fit(tuned, nccl_version, environ, "tuned for these GPUs and this NCCL")
    if topology.nvlink_untold():
        return replace(
            NONE,
            why=f"NVML does not tell whether the {len(topology.gpus)} GPUs have NVLink (a virtual machine?); "
            f"`sglang-patches nccl tune` measures what is fast, {SELECTION}=default takes the built-in",
        )
    built_in = TWO_GPUS if len(topology.gpus) == 2 else DEFAULT
    return _fit(built_in, nccl_version, environ, "no tuned profile for these GPUs and this NCCL")


def _named(name: str, environ: Mapping[str, str]) -> Profile:
    if name in BUILT_IN:
        return BUILT_IN[name]
    try:
        where = folder(environ)
        # Listed, not globbed: glob takes a folder it may not look into for an empty one.
        files = sorted(file for file in where.iterdir() if file.suffix == ".json") if where.exists() else []
    except (OSError, RuntimeError) as error:
        raise ProfileError(
            f"{SELECTION}={name!r}: no built-in, and saved profiles cannot be looked for: {error}\n"
            f"  known      auto, {', '.join(sorted(BUILT_IN))}\n"
            f"  remedy     name a folder that this user can read in {FOLDER}"
        ) from error
    saved = {profile.name: profile for profile in map(load, files)}
    if name not in saved:
        raise ProfileError(
            f"{SELECTION}={name!r}: no such profile\n"
            f"  known      auto, {', '.join(sorted(BUILT_IN))}; in {where}: {', '.join(sorted(saved)) or 'none'}"
        )
    return saved[name]


def _fit(profile: Profile, nccl_version: str | None, environ: Mapping[str, str], why: str) -> Profile:
    if profile.environment.get(GRAPH_MIXING) == "0" and _number(nccl_version) >= _GRAPH_USAGE_MODE_SINCE:
        raise ProfileError(
            f"profile {profile.name!r} sets {GRAPH_MIXING}=0, by which NCCL {nccl_version} takes every communicator of "
            f"the process for one that no graph uses, and warns at capture that it can hang\n"
            f"  expected   an NCCL before {'.'.join(map(str, _GRAPH_USAGE_MODE_SINCE))}\n"
            f"  remedy     {SELECTION}=default does it for the one communicator that graphs use"
        )
    kept = {name: environ[name] for name in profile.environment if name in environ}
    graphs_only = profile.graphs_only
    if graphs_only and (why_not := _not_for_graphs_only(nccl_version, environ)):
        graphs_only = False
        why += f"; {why_not}"
        kept |= {name: environ[name] for name in (GRAPH_MIXING, STREAM_ORDERING) if name in environ}
    environment = {name: value for name, value in profile.environment.items() if name not in environ}
    return replace(profile, environment=environment, graphs_only=graphs_only, kept=kept, why=why)


def _not_for_graphs_only(nccl_version: str | None, environ: Mapping[str, str]) -> str:
    """Why no communicator can be made for graphs alone; empty where one can."""
    since, before = _GRAPH_USAGE_MODE_SINCE, _GRAPH_USAGE_MODE_BEFORE
    version = _number(nccl_version)
    if version < since:
        return f"NCCL {nccl_version or 'of unknown version'} cannot set graph mixing for one communicator"
    if version >= before:
        return (
            f"nobody has measured a communicator for graphs alone with NCCL {nccl_version}, only with "
            f"{since[0]}.{since[1]} to before {before[0]}.{before[1]}"
        )
    set_already = nccl_files(environ) | {name: (value, "the environment") for name, value in environ.items()}
    if GRAPH_MIXING in set_already:
        value, place = set_already[GRAPH_MIXING]
        return f"{GRAPH_MIXING}={value} is set already in {place}"
    value, place = set_already.get(STREAM_ORDERING, ("1", ""))
    if _is_zero(value):
        # It acts on communicators for graphs alone only: they would lose the stream order that this patch relies on.
        return f"{STREAM_ORDERING}={value} (in {place}) takes stream order from a communicator for graphs alone"
    return ""


def nccl_files(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Variables that NCCL itself will read from its files, which the environment overrides: name to value and file."""
    home = environ.get("HOME")
    user = environ.get("NCCL_CONF_FILE") or (os.path.join(home, ".nccl.conf") if home else None)
    found: dict[str, tuple[str, str]] = {}
    for file in filter(None, (user, "/etc/nccl.conf")):
        try:
            lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for name, separator, value in (line.strip().partition("=") for line in lines):
            if separator and not name.startswith("#"):
                found.setdefault(name, (value, file))
    return found


def _is_zero(value: str) -> bool:
    """As NCCL reads a number: C's strtoll, for which a text without digits is 0; empty counts as unset."""
    number = re.match(r"\s*[+-]?(0[xX][0-9a-fA-F]+|\d+)", value)
    return bool(value) and not (number and number[1].lower().strip("0x"))


def _number(nccl_version: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", nccl_version or ""))


def _variable(name: str) -> str:
    if not name.startswith("NCCL_"):
        raise ValueError(f"it sets {name!r}, which is no variable of NCCL")
    return name
