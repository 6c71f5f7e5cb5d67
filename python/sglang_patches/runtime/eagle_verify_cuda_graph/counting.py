"""Counts every speculative forward by phase, path and reason: for ``/server_info``, ``/metrics`` and the log."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from sglang_patches import lane
from sglang_patches.runtime import _metrics, _outcome
from sglang_patches.runtime.eagle_verify_cuda_graph.reasons import Path, Phase, Reason

PATCH = "eagle-verify-cuda-graph"
# Forwards of a phase that count as warm-up: not logged, yet counted.
WARM_UP = 10
# Seconds between two log lines about the same phase and reason.
LOG_EVERY = 60.0

logger = logging.getLogger("sglang_patches")

Key = tuple[Phase, Path, Reason]


class Passes:
    """The counts of one process."""

    def __init__(self) -> None:
        self.counts: Counter[Key] = Counter()
        self.failures: Counter[str] = Counter()
        self._exported = _metrics.Exported(_metrics.SPEC_FORWARD)
        self._logged: dict[tuple[Phase, Reason], tuple[float, int]] = {}

    def add(self, phase: Phase, path: Path, reason: Reason, batch_size: int) -> None:
        """Count one forward, and log it when it ran eager after warm-up and was not logged in the last minute."""
        key = (phase, path, reason)
        self.counts[key] += 1
        if path is Path.EAGER and self._seen(phase) > WARM_UP:
            self._log(phase, reason, self.counts[key], batch_size)

    def _seen(self, phase: Phase) -> int:
        return sum(count for key, count in self.counts.items() if key[0] is phase)

    def _log(self, phase: Phase, reason: Reason, count: int, batch_size: int) -> None:
        now = time.monotonic()
        when, before = self._logged.get((phase, reason), (float("-inf"), 0))
        if now - when < LOG_EVERY:
            return
        self._logged[phase, reason] = (now, count)
        if not speaks():
            return
        logger.warning(
            "sglang-patches: %s: %s ran without a CUDA graph: reason=%s batch_size=%d, %d since the last such line",
            PATCH,
            phase,
            reason,
            batch_size,
            count - before,
        )

    def figures(self) -> dict[str, Any]:
        """``passes`` by phase, path and reason; ``graph_share`` by phase, None before the first forward."""
        passes: dict[str, dict[str, dict[str, int]]] = {phase.value: {} for phase in Phase}
        for (phase, path, reason), count in sorted(self.counts.items()):
            passes[phase.value].setdefault(path.value, {})[reason.value] = count
        shares: dict[str, float | None] = {}
        for phase in Phase:
            graph = sum(passes[phase.value].get(Path.GRAPH.value, {}).values())
            total = sum(sum(reasons.values()) for reasons in passes[phase.value].values())
            shares[phase.value] = round(graph / total, 6) if total else None
        return {"passes": passes, "graph_share": shares, "failures_inside": dict(self.failures)}

    def export(self, labels: Mapping[str, Any]) -> None:
        """Add to the Prometheus counter what was counted since the last call.

        Args:
            labels: upstream's own, from its metrics collector.
        """
        self._exported.export(
            [(tuple(part.value for part in key), count) for key, count in self.counts.items()], labels
        )


passes = Passes()


def contained(what: str, call: Callable[..., Any], *args: Any) -> Any:
    """Run a part of this patch so that its failure reaches no request: counted, logged once, and None returned."""
    try:
        return call(*args)
    except Exception:
        failed(what)
        return None


def failed(what: str) -> None:
    """Count a failure of a part of this patch, and log the first with the exception that is being handled."""
    passes.failures[what] += 1
    if passes.failures[what] == 1:
        logger.exception("sglang-patches: %s: %s failed; upstream's path goes on without it", PATCH, what)


def speaks() -> bool:
    """Whether this process logs for its server: every tensor- and context-parallel rank counts the same forwards.

    True where ranks are not known (yet). Under data-parallel attention each replica speaks: their batches differ.
    """
    try:
        ranks = lane.here().runtime_context().get_parallel()
        return bool(ranks.attn_tp_rank == 0 and ranks.attn_cp_rank == 0)
    except Exception:
        return True


def tell_passes(more: Callable[[], dict[str, Any]]) -> None:
    """Let this process' counts, and what `more` gives, appear beside its outcome; only a process that runs speculative
    forwards calls it."""
    _outcome.live_figures(PATCH, lambda: {**passes.figures(), **more()})
