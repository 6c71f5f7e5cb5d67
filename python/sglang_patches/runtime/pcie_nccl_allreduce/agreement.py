"""Every rank reads back what it inherited, and tells the others, just before the first NCCL communicator is made."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from sglang_patches.nccl import profile
from sglang_patches.runtime import _outcome
from sglang_patches.runtime._agreement import before_refusing, exchange, first_verdict
from sglang_patches.runtime.pcie_nccl_allreduce import decision as decisions
from sglang_patches.runtime.pcie_nccl_allreduce import guard


class NcclSettingsMismatch(RuntimeError):
    """Ranks of one server run with other NCCL settings or libraries than were decided for it."""


def before_communicators(coordinator: Any, group_name: str) -> None:
    """Check this rank and all others against the decision; called for every new group, acts for "tp" once.

    Goes through the default group's key-value store: a rank on which this patch is off takes no part, and a collective
    without it would hang.

    Args:
        coordinator: upstream's ``GroupCoordinator``; its rank, ranks (global) and cpu_group are set.

    Raises:
        NcclSettingsMismatch: it names every rank that differs, the variable, what it has and what is wanted.
    """
    wanted = decisions.inherited()
    if wanted is None or group_name != "tp" or coordinator.world_size == 1:
        return
    reports = exchange("settings", json.dumps(_report(wanted)), coordinator.rank, coordinator.ranks)
    found = {rank: None if text is None else json.loads(text) for rank, text in reports.items()}
    if problems := first_verdict("settings", "; ".join(_problems(wanted, found)), coordinator.ranks):
        before_refusing("settings", coordinator.rank, [rank for rank, report in found.items() if report is not None])
        raise NcclSettingsMismatch(
            f"ranks of this server would not talk with the NCCL settings decided for it: {problems}. "
            "Start all ranks from one environment, with the same SGLANG_PATCHES; set NCCL variables before the server "
            "starts, not in the workers (sitecustomize, scheduler hooks)."
        )
    if wanted.graphs_only:
        guard.expect(coordinator.cpu_group)


def after_communicators(coordinator: Any, group_name: str) -> None:
    """Once upstream has made its pynccl communicator: tell, on the first rank, what `before_communicators` led to."""
    wanted = decisions.inherited()
    if wanted is None or group_name != "tp" or coordinator.world_size == 1:
        return
    guard.expect(None)
    if coordinator.rank_in_group == 0:
        _tell(wanted, len(coordinator.ranks), guard.follows(coordinator.pynccl_comm))


def process_environment(name: str) -> str | None:
    """The variable as C code of this process sees it, NCCL's included; ``os.environ`` is a copy from Python's start."""
    getenv = ctypes.CDLL(None).getenv
    getenv.argtypes, getenv.restype = [ctypes.c_char_p], ctypes.c_char_p
    value = getenv(name.encode())
    return None if value is None else value.decode(errors="replace")


def _report(wanted: decisions.Decision) -> dict[str, Any]:
    names = sorted({*wanted.expected, *profile.CHECKED})
    return {
        "decision": os.environ.get(decisions.DECISION),
        "nccl_version": decisions.loaded_nccl_version(),
        "python": {name: os.environ.get(name) for name in names},
        "process": {name: process_environment(name) for name in names},
    }


def _problems(wanted: decisions.Decision, found: Mapping[int, dict[str, Any] | None]) -> Iterator[str]:
    reference = next((report for report in found.values() if report is not None), None)
    for rank, report in found.items():
        if report is None:
            yield f"rank {rank} reported none (patch {decisions.PATCH} off there?)"
            continue
        if report["decision"] != os.environ.get(decisions.DECISION):
            yield f"rank {rank} inherited another decision, {_clip(report['decision'])}"
        version = wanted.nccl_version or (reference or report)["nccl_version"]
        if report["nccl_version"] != version:
            yield f"rank {rank} has NCCL {report['nccl_version']}, expected {version}"
        for name, seen in report["process"].items():
            expected = wanted.expected.get(name)
            for where, value in (("the process", seen), ("os.environ", report["python"][name])):
                added_by_nccl = where == "the process" and value is not None and wanted.in_files.get(name) == value
                if value != expected and not added_by_nccl:
                    yield f"rank {rank} has {name}={_shown(value)} in {where}, expected {_shown(expected)}"


def _tell(wanted: decisions.Decision, ranks: int, made_for_graphs: bool) -> None:
    result: _outcome.Result = "applied" if wanted.changes_something else "not needed"
    detail = f"profile {wanted.profile} ({wanted.why}), read back alike on all {ranks} ranks"
    why_not = wanted.graphs_only_why
    if wanted.graphs_only and not made_for_graphs:
        result, why_not = "failed", "upstream made no pynccl communicator for the group tp"
        detail += f", but no communicator is for graphs alone: {why_not} (its log says why, such as no NCCL library)"
    _outcome.record(
        decisions.PATCH,
        result,
        detail,
        source=wanted.source,
        environment=wanted.environment,
        kept=wanted.kept,
        nccl_version=wanted.nccl_version,
        graphs_only=made_for_graphs,
        graphs_only_why=why_not,
        host=wanted.host,
        fingerprint=wanted.fingerprint,
    )


def _shown(value: str | None) -> str:
    return "unset" if value is None else repr(value)


def _clip(text: str | None) -> str:
    return "none" if text is None else text[:200]
