"""Measures one turn: the life of one server."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sglang_patches import lane
from sglang_patches.bench import load, server
from sglang_patches.bench.figures import figures, graph_share, outputs_sha256
from sglang_patches.bench.model import Arm, Sample, Turn, Workload
from sglang_patches.bench.workload import Prompts
from sglang_patches.document import schema, secrets
from sglang_patches.document.unnamed import unnamed
from sglang_patches.errors import PatchError

Say = Callable[[str], None]

#: Why a turn was measured by a second server, where the first was asked nothing.
PORT_TAKEN = "its port was taken"


class TurnFailed(PatchError):
    """An arm could not be measured: its server did not come up, died or hung, or requests failed."""


@dataclass(frozen=True)
class Setup:
    """What all turns of a run share.

    Attributes:
        model, draft, tp: as for `sglang_patches.serve`: folders or hub names; an empty draft is no speculation.
        server_args: server arguments of every arm; an arm's own follow.
        prompts: what is sent.
        workload: how it is sent (`Prompts.workload`).
        folder: of the result.
        ready_timeout, turn_timeout: seconds for starting, and for all measured requests of a turn.
        environ: of every server; an arm's own variables are added.
    """

    model: str
    draft: str
    tp: int
    server_args: Sequence[str]
    prompts: Prompts
    workload: Workload
    folder: Path
    ready_timeout: float = 1800.0
    turn_timeout: float = 3600.0
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


def one_turn(setup: Setup, arm: Arm, index: int, block: int, say: Say = lambda text: None) -> tuple[Turn, list[Sample]]:
    """Start the arm's server, warm it up, send the workload, ask what it was, and end it.

    A turn with failed requests, and one whose port someone took, is measured once more with a new server.

    Args:
        index, block: for the turn.
        say: told what goes on, as short clauses.

    Raises:
        TurnFailed: the server did not come up, died or hung, or requests failed twice. Its log is kept.
    """
    retried, failed = "", []
    for attempt in (1, 2):
        log = setup.folder / "logs" / f"{index:03d}-{arm.name}{'' if attempt == 1 else f'-{attempt}'}.log"
        try:
            turn, samples = _attempt(setup, arm, index, block, log, say)
        except server.PortTaken as error:
            if attempt == 2:
                raise _named(error, arm, index) from None
            retried = PORT_TAKEN
            say(f"{PORT_TAKEN}, starting it again on another")
            continue
        except PatchError as error:
            raise _named(error, arm, index) from None
        failed = [sample for sample in samples if sample.error]
        if not failed:
            return turn.model_copy(update={"retried": retried}), samples
        before, retried = retried, f"{len(failed)} of {len(samples)} requests failed: {_last_line(failed[0])[:120]}"
        say(retried)
    raise _named(
        PatchError(
            f"{len(failed)} of {len(samples)} requests failed; of the server before this one, {before}\n"
            f"  seen       prompt {failed[0].prompt}: {_last_line(failed[0])[:300]}\n{server.shown(log)}"
        ),
        arm,
        index,
    )


def _last_line(sample: Sample) -> str:
    return secrets.mask_text(sample.error.splitlines()[-1])


def _named(error: PatchError, arm: Arm, index: int) -> TurnFailed:
    return TurnFailed(f"turn {index} (arm {arm.name}, {arm.spec or 'default'}): {error}")


def _attempt(setup: Setup, arm: Arm, index: int, block: int, log: Path, say: Say) -> tuple[Turn, list[Sample]]:
    work = setup.workload
    running = server.running(
        arm, model=setup.model, draft=setup.draft, tp=setup.tp, shared=setup.server_args, log=log,
        environ=setup.environ,
    )  # fmt: skip
    with running as it:
        load.prepare()  # takes seconds, as does the server
        it.wait_ready(setup.ready_timeout, lambda seconds: say(f"starting the server, {seconds:.0f} s"))
        info = it.info()
        document = _document(info)
        report = log.with_suffix(".load")

        def ask(prompts: Prompts, label: str, told: Say) -> list[Sample]:
            return load.send(
                it.url, it.model, prompts, work.output_tokens, work.concurrency, turn=index, arm=arm.name,
                report=report, timeout=setup.turn_timeout, label=label,
                said=lambda done: told(f"{done} of {len(prompts.ids)}"),
            )  # fmt: skip

        if work.warm_up:
            ids = tuple(itertools.islice(itertools.cycle(setup.prompts.ids), work.warm_up))
            ask(Prompts("warm-up", setup.prompts.vocabulary, ids), "warm", lambda text: say(f"warming up, {text}"))
        before = it.info()
        samples = ask(setup.prompts, "prompt", lambda text: say(f"measuring, {text}"))
        ended = datetime.now(UTC).isoformat(timespec="seconds")
        it.check_alive("while it was measured")
        after = it.info()
        say("ending the server")
    told = figures(samples) if not any(sample.error for sample in samples) else {}
    if (share := graph_share(_outcomes(before), _outcomes(after))) is not None:
        told["graph_share"] = share
    turn = Turn(
        index=index, block=block, arm=arm.name, ended=ended, ready_s=it.ready_s, figures=told,
        output_sha256=outputs_sha256(samples), document=document, outcomes=_outcomes(after),
        server_args=None if document else _arguments(info),
        log=str(log.relative_to(setup.folder)),
    )  # fmt: skip
    return turn, samples


def _document(info: Mapping[str, Any]) -> schema.Document | None:
    found = (info.get("sglang_patches") or {}).get("document")
    return schema.parse(unnamed(found), "/server_info") if found else None


def _arguments(info: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved arguments among what upstream's /server_info tells, which has them at its top level."""
    names = lane.here().argument_names()
    return secrets.mask({name: value for name, value in info.items() if name in names})


def _outcomes(info: Mapping[str, Any]) -> dict[str, Any]:
    return dict((info.get("sglang_patches") or {}).get("outcomes") or {})
