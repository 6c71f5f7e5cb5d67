"""What the dashboard shows: its panels, and their PromQL.

Sums over replicas take the largest of the ranks of one replica, because some metrics are told by each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_patches.observe import upstream
from sglang_patches.observe.scrape import RANKS
from sglang_patches.runtime import _metrics

# An accept length below this is hardly more than the token that decoding gives alone: the default of patch
# kimi-k25-eagle3-delegation.
POOR_LENGTH = 1.1


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        queries: (expression, legend), legends with Grafana's ``{{label}}``.
        unit: Grafana's name of it.
        limit: a value from which on (`below`: up to which) it is drawn in red.
        kind: of panel: timeseries, stat or table; a table shows the present.
    """

    title: str
    meaning: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    limit: float | None = None
    below: bool = False
    stacked: bool = False
    largest: float | None = None


def chosen(name: str, **labels: str) -> str:
    """A selector of the series of this name on the servers that the dashboard shows."""
    more = "".join(f', {label}="{value}"' for label, value in labels.items())
    return f'{name}{{instance=~"$instance"{more}}}'


def per_second(name: str, *by: str, **labels: str) -> str:
    """How fast a counter grows, by labels."""
    return _replicas(f"rate({chosen(name, **labels)}[$__rate_interval])", by)


def now(name: str, *by: str, **labels: str) -> str:
    """The value of a gauge (or of a counter since start), by labels."""
    return _replicas(chosen(name, **labels), by)


def _replicas(inner: str, by: tuple[str, ...]) -> str:
    outer = f" by ({', '.join(by)})" if by else ""
    return f"sum{outer} (max without ({', '.join(RANKS)}) ({inner}))"


def _quantile(share: float, metric: str, *by: str) -> str:
    return f"histogram_quantile({share}, {per_second(f'{metric}_bucket', 'le', *by)})"


def accept_length() -> str:
    """Mean tokens accepted per request and verify pass over the interval: the bonus token and the drafts."""
    return f"1 + {per_second(_metrics.ACCEPTED.name)} / {per_second(_metrics.VERIFIED.name)}"


