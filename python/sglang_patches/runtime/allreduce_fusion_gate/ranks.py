"""All ranks come to one decision on fused all-reduce, when their groups are made and before any workspace is.

A workspace is made by all ranks together, and its kernels wait for every rank without a time limit: one that falls back
alone leaves the others waiting for ever.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_patches.nccl import topology
from sglang_patches.runtime import _ranks
from sglang_patches.runtime._agreement import before_refusing, exchange, first_verdict
from sglang_patches.runtime.allreduce_fusion_gate import captured, kernels, launch
from sglang_patches.runtime.allreduce_fusion_gate.decision import Problem, Verdict, decide

logger = logging.getLogger("sglang_patches")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs and what it was told, JSON-able.

    Attributes:
        host: the same for ranks of one host.
        bus: PCIe address of its GPU, as the kernel writes it.
        sm: compute capability of its GPU, ten times major plus minor.
        asked: upstream's backend of fused all-reduce; None where it is off.
        explicit: the operator asked for it.
    """

    host: str
    bus: str
    sm: int
    asked: str | None
    explicit: bool


class _Process:
    """What the ranks of this process's server agreed on: why there is no fused all-reduce, empty if there may be."""

    refused = ""


def agree() -> None:
    """Let all ranks of this server (all pipeline stages and hosts) decide, and switch the fusion off if one cannot.

    Called when upstream's groups are made and its configuration is published. Every rank must call it.

    Raises:
        AllReduceFusionRefused: on every rank, where the operator asked for the fusion and a rank cannot do it.
    """
    from sglang.srt.distributed.parallel_state import get_world_group
    from sglang.srt.runtime_context import get_device, get_exec, get_parallel, get_server_args

    _Process.refused = ""
    if get_device().device != "cuda" or torch.version.hip or get_parallel().tp_size == 1:
        return
    if get_exec().moe.elastic_ep_backend is not None:
        return  # ranks come and go while serving, so there is no start at which all of them meet
    asked = get_exec().comm.flashinfer_allreduce_fusion_backend
    world, group = get_world_group(), list(get_parallel().tp_group.ranks)
    places = meet(here(asked, launch.explicitly(get_server_args())), world.rank, world.ranks)
    verdict = conclude(places, judge(world.rank, group, places), world.rank, world.ranks)
    if not verdict.allowed:
        before_refusing("fusion", world.rank, list(places))
    settle(places, verdict)


def here(asked: str | None, explicit: bool) -> Place:
    """This rank's place; it has a CUDA device."""
    this = torch.cuda.current_device()
    major, minor = torch.cuda.get_device_capability(this)
    return Place(_host(), _bus(this), 10 * major + minor, asked, explicit)


def meet(mine: Place, rank: int, ranks: Sequence[int]) -> dict[int, Place]:
    """Every rank's place, by global rank; without those that said nothing in time."""
    said = exchange("fusion/place", json.dumps(asdict(mine)), rank, ranks)
    return {other: Place(**json.loads(text)) for other, text in said.items() if text is not None}


def judge(rank: int, group: Sequence[int], places: Mapping[int, Place]) -> Verdict:
    """What this rank sees of its tensor-parallel group: the links of the GPUs really used, its kernel, its driver."""
    from sglang.srt.runtime_context import process_model_config

    mine, model = places[rank], process_model_config()
    together = [places[other].bus for other in group if other in places and places[other].host == mine.host]
    hosts = {places[other].host for other in group if other in places}
    problem = Problem(mine.asked or "auto", mine.sm, len(group), model.dtype, model.hidden_size, len(hosts))
    # Without the option no kernel is to be asked, only the links: a model may make a workspace of its own.
    verdict = decide(problem, local(together), mine.explicit, kernels.supports if mine.asked else lambda _: "")
    if not verdict.allowed:
        return verdict
    if missing := _no_peer_access(mine.bus, together):
        return Verdict(False, missing, "see `nvidia-smi topo -p2p r`; a container may keep GPUs from each other")
    if mine.asked and (lacking := kernels.device_lacks(mine.asked, mine.sm, torch.cuda.current_device())):
        return Verdict(False, lacking, "choose --flashinfer-allreduce-fusion-backend trtllm")
    return verdict


def conclude(places: Mapping[int, Place], mine: Verdict, rank: int, ranks: Sequence[int]) -> Verdict:
    """One verdict for all ranks: refused if one refuses, is silent, or was told something else."""
    # A rank that was silent once will be so again, and need not be waited for.
    heard = set(ranks) <= set(places)
    said = exchange("fusion/verdict", json.dumps(asdict(mine)), rank, ranks) if heard else {}
    verdicts = {other: None if text is None else Verdict(**json.loads(text)) for other, text in said.items()}
    joint = first_verdict("fusion", json.dumps(asdict(_joint(places, verdicts, ranks))), ranks)
    return Verdict(**json.loads(joint))


