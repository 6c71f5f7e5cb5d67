"""What of a server's passes and layers followed the rule, and why the others did not: for ``/server_info``."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from sglang_patches.runtime import _outcome
from sglang_patches.runtime.oea_topk.settings import Rule

PATCH = "oea-topk"
APPLIED = "applied"


class Counts:
    """The counts of one process.

    Attributes:
        registered: ids of the target's layers whose router can be asked, with the first of them standing for a pass.
        layers: layer ids by `APPLIED` or the reason why their experts were chosen without the rule in a phase that the
            rule is for, at least once. A layer may be in several.
        passes: forward passes by phase, by ``graph`` or ``eager``, and by `APPLIED` or reason.
        captured: by phase and rows of a captured graph, `APPLIED` or the reason of the layer that stands for a pass.
    """

    def __init__(self) -> None:
        self.registered: set[int] = set()
        self.layers: defaultdict[str, set[int]] = defaultdict(set)
        self.passes: Counter[tuple[str, str, str]] = Counter()
        self.captured: dict[tuple[str, int], str] = {}

    def register(self, layer: int) -> None:
        """A layer of the target that routes to experts."""
        self.registered.add(layer)

    def layer(self, layer: int, phase: str, rows: int, what: str, rule: Rule, capturing: bool) -> None:
        """A layer chose its experts in a phase that the rule is for: with it (`APPLIED`) or not, and why."""
        if layer not in self.layers[what]:
            self.layers[what].add(layer)
            self._tell(rule)
        if layer != min(self.registered, default=layer):
            return
        if capturing:
            self.captured[phase, rows] = what
        else:
            self.passes[phase, "eager", what] += 1

    def replay(self, phase: str, rows: int, real: int, rule: Rule) -> None:
        """A captured graph of `rows` rows is about to run, `real` of them no padding."""
        what = self.captured.get((phase, rows), "not_in_graph")
        if what == APPLIED and not rule.least <= real <= rule.most:
            what = "outside_window"
        self.passes[phase, "graph", what] += 1

    def figures(self) -> dict[str, Any]:
        """``layers`` and ``passes``, and ``layers_never_asked``: those that no code this patch knows of ever asked."""
        passes: dict[str, dict[str, dict[str, int]]] = {}
        for (phase, path, what), count in sorted(self.passes.items()):
            passes.setdefault(phase, {}).setdefault(path, {})[what] = count
        seen = set().union(*self.layers.values()) if self.layers else set()
        return {
            "moe_layers": len(self.registered),
            "layers": {what: len(ids) for what, ids in sorted(self.layers.items())},
            "layers_never_asked": len(self.registered - seen),
            "passes": passes,
        }

    def _tell(self, rule: Rule) -> None:
        without = sorted(what for what in self.layers if what not in (APPLIED, *BY_DESIGN))
        if APPLIED in self.layers:
            _outcome.record(
                PATCH,
                "applied",
                f"experts of a batch's tokens are chosen together from k0={rule.k0} of each on: answers differ from "
                "upstream's" + (f"; not in all layers or passes: {', '.join(without)}" if without else ""),
                **rule.figures(),
            )
        elif without:
            _outcome.record(PATCH, "failed", f"upstream chooses all experts: {', '.join(without)}", **rule.figures())


# Reasons that are settings doing what they say.
BY_DESIGN = ("outside_window",)
