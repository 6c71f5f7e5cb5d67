"""What the dashboard and the alarms ask for: their PromQL, parsed."""

from __future__ import annotations

import re
from collections.abc import Iterator

import promql_parser

from sglang_patches.observe import dashboard
from sglang_patches.runtime import _metrics

# Prometheus adds them when it scrapes.
SCRAPED = {"instance", "job"}


def expressions() -> Iterator[str]:
    """Every expression of the dashboard, as it is in its JSON, and of the alarms; variables of Grafana filled in."""
    made = dashboard.document()
    for panel in made["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"].replace("$__rate_interval", "5m")
    for variable in made["templating"]["list"]:
        for metric, label in re.findall(r"^label_values\((.*), (\w+)\)$", variable.get("definition", "")):
            yield f"count by ({label}) ({metric})"
    for group in dashboard.alarms()["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def selectors(expression: str) -> list[tuple[str, set[str]]]:
    """Each metric that an expression reads, with the labels that it needs of it: those it matches and groups by.

    Raises:
        ValueError: it is not PromQL.
    """
    found: list[tuple[str, set[str]]] = []

    def read(node: object, needed: frozenset[str]) -> None:
        if isinstance(node, promql_parser.AggregateExpr):
            modifier = node.modifier
            if modifier is not None and modifier.type == promql_parser.AggModifierType.By:
                needed = needed | set(modifier.labels)
            read(node.expr, needed)
        elif isinstance(node, promql_parser.BinaryExpr):
            read(node.lhs, needed)
            read(node.rhs, needed)
        elif isinstance(node, promql_parser.Call):
            for argument in node.args:
                read(argument, needed)
        elif isinstance(node, promql_parser.ParenExpr | promql_parser.UnaryExpr):
            read(node.expr, needed)
        elif isinstance(node, promql_parser.MatrixSelector):
            read(node.vector_selector, needed)
        elif isinstance(node, promql_parser.VectorSelector):
            assert node.name is not None, f"a selector without a name in {expression}"
            found.append((node.name, {*needed, *(matcher.name for matcher in node.matchers.matchers)}))
        elif not isinstance(node, promql_parser.NumberLiteral | promql_parser.StringLiteral):
            raise AssertionError(f"{type(node).__name__} in {expression}: not looked into")

    read(promql_parser.parse(expression), frozenset())
    return found


def declared() -> dict[str, set[str]]:
    """Names of the series of the patches' metrics, and all labels that each can have."""
    upstreams = {*_metrics.SCHEDULER_LABELS, *_metrics.OPTIONAL_LABELS}
    return {
        name: {*labels, *(upstreams if metric.scheduler else ())}
        for metric in _metrics.ALL
        for name, labels in _metrics.series_names(metric).items()
    }
