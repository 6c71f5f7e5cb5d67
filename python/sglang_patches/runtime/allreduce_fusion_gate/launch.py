"""The decision in the launching process, before any worker starts: every worker of this host inherits the arguments."""

from __future__ import annotations

import os
from typing import Any

import torch

from sglang_patches.nccl import topology
from sglang_patches.runtime import _outcome
from sglang_patches.runtime._ranks import gpu_positions
from sglang_patches.runtime.allreduce_fusion_gate import kernels
from sglang_patches.runtime.allreduce_fusion_gate.decision import Problem, Verdict, decide

PATCH = "allreduce-fusion-gate"


class AllReduceFusionRefused(ValueError):
    """The operator asked for fused all-reduce on a group of GPUs that cannot do it."""

    def __init__(self, group: str, asked: str, verdict: Verdict) -> None:
        super().__init__(
            f"--flashinfer-allreduce-fusion-backend {asked} cannot be done by {group}: {verdict.why}.\n"
            f"  what helps  {verdict.remedy}; or start without the option (NCCL and custom all-reduce then do the sums)"
        )


def explicitly(server_args: Any) -> bool:
    """Whether the operator asked for the fusion, by either option, as far as this record's raw input tells."""
    return bool(
        getattr(server_args, "flashinfer_allreduce_fusion_backend", None)
        or getattr(server_args, "enable_flashinfer_allreduce_fusion", False)
    )


def before_workers(server_args: Any) -> None:
    """Switch the fusion off in the arguments that workers inherit, where a group of this host cannot do it.

    With several hosts, or with Ray, this process does not see all GPUs: then nothing is decided here, and the ranks
    decide together (`ranks.agree`), as they check this decision in any case.

    Args:
        server_args: upstream's resolved record, not yet published.

    Raises:
        AllReduceFusionRefused: the operator asked for what cannot be done. Upstream would end later, or hang: the
            option says what a server is to be measured with, so an answer without it is no answer.
    """
    from sglang.srt.arg_groups.model_override_base import resolving_view

    if any(source == PATCH for source, _ in getattr(server_args, "_resolved_overrides", None) or ()):
        return  # an engine that starts again with arguments that are decided
    cfg = resolving_view(server_args)
    asked = cfg.flashinfer_allreduce_fusion_backend
    if reason := _no_concern(cfg, asked):
        _outcome.record(PATCH, "not needed", reason)
        return
    if cfg.use_ray or cfg.nnodes > 1:
        return
    host = topology.read(os.environ)
    for places in gpu_positions(cfg):
        group = _group(host, places)
        model = _model_config(cfg)
        problem = Problem(asked, _capability(), cfg.tp_size, model.dtype, model.hidden_size)
        verdict = decide(problem, group, explicitly(server_args), kernels.supports)
        if not verdict.allowed:
            _refuse(server_args, problem, verdict, f"GPUs {', '.join(map(str, places))} ({group.describe()})")
            return


def record(fusion: str | None, asked: str, verdict: Verdict, explicit: bool, group: str, sm: int) -> None:
    """Tell what was decided; once for a server, by the process that decided it.

    Args:
        fusion: the backend that will run; None for none.
        asked: what upstream or the operator wanted.
    """
    off = fusion is None
    # Where it is not known what the links are, the answer is the safe one and the operator should see that.
    result: _outcome.Result = ("applied" if verdict.known else "failed") if off else "not needed"
    chosen = f"{asked}, {'asked for' if explicit else 'chosen by upstream'}"
    _outcome.record(
        PATCH,
        result,
        f"fused all-reduce is {'off' if off else 'on'} ({chosen}): {verdict.why}",
        fusion=fusion or "off",
        asked=asked,
        explicit=explicit,
        group=group,
        sm=sm,
        remedy=verdict.remedy if off else "",
    )


def without_workspace() -> None:
    """Told by the process that told `record`: the fusion that was left on is not on, upstream has no workspace."""
    told = _outcome.outcomes().get(PATCH, {})
    if told.get("fusion", "off") == "off":
        return
    figures = {name: told[name] for name in ("asked", "explicit", "group", "sm")}
    _outcome.record(
        PATCH,
        "failed",
        f"fused all-reduce ({told['fusion']}) was left on, but upstream could not make a workspace for it, and sums "
        "without it",
        **figures,
        fusion="off",
        remedy="see upstream's warning above this line",
    )


def _no_concern(cfg: Any, asked: str | None) -> str:
    if asked is None:
        if cfg.enforce_disable_flashinfer_allreduce_fusion:
            return "fused all-reduce is off: --enforce-disable-flashinfer-allreduce-fusion"
        if cfg.enable_aiter_allreduce_fusion:
            return "fused all-reduce is aiter's (AMD), which runs on upstream's custom all-reduce or not at all"
        return "fused all-reduce is off: upstream does not choose it for this model, GPU and parallelism"
    if cfg.tp_size == 1:
        return "tensor parallel size is 1, so no all-reduce between GPUs"
    device = "ROCm" if torch.version.hip else cfg.device
    if device != "cuda":
        return f"fused all-reduce ({asked}) is for NVIDIA GPUs, and the device is {device}"
    return ""


def _group(host: topology.Topology, places: list[int]) -> topology.Topology:
    try:
        return host if host.absent else host.subset(places)
    except IndexError as error:
        return topology.Topology(absent=f"the server asks for more GPUs than are visible: {error}")


def _refuse(server_args: Any, problem: Problem, verdict: Verdict, where: str) -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution

    if explicitly(server_args):
        raise AllReduceFusionRefused(where, problem.backend, verdict)
    # The second one keeps models from making a workspace of their own (upstream's beam.py).
    declare_resolution(
        server_args,
        PATCH,
        flashinfer_allreduce_fusion_backend=None,
        enforce_disable_flashinfer_allreduce_fusion=True,
    )
    record(None, problem.backend, verdict, False, where, problem.sm)


def _model_config(cfg: Any) -> Any:
    from sglang.srt.arg_groups.model_override_base import model_config_of

    return model_config_of(cfg)


def _capability() -> int:
    # Of the first GPU; every rank asks its own. Upstream has asked torch the same while it resolved the arguments, so
    # no CUDA starts here that had not.
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor
