"""Which NCCL settings this server gets, decided once in the launching process and inherited by every worker."""

from __future__ import annotations

import ctypes
import json
import logging
import os
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from sglang_patches import lane
from sglang_patches.nccl import profile, topology
from sglang_patches.runtime import _outcome
from sglang_patches.runtime._ranks import gpu_positions

logger = logging.getLogger("sglang_patches")

PATCH = "pcie-nccl-allreduce"
# One variable carries the decision to the workers, on every way upstream starts them.
DECISION = "SGLANG_PATCHES_NCCL_DECISION"
IPC_SWITCH, IPC_LIMIT = "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE", "SGLANG_PCIE_IPC_MAX_NUMEL"
# The sizes flashinfer builds channels for (upstream's pcie_ipc_ar.py), and the bytes of the only dtype it takes, bf16.
_IPC_WORLD_SIZES, _IPC_ITEM_BYTES = (2, 4, 8), 2


@dataclass(frozen=True, slots=True)
class Decision:
    """What every worker must find, JSON-able.

    Attributes:
        profile, source, why, fingerprint: of the chosen profile and the GPUs it was chosen for.
        host: those GPUs in words.
        environment: variables that were set.
        kept: variables that were set before and stay.
        nccl_version: of the library the launching process loads; None where it cannot.
        graphs_only: the communicator that graphs use is made for them alone.
        graphs_only_why: why not, else empty.
        launcher: every variable of `profile.CHECKED` that the launching process had once it had decided.
        in_files: those of them that NCCL's own files set, which NCCL adds to a process's environment as it starts.
    """

    profile: str
    source: str
    why: str
    fingerprint: str
    host: str
    environment: dict[str, str]
    kept: dict[str, str]
    nccl_version: str | None
    graphs_only: bool = False
    graphs_only_why: str = ""
    launcher: dict[str, str] = field(default_factory=dict)
    in_files: dict[str, str] = field(default_factory=dict)

    @property
    def changes_something(self) -> bool:
        return bool(self.environment or self.graphs_only)

    @property
    def expected(self) -> dict[str, str]:
        """Every variable a worker must see, with its value; it must see no other one of `profile.CHECKED`."""
        return self.launcher | self.kept | self.environment


def prepare(cfg: Any, environ: MutableMapping[str, str] = os.environ) -> Decision | None:
    """Set the environment that workers will inherit, before any of them starts.

    Args:
        cfg: upstream's resolved server arguments.
        environ: what is read and changed.

    Returns:
        The decision, which is also in the environment; None where this server has no group that needs one, or none
        can be made for it.

    Raises:
        ProfileError: the profile named by the operator does not exist or is not for this NCCL, or a file cannot be
            read.
    """
    _withdraw(environ)
    if reason := _no_concern(cfg):
        _outcome.record(PATCH, "not needed", reason)
        return None
    host = topology.read(environ)
    if host.absent:
        _outcome.record(
            PATCH,
            "failed",
            f"whether the {cfg.tp_size} GPUs of a group have NVLink is not known ({host.absent}), so nothing is set; "
            "make `nvidia-smi topo -m` work here, as NVML is what it asks too",
        )
        return None
    try:
        groups = [host.subset(ranks) for ranks in gpu_positions(cfg)]
    except IndexError as error:
        _outcome.record(PATCH, "failed", f"the server asks for more GPUs than are visible: {error}; nothing is set")
        return None
    slow = [group for group in groups if not group.full_nvlink()]
    version = loaded_nccl_version(environ) if slow else None
    chosen = profile.choose((slow or groups)[0], version, environ)
    if not slow:
        _outcome.record(PATCH, "not needed", chosen.why, host=groups[0].describe())
        return None
    if getattr(cfg, "use_ray", False):
        _outcome.record(
            PATCH,
            "failed",
            f"profile {chosen.name} ({chosen.why}) is not set: with --use-ray the workers are actors of Ray, which do "
            "not inherit it from this process; start without --use-ray, or set what you want in Ray's runtime_env",
            host=slow[0].describe(),
        )
        return None
    decision = _decide(cfg, chosen, slow[0], version, environ)
    environ.update(decision.environment)
    in_files = {name: value for name, (value, _) in profile.nccl_files(environ).items() if name in profile.CHECKED}
    decision = replace(
        decision,
        launcher={name: environ[name] for name in profile.CHECKED if name in environ},
        in_files={name: value for name, value in in_files.items() if name not in environ},
    )
    environ[DECISION] = json.dumps(asdict(decision), sort_keys=True)
    return decision


