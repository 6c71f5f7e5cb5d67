"""Whether a group of GPUs may all-reduce, add and normalise in one kernel: a pure function of what the group is.

It knows nothing of processes, NVML or CUDA: `launch` and `ranks` ask it, the tests ask it for recorded hosts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_patches.nccl.topology import Link, Topology


@dataclass(frozen=True, slots=True)
class Problem:
    """What a fused all-reduce would have to do.

    Attributes:
        backend: upstream's name: auto, trtllm, mnnvl or cutedsl.
        sm: compute capability of the group's GPUs, ten times major plus minor: 80, 89, 90, 100, 120.
        world_size: ranks that reduce together.
        dtype: of the hidden states.
        hidden: elements of one row.
        nodes: hosts that the group spans.
    """

    backend: str
    sm: int
    world_size: int
    dtype: torch.dtype
    hidden: int
    nodes: int = 1


#: Why a kernel cannot do a problem; empty if it can.
Supports = Callable[[Problem], str]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate says of one group.

    Attributes:
        allowed: the kernel may run.
        why: one clause that names what was seen.
        remedy: what an operator can do about a refusal.
        known: False where it was not seen what the decision needs, so that it is a guess on the safe side, or the
            operator's word.
    """

    allowed: bool
    why: str
    remedy: str = ""
    known: bool = True


def decide(problem: Problem, group: Topology, explicit: bool, supports: Supports) -> Verdict:
    """Whether the group may use a fused all-reduce.

    Its kernels write into each other's memory, at every layer, and wait for each other on the GPU without a time limit:
    they need a direct way between every pair that is fast enough not to be slower than NCCL, which is NVLink.

    Args:
        group: the group's GPUs on this host (of a group that spans hosts: this host's part).
        explicit: the operator asked for the fusion, upstream did not choose it by itself. It decides only where NVML
            does not tell what the links are: then the operator may know better.
        supports: asked last, of a group whose links are good.
    """
    links = _links(problem, group, explicit)
    if not links.allowed:
        return links
    if reason := supports(problem):
        return Verdict(False, reason, "another backend or tensor parallel size, if the model allows it")
    return links


def _links(problem: Problem, group: Topology, explicit: bool) -> Verdict:
    if group.absent:
        return _untold(f"the links of the group's {problem.world_size} GPUs are not known ({group.absent})", explicit)
    if group.peer_access_off:
        return Verdict(
            False,
            "peer access is switched off in the environment (NCCL_P2P_DISABLE or NCCL_P2P_LEVEL)",
            "unset these variables if the GPUs can reach each other's memory; they stand for a host where they cannot, "
            "and the fused kernels know no other way",
        )
    for link in group.links:
        if link.nvlink is False:
            return Verdict(
                False, f"{_pair(group, link)} has no NVLink", "choose GPUs that all have NVLink to each other"
            )
    for link in group.links:
        # NVML answers no to both where it does not tell (virtual machines); CUDA is asked on every rank.
        if link.nvlink and not (link.read and link.write):
            return Verdict(
                False,
                f"{_pair(group, link)} has NVLink but no peer access",
                "see `nvidia-smi topo -p2p r` and the driver's log for why these GPUs may not map each other's memory",
            )
    if group.nvlink_untold():
        return _untold("NVML does not tell whether every pair has NVLink", explicit)
    if not group.links:
        return Verdict(True, "no other GPU of the group is on this host")
    return Verdict(True, "every pair has NVLink and peer access")


def _untold(what: str, explicit: bool) -> Verdict:
    if explicit:
        return Verdict(True, f"{what}; the operator asked for it", known=False)
    return Verdict(
        False,
        f"{what}, and nobody asked for it",
        "if every pair has NVLink, say so with --flashinfer-allreduce-fusion-backend auto",
        known=False,
    )


def _pair(group: Topology, link: Link) -> str:
    one, two = (group.gpus[place].bus or f"GPU {place} of the group" for place in (link.a, link.b))
    return f"the pair {one} and {two} (PCIe level {link.level or 'unknown'})"