def rows() -> list[tuple[str, list[Panel]]]:
    """Title and panels of each row of the dashboard."""
    forward, seconds = _metrics.SPEC_FORWARD.name, _metrics.SPEC_PHASE_SECONDS.name
    graph, every = per_second(forward, "phase", path="graph"), per_second(forward, "phase")
    return [
        (
            "Load",
            [
                Panel(
                    "Tokens/s",
                    "Generated, and prompt tokens computed or found in the cache.",
                    (
                        (per_second(upstream.TOKENS, mode="decode"), "output"),
                        (per_second(upstream.TOKENS, mode="prefill_compute"), "prompt, computed"),
                        (per_second(upstream.TOKENS, mode="prefill_cache"), "prompt, from cache"),
                    ),
                ),
                Panel(
                    "Requests",
                    "Running, and waiting for a place.",
                    (
                        (now(upstream.RUNNING, priority=""), "running"),
                        (now(upstream.QUEUED, priority=""), "queued"),
                    ),
                ),
                Panel(
                    "KV cache",
                    "Share of the token slots in use, of the fullest replica.",
                    ((f"max by (instance) ({chosen(upstream.TOKEN_USAGE)})", "{{instance}}"),),
                    unit="percentunit",
                    largest=1.0,
                    limit=0.95,
                ),
                Panel(
                    "Time to first token",
                    "Half and 95% of the requests had it within this time.",
                    tuple((_quantile(q, upstream.TIME_TO_FIRST_TOKEN), f"p{q * 100:.0f}") for q in (0.5, 0.95)),
                    unit="s",
                    width=12,
                ),
                Panel(
                    "Time per output token",
                    "After the first; half and 95% of the requests stayed within it.",
                    tuple((_quantile(q, upstream.TIME_PER_OUTPUT_TOKEN), f"p{q * 100:.0f}") for q in (0.5, 0.95)),
                    unit="s",
                    width=12,
                ),
            ],
        ),
        (
            "Acceptance",
            [
                Panel(
                    "Accept length",
                    "Mean tokens per request and verify pass, bonus token included; passes that drafted nothing count "
                    "as 1. 1.0x: drafting gains nothing.",
                    (
                        (accept_length(), "interval"),
                        (f"min by (instance) ({chosen(_metrics.ACCEPT_LENGTH_WINDOW.name)})", "window {{instance}}"),
                        (f"min by (instance) ({chosen(_metrics.ACCEPT_LENGTH.name)})", "since start {{instance}}"),
                    ),
                    limit=POOR_LENGTH,
                    below=True,
                ),
                Panel(
                    "Accepted, by position",
                    "Share of the requests for which this position was drafted whose draft token there was accepted.",
                    (
                        (
                            f"{per_second(_metrics.ACCEPTED.name, 'position')}"
                            f" / {per_second(_metrics.DRAFTED.name, 'position')}",
                            "draft token {{position}}",
                        ),
                    ),
                    unit="percentunit",
                    largest=1.0,
                ),
                Panel(
                    "Accept alarm",
                    "1: the accept length has been too low for too long; the server's log has the likely causes.",
                    ((f"max by (instance) ({chosen(_metrics.ACCEPT_ALARM.name)})", "{{instance}}"),),
                    kind="stat",
                    limit=1.0,
                ),
            ],
        ),
        (
            "Time of a cycle",
            [
                Panel(
                    "Mean time by phase",
                    "On the GPU's stream, gaps included (on a CPU: wall time).",
                    (
                        (
                            f"{per_second(f'{seconds}_sum', 'phase')} / {per_second(f'{seconds}_count', 'phase')}",
                            "{{phase}}",
                        ),
                    ),
                    unit="s",
                    width=12,
                    stacked=True,
                ),
                Panel(
                    "95% of the forwards took less",
                    "From the histogram's buckets, so not finer than these.",
                    ((_quantile(0.95, seconds, "phase"), "{{phase}}"),),
                    unit="s",
                    width=12,
                ),
            ],
        ),
        (
            "CUDA graphs",
            [
                Panel(
                    "Share of forwards that ran from a graph",
                    "An eager forward takes several times as long.",
                    # Zero where no forward ever ran from a graph: there is no such series then.
                    ((f"({graph} or 0 * {every}) / {every}", "{{phase}}"),),
                    unit="percentunit",
                    width=12,
                    largest=1.0,
                ),
                Panel(
                    "Forwards without a graph, by reason",
                    "Reasons: docs/patches/eagle-verify-cuda-graph.md.",
                    (
                        (
                            _replicas(
                                f'rate({forward}{{instance=~"$instance", path!="graph"}}[$__rate_interval])',
                                ("phase", "path", "reason"),
                            ),
                            "{{phase}} {{path}}: {{reason}}",
                        ),
                    ),
                    unit="ops",
                    width=12,
                ),
            ],
        ),
        (
            "All-reduce",
            [
                Panel(
                    "Eager all-reduces by path and size",
                    "Calls outside of CUDA graphs: prefill, and what runs eagerly.",
                    (
                        (
                            per_second(_metrics.ALLREDUCE.name, "path", "up_to_bytes", when="eager"),
                            "{{path}}, up to {{up_to_bytes}} bytes",
                        ),
                    ),
                    unit="ops",
                    width=12,
                ),
                Panel(
                    "Path by size in CUDA graphs",
                    "Calls captured since start, each once; replays are not counted.",
                    ((now(_metrics.ALLREDUCE.name, "group", "path", "up_to_bytes", when="captured"), ""),),
                    kind="table",
                    width=12,
                ),
            ],
        ),
        (
            "Patches",
            [
                Panel(
                    "oea-topk: passes by result",
                    "applied, or why upstream chose the experts. Nothing where the patch is off.",
                    ((per_second(_metrics.OEA_PASSES.name, "phase", "result"), "{{phase}}: {{result}}"),),
                    unit="ops",
                    width=12,
                ),
                Panel(
                    "oea-topk: experts a layer loads",
                    "Mean over layers and passes: with the rule, and what upstream's top-k would have loaded.",
                    (
                        (
                            f"{per_second(_metrics.OEA_EXPERTS.name, 'phase', 'set')}"
                            f" / on (phase) group_left () {per_second(_metrics.OEA_LAYERS.name, 'phase')}",
                            "{{phase}}: {{set}}",
                        ),
                    ),
                    width=12,
                ),
                Panel(
                    "Code state",
                    "Patch set of each server.",
                    (
                        (
                            f"max by (instance, release, patch_set_id, patches) ({chosen(_metrics.INFO.name)})",
                            "",
                        ),
                    ),
                    kind="table",
                    width=12,
                ),
            ],
        ),
    ]