def inherited(environ: MutableMapping[str, str] = os.environ) -> Decision | None:
    """The decision this process inherited; None without one."""
    text = environ.get(DECISION)
    return Decision(**json.loads(text)) if text else None


def loaded_nccl_version(environ: MutableMapping[str, str] = os.environ) -> str | None:
    """Version of the NCCL library that pynccl will use here, asked of the library itself; None where none loads.

    By its name the library resolves to the one torch loaded, unless ``SGLANG_NCCL_SO_PATH`` names another, as in
    upstream's pynccl_wrapper.py. Starts no CUDA.
    """
    code = ctypes.c_int()
    try:
        library = ctypes.CDLL(environ.get("SGLANG_NCCL_SO_PATH") or "libnccl.so.2")
        if library.ncclGetVersion(ctypes.byref(code)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return profile.version_text(code.value)


def _no_concern(cfg: Any) -> str:
    if cfg.tp_size == 1:
        return "tensor parallel size is 1, so no all-reduce between GPUs"
    if cfg.device != "cuda":
        return f"device is {cfg.device}"
    if torch.version.hip:
        return f"these are AMD's GPUs (ROCm {torch.version.hip}), which have no NVLink and another library"
    if cfg.nnodes > 1:
        return f"{cfg.nnodes} nodes: what one host needs does not suit a group that spans hosts"
    if cfg.enable_deterministic_inference:
        return "deterministic inference pins NCCL's algorithm and channels itself"
    if cfg.elastic_ep_backend is not None:
        return f"elastic expert parallelism ({cfg.elastic_ep_backend}) makes communicators while serving"
    return ""


def _decide(
    cfg: Any, chosen: profile.Profile, group: topology.Topology, version: str | None, environ: MutableMapping[str, str]
) -> Decision:
    environment, kept = dict(chosen.environment), dict(chosen.kept)
    crossover = chosen.crossovers.get(profile.PCIE_IPC)
    if crossover is not None and cfg.tp_size in _IPC_WORLD_SIZES and lane.here().has_pcie_ipc:
        wanted = {IPC_SWITCH: "1", IPC_LIMIT: str(crossover.size_bytes // _IPC_ITEM_BYTES)}
        own = {name: environ[name] for name in wanted if name in environ}
        kept |= own
        environment |= {} if own else wanted
    graphs_only, why_not = chosen.graphs_only, "" if chosen.graphs_only else "not in this profile"
    # docs/patches/pcie-nccl-allreduce.md has the places in upstream.
    for name, plain in lane.here().eager_pynccl.items():
        if graphs_only and getattr(cfg, name) != plain:
            graphs_only, why_not = False, f"{name}={getattr(cfg, name)} also calls that communicator outside of graphs"
    if graphs_only and not _torch_tells_replays():
        graphs_only, why_not = False, "this torch has no hooks on graph replay, so nothing could guard it"
    return Decision(
        profile=chosen.name,
        source=chosen.source,
        why=chosen.why,
        fingerprint=group.fingerprint(),
        host=group.describe(),
        environment=environment,
        kept=kept,
        nccl_version=version,
        graphs_only=graphs_only,
        graphs_only_why=why_not,
    )


def _torch_tells_replays() -> bool:
    return hasattr(torch.cuda.graphs, "register_graph_replay_start_hook")


def _withdraw(environ: MutableMapping[str, str]) -> None:
    """Take back what an earlier engine of this process set, lest it pass for the operator's own."""
    earlier = inherited(environ)
    if earlier is None:
        return
    del environ[DECISION]
    for name, value in earlier.environment.items():
        if environ.get(name) == value:
            del environ[name]
