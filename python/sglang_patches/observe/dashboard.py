"""The Grafana dashboard and the Prometheus alarms, made from the names of the metrics that they read.

Grafana 10 and newer import it (schema version 39); the data source and the servers are chosen in the dashboard.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglang_patches.observe import upstream
from sglang_patches.observe.panels import POOR_LENGTH, Panel, rows
from sglang_patches.runtime import _metrics

UID = "sglang-patches"
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT = 24, 8


def document() -> dict[str, Any]:
    """The dashboard, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in rows():
        place = {"h": 1, "w": _WIDTH, "x": 0, "y": top}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": place})
        top, left = top + 1, 0
        for panel in row:
            if left + panel.width > _WIDTH:
                top, left = top + _HEIGHT, 0
            panels.append(_panel(panel, len(panels) + 1, left, top))
            left += panel.width
        top += _HEIGHT
    return {
        "uid": UID,
        "title": "sglang-patches",
        "description": "EAGLE-3 on SGLang with sglang-patches: docs/metrics.md says what each metric means.",
        "tags": ["sglang"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": list(_variables())},
        "panels": panels,
    }


def _variables() -> Iterable[dict[str, Any]]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}
    query = f"label_values({upstream.KV_MAX}, instance)"
    yield {
        "name": "instance",
        "label": "Server",
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "instances"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "hide": 0,
    }


def _panel(panel: Panel, number: int, left: int, top: int) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "red" if panel.below else "green", "value": None}]
    if panel.limit is not None:
        steps.append({"color": "green" if panel.below else "red", "value": panel.limit})
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.largest is not None:
        defaults["max"] = panel.largest
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "fillOpacity": 20 if panel.stacked else 0,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "off" if panel.limit is None else "line"},
        }
    made: dict[str, Any] = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.meaning,
        "datasource": _SOURCE,
        "gridPos": {"h": _HEIGHT, "w": panel.width, "x": left, "y": top},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [_target(panel, place) for place in range(len(panel.queries))],
    }
    if panel.kind == "table":
        hidden = {"Time": True}
        made["transformations"] = [{"id": "organize", "options": {"excludeByName": hidden}}]
    return made


def _target(panel: Panel, place: int) -> dict[str, Any]:
    expression, legend = panel.queries[place]
    present = panel.kind == "table"
    return {
        "refId": chr(ord("A") + place),
        "datasource": _SOURCE,
        "expr": expression,
        "legendFormat": legend,
        "instant": present,
        "range": not present,
        "format": "table" if present else "time_series",
    }


def alarms() -> dict[str, Any]:
    """Prometheus alerting rules, for ``rule_files``."""
    # Passes that drafted something: a server that adapts may plan to draft nothing.
    drafted = f'sum by (instance) (rate({_metrics.DRAFTED.name}{{position="1"}}[10m]))'
    accepted = f"sum by (instance) (rate({_metrics.ACCEPTED.name}[10m]))"
    forward = _metrics.SPEC_FORWARD.name
    return {
        "groups": [
            {
                "name": "sglang-patches",
                "rules": [
                    _alarm(
                        "AcceptLengthNearOne",
                        f"1 + {accepted} / {drafted} < {POOR_LENGTH}",
                        "10m",
                        "{{ $labels.instance }}: accept length {{ $value | humanize }}: drafting gains nothing",
                    ),
                    _alarm(
                        "AcceptAlarm",
                        f"max by (instance) ({_metrics.ACCEPT_ALARM.name}) == 1",
                        "0m",
                        "{{ $labels.instance }}: the server's own alarm is on; its log has the likely causes",
                    ),
                    _alarm(
                        "SpeculationWithoutCudaGraphs",
                        f'sum by (instance, phase) (rate({forward}{{path="eager"}}[10m])) '
                        f"/ sum by (instance, phase) (rate({forward}[10m])) > 0.1",
                        "10m",
                        "{{ $labels.instance }}: {{ $value | humanizePercentage }} of {{ $labels.phase }} ran "
                        "without a CUDA graph",
                    ),
                ],
            }
        ]
    }


def _alarm(name: str, expression: str, lasting: str, summary: str) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expression,
        "for": lasting,
        "labels": {"severity": "warning"},
        "annotations": {"summary": summary},
    }
