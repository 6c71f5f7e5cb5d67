"""What is told in ``/server_info``: of a server, and of each of its attention backends; and the way back to upstream.

Under ``--speculative-adaptive`` upstream makes a backend for each number of draft steps; one may split where another
cannot (too many tokens), and one may fail alone.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_patches.runtime import _outcome

logger = logging.getLogger("sglang_patches")

# The worst that some backend came to is what is told of all.
_ORDER: tuple[_outcome.Result, ...] = ("not needed", "applied", "failed")


@dataclass
class Backends:
    """Attention backends of this process that a patch makes split the context, by their draft tokens.

    Attributes:
        patch: its name.
        calls: of the attention that it takes over, by what served them: "split_kv", or "extend:" and the reason. A call
            is a layer of a forward that runs in Python: under CUDA graphs those of capture, not of replay.
    """

    patch: str
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
        _outcome.live_figures(self.patch, self.figures)
        worst = max(self.outcomes.values(), key=lambda outcome: _ORDER.index(outcome["result"]))
        if len(self.outcomes) == 1:
            _outcome.record(self.patch, **worst)
            return
        details = "; ".join(
            f"{tokens} draft tokens: {self.outcomes[tokens]['detail']}" for tokens in sorted(self.outcomes)
        )
        # Figures of a backend are only right beside its draft tokens, in `by_draft_tokens`.
        _outcome.record(self.patch, worst["result"], details)


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items()))


class Served:
    """Attention of one backend, by split kernels where they can; counts what served it.

    Args:
        backends: where that is told.
        tokens: draft tokens that the backend was made for.
        what: the attention that upstream's extend kernel goes on with, should ours fail; for people.
        first: called once, after the first call that split kernels served.
    """

    def __init__(self, backends: Backends, tokens: int, what: str, first: Callable[[], None] | None = None) -> None:
        self.backends, self.tokens, self.what, self.first = backends, tokens, what, first
        self.failed = False

    def __call__(self, reason: Callable[[], str | None], run: Callable[[], None]) -> bool:
        """True says that ``run`` wrote the output.

        Args:
            reason: why this call goes to upstream's kernel; None if it does not.
            run: launches the split kernels.
        """
        why = "failed" if self.failed else reason()
        if why is None:
            try:
                run()
            except Exception as error:
                # The first call is eager, in warm-up: a kernel that does not compile or fit fails there, and upstream's
                # writes the same output.
                logger.exception(
                    "sglang-patches: %s: %s goes on with upstream's extend kernel", self.backends.patch, self.what
                )
                self.backends.record(self.tokens, "failed", f"{type(error).__name__}: {error}", reason="failed")
                self.failed, why = True, "failed"
        self.backends.count(self.tokens, "split_kv" if why is None else f"extend:{why}")
        if why is None and self.first is not None:
            self.first()
            self.first = None
        return why is None