def settle(places: Mapping[int, Place], verdict: Verdict) -> None:
    """Act on the ranks' verdict, alike on each of them. Raises AllReduceFusionRefused, see `agree`."""
    from sglang.srt.distributed.parallel_state import set_flashinfer_allreduce_only
    from sglang.srt.runtime_context import get_context

    asked = next((place.asked for place in places.values() if place.asked), None)
    explicit = any(place.explicit for place in places.values())
    first = places[min(places)]
    where = f"{len(places)} ranks on {len({place.host for place in places.values()})} host(s)"
    if not verdict.allowed:
        _Process.refused = verdict.why
        if asked is None:
            return
        if explicit:
            raise launch.AllReduceFusionRefused(where, asked, verdict)
        get_context().override(
            launch.PATCH,
            flashinfer_allreduce_fusion_backend=None,
            enforce_disable_flashinfer_allreduce_fusion=True,
        )
        set_flashinfer_allreduce_only(False)
    elif asked is not None:
        captured.expect()
    if asked is not None and _ranks.is_first():
        fusion = kernels.resolved(asked, first.sm) if verdict.allowed else None
        launch.record(fusion, asked, verdict, explicit, where, first.sm)


def only_if_agreed(initialize: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``FlashInferWorkspaceManager.initialize``: where the ranks refused, nothing makes a workspace; where
    upstream could not make it, that is told.

    The arguments already say so to all but models that make one of their own. All ranks come to the same answer, since
    they agreed on it; upstream takes a manager without a workspace for one that could not be made.
    """

    @functools.wraps(initialize)
    def initialized(self: Any, *arguments: Any, **named: Any) -> None:
        if not _Process.refused:
            initialize(self, *arguments, **named)
            if not self.initialized:
                launch.without_workspace()
            return
        logger.warning("sglang-patches: %s: no workspace is made: %s", launch.PATCH, _Process.refused)

    return initialized


def local(buses: Sequence[str]) -> topology.Topology:
    """The topology of this host's GPUs at these PCIe addresses, whichever of them this process sees."""
    host = topology.read({name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"})
    if host.absent:
        return host
    at = {gpu.bus: place for place, gpu in enumerate(host.gpus)}
    if missing := [bus for bus in buses if bus not in at]:
        return topology.Topology(absent=f"NVML lists no GPU at {', '.join(missing)}")
    return host.subset(at[bus] for bus in buses)


def _joint(places: Mapping[int, Place], verdicts: Mapping[int, Verdict | None], ranks: Sequence[int]) -> Verdict:
    silent = [rank for rank in ranks if rank not in places]
    silent = silent or [rank for rank in ranks if verdicts.get(rank) is None]
    if silent:
        return Verdict(
            False,
            f"{_named(silent)} did not take part in the decision",
            f"start every rank with the same SGLANG_PATCHES (patch {launch.PATCH} is off there?)",
        )
    asked = {rank: places[rank].asked for rank in ranks}
    if len(set(asked.values())) > 1:
        told = "; ".join(
            f"{_named([rank for rank in ranks if asked[rank] == value])}: {value or 'off'}"
            for value in dict.fromkeys(asked.values())
        )
        return Verdict(False, f"ranks were told different things ({told})", "start every host with the same options")
    said = {rank: verdict for rank, verdict in verdicts.items() if verdict is not None}
    refusing = [rank for rank in ranks if not said[rank].allowed]
    if not refusing:
        return said[ranks[0]]
    verdict = said[refusing[0]]
    alike = [rank for rank in refusing if said[rank].why == verdict.why]
    who = "" if len(alike) == len(ranks) else f"{_named(alike)}: "
    return Verdict(False, who + verdict.why, verdict.remedy, verdict.known)


def _no_peer_access(mine: str, together: Sequence[str]) -> str:
    """Which GPU of this host CUDA does not let this rank's GPU reach; empty if none that this process sees."""
    this = torch.cuda.current_device()
    for index in range(torch.cuda.device_count()):
        bus = _bus(index)
        if index != this and bus in together and not torch.cuda.can_device_access_peer(this, index):
            return f"CUDA gives the GPU at {mine} no access to the memory of the one at {bus}"
    return ""


def _bus(device: int) -> str:
    gpu: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the PCIe address
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def _host() -> str:
    """The same for all processes of one running machine, containers with names of their own included."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
