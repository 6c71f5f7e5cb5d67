"""Code state, machine, arms and how to read a result, in plain words."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from sglang_patches.bench.model import Arm, Result
from sglang_patches.document.diff import Difference, diff, summary
from sglang_patches.document.schema import Document

_VERDICTS = (
    "Verdicts are B's against A, or an arm's against the first: FASTER and SLOWER where the whole interval of the "
    "ratio lies on one side of 1, SAME where all of it lies within the margin, AMBIGUOUS where neither is shown. The "
    "smallest detectable difference is what rounds as many and as scattered as these would have found four times in "
    "five: an AMBIGUOUS verdict rules out no less than that."
)
HOW_TO_READ = {
    "ab": "Each turn is a server of its own, started, warmed up, measured and ended; A and B took turns in the order "
    f"ABBA, and rounds, not requests, are what the statistics count. {_VERDICTS}",
    "compare-upstream": "Each turn is a server of its own; the arms took turns. `pristine` is upstream in an "
    f"environment without this project; `none` must be the SAME as it. {_VERDICTS}",
    "factorial": "Each turn is a server of its own, with some factors on and the others off. A main effect is the "
    "ratio of a figure with the factor on to the same with it off, averaged over the other factors; an interaction is "
    "how much one factor's effect is multiplied when the other is on too. An interval that holds 1 shows no effect.",
    "bisect": "Each step is a set of the changes between good and bad, measured against good. A set is bad where its "
    "figure is worse by more than the threshold with its whole interval, good where the whole interval is below it, "
    "and is measured again where neither is shown.",
    "verify-step": "Milliseconds are medians over cycles. The floor is the bytes that a cycle cannot avoid reading "
    "(weights of the experts that were routed to, and KV), over the copy bandwidth measured in the same run: the row "
    "says how many times the floor it takes.",
}


# Files told by name: an installation may lack a whole folder that nobody loads.
_NAMED = 8


@dataclass(frozen=True)
class Apart:
    """How the code state of an arm differs from that of the first, A."""

    arm: str
    baseline: str
    said: str
    differences: list[Difference]


def code(document: Document) -> list[str]:
    """Release, patches and hand-made edits: one sentence each."""
    state = document.code
    on = [patch.name for patch in state.patches if patch.on]
    off = [f"{patch.name}{f' ({patch.reason})' if patch.reason else ''}" for patch in state.patches if not patch.on]
    told = [f"sglang {state.release}, patch set {state.id}", f"on: {', '.join(on) or 'no patch'}"]
    told.append(f"off: {', '.join(off) or 'none'}")
    if on and not state.active:
        told.append("patching was not active: the patches that are on were not in the process")
    by_hand = {file.path: file.sha256 for process in document.processes for file in process.files if file.by == "edit"}
    for what, gone in (("edited by hand, against the wheel", False), ("gone, against the wheel", True)):
        paths = sorted(path for path, sha in by_hand.items() if (sha is None) is gone)
        if paths:
            more = f" and {len(paths) - _NAMED:,} more" if len(paths) > _NAMED else ""
            told.append(f"{what}: {', '.join(paths[:_NAMED])}{more}")
    versions = [f"{name} {version}" for name, version in document.versions.items() if version]
    nccl = sorted({process.nccl for process in document.processes if process.nccl})
    told.append(", ".join(versions + [f"NCCL {version} loaded" for version in nccl]))
    for role, model in document.models.items():
        hashes = (("config", model.config_sha256), ("weights", model.weights_sample_sha256))
        by = ", ".join(f"{of} {sha[:12]}" for of, sha in hashes if sha) or "not known by content"
        told.append(f"{role} model {model.path} ({by})")
    return told


def machine(document: Document) -> str:
    """What it ran on, in one line."""
    host = document.machine
    parts = [host.topology] if host.gpus else ["no GPU"]
    if host.driver:
        parts.append(f"driver {host.driver}")
    limits = sorted({f"{gpu.power_limit:g} W" for gpu in host.gpus if gpu.power_limit})
    if limits:
        parts.append(f"power limit {' / '.join(limits)}")
    parts += [f"{host.cpu}, {host.cpus} CPUs", f"{host.memory_gib:g} GiB", f"kernel {host.kernel}"]
    if host.container:
        parts.append(f"container {host.container}")
    return ", ".join(parts)


def document_of(result: Result, arm: str) -> Document | None:
    """The code state that the first server of an arm told; None where none did."""
    return next((turn.document for turn in result.turns if turn.arm == arm and turn.document), None)


def any_document(result: Result) -> Document | None:
    """A server's, else that of the measuring process."""
    return next((turn.document for turn in result.turns if turn.document), result.document)


def apart(result: Result) -> list[Apart]:
    """Every other arm against the first of those that told their code state."""
    told = [(arm.name, document) for arm in result.arms if (document := document_of(result, arm.name))]
    if not told:
        return []
    (baseline, first), others = told[0], told[1:]
    out = []
    for name, document in others:
        found = diff(first, document)
        out.append(Apart(name, baseline, summary(first, document, found), found))
    return out


def untold(result: Result) -> list[str]:
    """Arms that were measured and told no code state."""
    measured = dict.fromkeys(turn.arm for turn in result.turns)
    return [arm for arm in measured if document_of(result, arm) is None]


def unsteady(result: Result) -> list[str]:
    """Arms whose servers were not all of one patch set, with the ids."""
    out = []
    for arm in dict.fromkeys(turn.arm for turn in result.turns):
        ids = dict.fromkeys(turn.document.code.id for turn in result.turns if turn.arm == arm and turn.document)
        if len(ids) > 1:
            out.append(f"{arm}: {', '.join(ids)}")
    return out


def arm(one: Arm) -> str:
    """What an arm adds to the command, as it would be typed; empty where it adds nothing."""
    parts = [f"SGLANG_PATCHES={shlex.quote(one.patches)}"] if one.patches else []
    parts += [f"{name}={shlex.quote(value)}" for name, value in one.environment.items()]
    if one.python:
        parts.append(one.python)
    return " ".join([*parts, *map(shlex.quote, one.arguments)])


def command(words: Iterable[str]) -> str:
    """A command that a shell takes as it was typed."""
    return shlex.join(words)


def workload(result: Result) -> str:
    """What every server was asked; empty where nothing was."""
    asked = result.workload
    if asked is None:
        return ""
    return (
        f"{asked.name}: {asked.prompts} prompts of {asked.prompt_tokens} tokens, {asked.output_tokens} tokens each in "
        f"answer, greedy, {asked.concurrency} at a time after {asked.warm_up} requests of warm-up; prompts "
        f"{asked.prompts_sha256[:12]}"
    )


def samples(by_arm: dict[str, int]) -> str:
    """How many raw samples there are."""
    if not by_arm:
        return "none"
    return ", ".join(f"{arm}: {count:,}" for arm, count in by_arm.items())
