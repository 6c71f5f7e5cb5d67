"""What is told in ``/server_info``: of each forward of a cycle, by the draft tokens that its runners were made for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sglang_patches.runtime import _outcome
from sglang_patches.runtime.eagle_metadata_graph.prep import Kind

PATCH = "eagle-metadata-graph"
_ORDER: tuple[_outcome.Result, ...] = ("not needed", "applied", "failed")


@dataclass
class Runner:
    """One runner.

    Attributes:
        replays: preparations that a graph did.
        eager: those that upstream's operations did, by reason.
        graphs: batch sizes that have one which was found right.
    """

    told: Told
    kind: Kind
    tokens: int
    result: _outcome.Result = "not needed"
    detail: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    replays: int = 0
    graphs: int = 0
    eager: Counter[str] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.kind} of {self.tokens} draft tokens"

    def record(self, result: _outcome.Result, detail: str, **figures: Any) -> None:
        """What it came to; a later record replaces this one."""
        self.result, self.detail, self.figures = result, detail, figures
        self.told.tell()

    def entry(self) -> dict[str, Any]:
        """JSON-able."""
        counts = {"replays": self.replays, "graphs": self.graphs, "eager": dict(sorted(self.eager.items()))}
        return {"result": self.result, "detail": self.detail, **self.figures, **counts}


@dataclass
class Told:
    """All runners of this process, by forward and by the draft tokens that they were made for."""

    runners: dict[tuple[Kind, int], Runner] = field(default_factory=dict)

    def runner(self, kind: Kind, tokens: int) -> Runner:
        """A new one, in place of one of the same forward and width, which upstream has then made anew."""
        made = self.runners[kind, tokens] = Runner(self, kind, tokens)
        return made

    def figures(self) -> dict[str, Any]:
        """``runners``, by forward and by draft tokens."""
        found: dict[str, dict[str, Any]] = {}
        for (kind, tokens), runner in sorted(self.runners.items()):
            found.setdefault(kind.value, {})[str(tokens)] = runner.entry()
        return {"runners": found}

    def tell(self) -> None:
        """The worst that some runner came to is what is told of all."""
        _outcome.live_figures(PATCH, self.figures)
        told = list(self.runners.values())
        worst = max((runner.result for runner in told), key=_ORDER.index)
        reasons = {runner.figures.get("reason") for runner in told if runner.result == worst}
        same = {"reason": reasons.pop()} if len(reasons) == 1 and worst != "applied" else {}
        # A sentence for all runners that it is true of.
        whom: dict[str, list[str]] = {}
        for runner in told:
            whom.setdefault(runner.detail, []).append(runner.name)
        detail = (
            next(iter(whom)) if len(whom) == 1 else "; ".join(f"{', '.join(of)}: {what}" for what, of in whom.items())
        )
        _outcome.record(PATCH, worst, detail, **same)


told = Told()
