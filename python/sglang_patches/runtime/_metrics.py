"""Every Prometheus metric of the patches: declared here, made from here, and told in docs/metrics.md from here.

Upstream serves them at ``/metrics`` when it runs with ``--enable-metrics``; a test compares docs/metrics.md with them.
Standard library only until the first metric is made: upstream sets the folder for multi-process metrics after start,
and ``prometheus_client`` reads it on import.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

logger = logging.getLogger("sglang_patches")

Kind = Literal["counter", "gauge", "histogram"]

# Upstream's own labels, which metrics of a scheduler carry besides theirs: `SchedulerMetricsCollector` in 0.5.23.
SCHEDULER_LABELS = ("model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank")
# ... and these where the server has priorities or data-parallel ranks.
OPTIONAL_LABELS = ("priority", "dp_rank")


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: as it appears in ``/metrics``; a counter's ends in ``_total``.
        labels: its own; those of upstream's scheduler come on top where `scheduler` is true.
        unit: of a value.
        meaning: one sentence for people: what is measured, and where it cannot be taken at face value.
        patch: that makes it.
        values: by label, what it can be, where that is a short list.
        buckets: upper bounds of a histogram, in `unit`.
        only: what it takes to appear beside the patch and requests; empty if nothing.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    unit: str
    meaning: str
    patch: str
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False)
    buckets: tuple[float, ...] = ()
    scheduler: bool = True
    only: str = ""

    def child(self, upstreams: Mapping[str, Any], **own: str) -> Any:
        """The series with these labels, made on the first call in this process.

        Args:
            upstreams: labels of upstream's metrics collector; empty for a metric of the HTTP process.
            own: a value for each of `labels`.
        """
        return _child(self, tuple(upstreams.items()), tuple(own.items()))


# Kept, because to find a series anew takes prometheus_client several microseconds, in each decode step.
@functools.cache
def _child(metric: Metric, upstreams: tuple[tuple[str, Any], ...], own: tuple[tuple[str, str], ...]) -> Any:
    made = _made(metric, tuple(name for name, _ in upstreams))
    labels = dict((*upstreams, *own))
    return made.labels(**labels) if labels else made


@functools.cache
def _made(metric: Metric, upstreams: tuple[str, ...]) -> Any:
    import prometheus_client

    names = (*upstreams, *metric.labels)
    if metric.kind == "counter":
        return prometheus_client.Counter(metric.name, metric.meaning, labelnames=names)
    if metric.kind == "histogram":
        return prometheus_client.Histogram(metric.name, metric.meaning, labelnames=names, buckets=metric.buckets)
    return prometheus_client.Gauge(metric.name, metric.meaning, labelnames=names, multiprocess_mode="mostrecent")


class Exported:
    """Carries counts that grow elsewhere in this process to a counter: what is new since the last time is added."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self._told: Counter[tuple[str, ...]] = Counter()

    def export(self, counts: Iterable[tuple[tuple[str, ...], int]], upstreams: Mapping[str, Any]) -> None:
        """Add what is new.

        Args:
            counts: values of the metric's own labels, in its order, and the count so far. One of 0 makes the series.
            upstreams: labels of upstream's metrics collector.
        """
        for key, count in counts:
            # A count that went back began anew.
            new = count - self._told[key] if count >= self._told[key] else count
            if new or key not in self._told:
                self.metric.child(upstreams, **dict(zip(self.metric.labels, key, strict=True))).inc(new)
                self._told[key] = count


