"""What `tune` compares: NCCL as it comes, NCCL with settings, and all-reduces that are not NCCL's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sglang_patches.errors import PatchError
from sglang_patches.nccl.profile import BUILT_IN

AS_IT_COMES = "as-it-comes"
CONTROL = "as-it-comes-again"

GRAPH_MIXING = "NCCL_GRAPH_MIXING_SUPPORT"


@dataclass(frozen=True)
class Candidate:
    """One thing to measure.

    Attributes:
        environment: variables its processes get on top of the caller's own.
        path: see `paths.path_class`.
    """

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    path: str = "nccl"

    @property
    def is_nccl(self) -> bool:
        """Whether NCCL does the all-reduce, so that a profile can set it."""
        return self.path in ("nccl", "nccl-graphs-only", "gloo")

    @property
    def unsafe(self) -> str:
        """Why no profile may hold it, however fast it is; empty if one may."""
        if self.environment.get(GRAPH_MIXING) == "0":
            return f"{GRAPH_MIXING}=0 takes every communicator of the process, not only the one that graphs use"
        return ""


def builtin(backend: str) -> list[Candidate]:
    """The candidates for a backend; the first two are the baseline and, to show the noise, the baseline again."""
    if backend == "gloo":
        # Without a GPU there is nothing to tune: these differ in a variable that nobody reads.
        return [Candidate(name, {"SGLANG_PATCHES_DUMMY": name}, "gloo") for name in (AS_IT_COMES, CONTROL, "dummy")]
    found = [Candidate(AS_IT_COMES), Candidate(CONTROL)]
    for name, value in (("ll", "LL"), ("ll128", "LL128"), ("simple", "Simple")):
        found.append(Candidate(f"proto-{name}", {"NCCL_PROTO": value}))
    for name, value in (("ring", "Ring"), ("tree", "Tree")):
        found.append(Candidate(f"algo-{name}", {"NCCL_ALGO": value}))
    for count in (8, 16, 32):
        found.append(Candidate(f"min-channels-{count}", {"NCCL_MIN_NCHANNELS": str(count)}))
    found.append(Candidate("max-channels-2", {"NCCL_MAX_NCHANNELS": "2"}))
    found.append(Candidate("p2p-sys", {"NCCL_P2P_LEVEL": "SYS"}))
    found.append(Candidate("p2p-off", {"NCCL_P2P_DISABLE": "1"}))
    found.append(Candidate("buffer-1m", {"NCCL_BUFFSIZE": str(1 << 20)}))
    found.append(Candidate("buffer-16m", {"NCCL_BUFFSIZE": str(1 << 24)}))
    for count in (256, 512):
        found.append(Candidate(f"threads-{count}", {"NCCL_NTHREADS": str(count)}))
    found.append(Candidate("p2p-sys-min-channels-16", {"NCCL_P2P_LEVEL": "SYS", "NCCL_MIN_NCHANNELS": "16"}))
    found.append(Candidate("mixing-off", {GRAPH_MIXING: "0"}))
    for count in (8, 16, 32):
        found.append(
            Candidate(f"mixing-off-min-channels-{count}", {GRAPH_MIXING: "0", "NCCL_MIN_NCHANNELS": str(count)})
        )
    found.append(Candidate("graphs-only", {}, "nccl-graphs-only"))
    for count in (8, 16, 32):
        environment = {"NCCL_MIN_NCHANNELS": str(count)}
        found.append(Candidate(f"graphs-only-min-channels-{count}", environment, "nccl-graphs-only"))
    found.append(Candidate("story", BUILT_IN["story"].environment))
    found.append(Candidate("custom", {}, "custom"))
    found.append(Candidate("pcie-ipc", {}, "pcie-ipc"))
    return found


def from_file(file: Path) -> list[Candidate]:
    """Candidates from a JSON list of ``{"name", "environment", "path"}``, the last two optional.

    Raises:
        PatchError: not such a file.
    """
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        candidates = [
            Candidate(
                str(entry["name"]),
                {str(name): str(value) for name, value in entry.get("environment", {}).items()},
                str(entry.get("path", "nccl")),
            )
            for entry in entries
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise PatchError(
            f"{file}: not a list of candidates: {error!r}\n"
            f'  expected   [{{"name": "a", "environment": {{"NCCL_PROTO": "LL"}}, "path": "nccl"}}, ...]'
        ) from error
    return candidates


def pick(candidates: list[Candidate], names: list[str]) -> list[Candidate]:
    """The candidates of these names, in their own order, with the baseline and its control always first.

    Raises:
        PatchError: an unknown name, or two candidates of one name.
    """
    by_name = {candidate.name: candidate for candidate in candidates}
    if len(by_name) != len(candidates):
        twice = sorted({c.name for c in candidates if sum(c.name == d.name for d in candidates) > 1})
        raise PatchError(f"two candidates have one name: {', '.join(twice)}\n  remedy     rename one")
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise PatchError(f"unknown candidate: {', '.join(unknown)}\n  known      {', '.join(by_name)}")
    wanted = {AS_IT_COMES, CONTROL, *names} if names else set(by_name)
    return [candidate for candidate in candidates if candidate.name in wanted]


def overruled(candidate: Candidate, environment: Mapping[str, str]) -> str:
    """Why a candidate means nothing in this environment (the user's own variables win); empty if it does."""
    clash = [
        f"{name}={environment[name]}"
        for name, value in candidate.environment.items()
        if name.startswith("NCCL_") and environment.get(name, value) != value
    ]
    return f"you have set {', '.join(clash)}, and your own variables win" if clash else ""
