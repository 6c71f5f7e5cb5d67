"""What is told in ``/server_info``: of a server, and of each of its attention backends.

Under ``--speculative-adaptive`` upstream makes a backend for each number of draft steps; one may split where another
cannot (a single token is no verify), and one may fail alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sglang_patches.runtime import _outcome

PATCH = "mla-verify-split-kv"
# The worst that some backend came to is what is told of all.
_ORDER: tuple[_outcome.Result, ...] = ("not needed", "applied", "failed")


@dataclass
class Backends:
    """The target's attention backends of this process that verify, by their draft tokens.

    Attributes:
        calls: of verify attention, by what served them: "split_kv", or "extend:" and the reason. A call is a layer of a
            forward that runs in Python: under CUDA graphs those of capture, not of replay.
    """

    outcomes: dict[int, dict[str, Any]] = field(default_factory=dict)
    calls: dict[int, Counter[str]] = field(default_factory=dict)

    def record(self, tokens: int, result: _outcome.Result, detail: str, **figures: Any) -> None:
        """What the backend for so many draft tokens came to; a later record of one of as many replaces it, unless it
        sounds better: halves of a batch (two-batch overlap) have a backend each."""
        before = self.outcomes.get(tokens)
        if before is not None and _ORDER.index(before["result"]) > _ORDER.index(result):
            return
        self.outcomes[tokens] = {"result": result, "detail": detail, **figures}
        self._tell()

    def count(self, tokens: int, what: str) -> None:
        """A call of the backend for so many draft tokens."""
        self.calls.setdefault(tokens, Counter())[what] += 1

    def figures(self) -> dict[str, Any]:
        """``calls`` of all together, and, where there are several backends, each one's outcome and calls."""
        told: dict[str, Any] = {}
        if self.calls or any(outcome["result"] != "not needed" for outcome in self.outcomes.values()):
            told["calls"] = _sorted(sum(self.calls.values(), Counter()))
        if len(self.outcomes) > 1:
            told["by_draft_tokens"] = {
                str(tokens): {**self.outcomes[tokens], "calls": _sorted(self.calls.get(tokens, Counter()))}
                for tokens in sorted(self.outcomes)
            }
        return told

    def _tell(self) -> None:
        _outcome.live_figures(PATCH, self.figures)
        worst = max(self.outcomes.values(), key=lambda outcome: _ORDER.index(outcome["result"]))
        if len(self.outcomes) == 1:
            _outcome.record(PATCH, **worst)
            return
        details = "; ".join(
            f"{tokens} draft tokens: {self.outcomes[tokens]['detail']}" for tokens in sorted(self.outcomes)
        )
        # Figures of a backend are only right beside its draft tokens, in `by_draft_tokens`.
        _outcome.record(PATCH, worst["result"], details)


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items()))