def on_decode_step(patch: str, export: Callable[[Mapping[str, Any]], None]) -> Callable[..., Callable[..., None]]:
    """A decorator for ``SchedulerMetricsCollector.increment_decode_cuda_graph_pass``, through which counts go out.

    Upstream calls it once a decode step where metrics are on.

    Args:
        patch: whose counts they are.
        export: gets upstream's labels.
    """
    exported = contained(patch, lambda collector: export(collector.labels))

    def decorate(increment: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(increment)
        def incremented(self: Any, *args: Any, **named: Any) -> None:
            increment(self, *args, **named)
            exported(self)

        return incremented

    return decorate


def contained(patch: str, export: Callable[[Any], None]) -> Callable[[Any], None]:
    """The same without its errors, which would end upstream's loop: the first is logged."""
    failed: list[str] = []

    def exported(holder: Any) -> None:
        try:
            export(holder)
        except Exception:
            if not failed:
                failed.append(patch)
                logger.exception("sglang-patches: %s: its metrics are not up to date, by an error", patch)

    return exported


INFO = Metric(
    "sglang_patches_info",
    "gauge",
    ("patch_set_id", "release", "patches"),
    "",
    "Always 1; its labels tell the code state of this server.",
    "provenance",
    scheduler=False,
)
ACCEPT_LENGTH = Metric(
    "sglang_patches_accept_length",
    "gauge",
    (),
    "tokens",
    "Mean tokens accepted per request and verify pass since start, bonus token included, of requests that had not "
    "finished.",
    "provenance",
    only="speculation",
)
VERIFIED = Metric(
    "sglang_patches_spec_verified_total",
    "counter",
    (),
    "requests",
    "Requests verified: one for each request of each verify pass, passes that drafted nothing included. Without the "
    "pass that overlap scheduling runs for a request that has finished already.",
    "provenance",
    only="speculation",
)
DRAFTED = Metric(
    "sglang_patches_spec_drafted_total",
    "counter",
    ("position",),
    "requests",
    "Verified requests for which this position was drafted; 1 is the first, in a tree its depth.",
    "provenance",
    only="speculation",
)
ACCEPTED = Metric(
    "sglang_patches_spec_accepted_total",
    "counter",
    ("position",),
    "requests",
    "Verified requests whose draft token at this position was accepted; 1 is the first, in a tree its depth on the "
    "accepted path. Counted before a grammar or the end of the request cuts tokens off.",
    "provenance",
    only="speculation",
)
ACCEPT_LENGTH_WINDOW = Metric(
    "sglang_patches_accept_length_window",
    "gauge",
    (),
    "tokens",
    "Mean tokens accepted per request and verify pass over the last passes (SGLANG_PATCHES_ACCEPT_WINDOW), bonus token "
    "included.",
    "kimi-k25-eagle3-delegation",
    only="EAGLE-3",
)
ACCEPT_ALARM = Metric(
    "sglang_patches_accept_alarm",
    "gauge",
    (),
    "",
    "1 while the accept length of the window is below the alarm's limit for as long as it takes, else 0; the log and "
    "/server_info have the likely causes.",
    "kimi-k25-eagle3-delegation",
    only="EAGLE-3",
)
SPEC_FORWARD = Metric(
    "sglang:spec_forward_total",
    "counter",
    ("phase", "path", "reason"),
    "forwards",
    "Speculative forwards by phase, by path and by why they took it. Every tensor-parallel rank counts the same ones.",
    "eagle-verify-cuda-graph",
    values={"phase": ("verify", "draft_decode", "draft_extend"), "path": ("graph", "eager", "cpu")},
    only="EAGLE",
)
SPEC_PHASE_SECONDS = Metric(
    "sglang_patches_spec_phase_seconds",
    "histogram",
    ("phase", "clock"),
    "seconds",
    "Time of a phase of a speculative cycle, its preparation and sampling included. Clock device: between two events "
    "on the GPU's stream, gaps in which it waits for the host included. Clock host: wall time, on a CPU, where nothing "
    "is queued. First rank of each attention group only.",
    "eagle-verify-cuda-graph",
    values={"phase": ("verify", "draft_decode", "draft_extend"), "clock": ("device", "host")},
    only="EAGLE",
    buckets=(0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0),
)
ALLREDUCE = Metric(
    "sglang_patches_allreduce_calls_total",
    "counter",
    ("group", "path", "up_to_bytes", "when"),
    "calls",
    "All-reduces by group, by the path that upstream took and by size (a rank's bytes, rounded up to a power of two). "
    "When captured: recorded into a CUDA graph, once, however often it is replayed; when eager: each call; when "
    "warm_up: each call before the end of the first decode step, so what runs before captures and, as a rule, the "
    "prompt of the server's own first request. Sums fused with what follows, those of compiled code on a CPU and those "
    "that call NCCL directly are not seen.",
    "pcie-nccl-allreduce",
    values={
        "path": ("ca", "pcie_ipc", "qr", "pymscclpp", "torch_symm_mem", "flashinfer", "pynccl", "torch", "shm"),
        "when": ("eager", "captured", "warm_up"),
    },
    only="several ranks (--tp 2 or more)",
)
OEA_PASSES = Metric(
    "sglang_patches_oea_passes_total",
    "counter",
    ("phase", "path", "result"),
    "passes",
    "Decode and verify passes by whether their first MoE layer chose experts by the rule (applied), or why not. "
    "Start-up's warm-up passes count as eager ones.",
    "oea-topk",
    values={"phase": ("decode", "verify"), "path": ("graph", "eager")},
    only="SGLANG_PATCHES_OEA_K0",
)

OEA_EXPERTS = Metric(
    "sglang_patches_oea_experts_total",
    "counter",
    ("phase", "set"),
    "experts",
    "Different experts of a layer that a batch's tokens were routed to by the rule (loaded), and those that upstream's "
    "top-k would have had (upstream), added up over layers and passes in which the rule held: the difference was "
    "saved. A second behind.",
    "oea-topk",
    values={"phase": ("decode", "verify"), "set": ("loaded", "upstream")},
    only="SGLANG_PATCHES_OEA_COUNT=on",
)
OEA_LAYERS = Metric(
    "sglang_patches_oea_layers_total",
    "counter",
    ("phase",),
    "layers",
    "Layers of passes in which the rule held, as many as sglang_patches_oea_experts_total is the sum of.",
    "oea-topk",
    values={"phase": ("decode", "verify")},
    only="SGLANG_PATCHES_OEA_COUNT=on",
)

ALL = (
    INFO,
    ACCEPT_LENGTH,
    VERIFIED,
    DRAFTED,
    ACCEPTED,
    ACCEPT_LENGTH_WINDOW,
    ACCEPT_ALARM,
    SPEC_FORWARD,
    SPEC_PHASE_SECONDS,
    ALLREDUCE,
    OEA_PASSES,
    OEA_EXPERTS,
    OEA_LAYERS,
)


def series_names(metric: Metric) -> dict[str, tuple[str, ...]]:
    """Names of a metric's series in ``/metrics``, and the labels that each has of the metric's own."""
    if metric.kind != "histogram":
        return {metric.name: metric.labels}
    return {
        f"{metric.name}_bucket": (*metric.labels, "le"),
        f"{metric.name}_sum": metric.labels,
        f"{metric.name}_count": metric.labels,
    }
