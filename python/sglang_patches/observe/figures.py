"""What `top` shows, from two readings of ``/metrics``: rates over the time between them, and states at the second."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sglang_patches.observe import upstream
from sglang_patches.observe.scrape import Between, latest
from sglang_patches.runtime import _metrics
from sglang_patches.runtime._metrics import Metric

PHASES = _metrics.SPEC_FORWARD.values["phase"]


@dataclass
class Phase:
    """One phase of a speculative cycle; None where it is not known (`Figures.missing` says why).

    Attributes:
        reasons: forwards that ran from no graph, by path and reason, per second.
    """

    forwards_per_s: float | None = None
    mean_ms: float | None = None
    clock: str | None = None
    graph_share: float | None = None
    reasons: dict[str, float] = field(default_factory=dict)


@dataclass
class AllReduce:
    """All-reduces of one group, path and size.

    Attributes:
        captured: into CUDA graphs, since start; replays are not counted.
    """

    group: str
    path: str
    up_to_bytes: int
    eager_per_s: float = 0.0
    captured: int = 0


@dataclass
class Figures:
    """All of it; None where it is not known, and `missing` says why, by the field's name.

    Attributes:
        seconds: between the two readings.
        restarted: the server was started anew between them, so rates are too low.
        accept_length: mean tokens accepted per request and verify pass, between the readings.
        accepted: by position, the share of the requests for which it was drafted whose draft token there was accepted;
            None where it was drafted for none; empty where nothing was.
        oea: passes per second, by result.
        oea_experts: different experts a layer loads, mean over layers and passes; `oea_upstream`: would load without
            the rule.
    """

    seconds: float
    restarted: bool
    model: str | None = None
    release: str | None = None
    patch_set_id: str | None = None
    patches: list[str] = field(default_factory=list)
    output_tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    cached_tokens_per_s: float | None = None
    running: int | None = None
    queued: int | None = None
    kv_share: float | None = None
    kv_tokens: int | None = None
    kv_max: int | None = None
    accept_length: float | None = None
    accept_length_window: float | None = None
    accept_length_since_start: float | None = None
    accept_alarm: bool | None = None
    accepted: list[float | None] = field(default_factory=list)
    phases: dict[str, Phase] = field(default_factory=dict)
    allreduce: list[AllReduce] = field(default_factory=list)
    oea: dict[str, float] = field(default_factory=dict)
    oea_experts: float | None = None
    oea_upstream: float | None = None
    missing: dict[str, str] = field(default_factory=dict)


def figures(seen: Between) -> Figures:
    """What two readings tell; a metric that is absent leaves its figures None."""
    found = Figures(seconds=seen.seconds, restarted=seen.restarted)
    _server(found, seen)
    _load(found, seen)
    _acceptance(found, seen)
    found.phases = {phase: _phase(found, seen, phase) for phase in PHASES}
    _allreduce(found, seen)
    _oea(found, seen)
    return found


def absent(metric: Metric) -> str:
    """Why a metric of a patch may not be there."""
    return f"no {metric.name}: needs patch {metric.patch}" + (f" and {metric.only}" if metric.only else "")


def _server(found: Figures, seen: Between) -> None:
    for labels, _ in seen.last.series(upstream.KV_MAX):
        found.model = labels.get("model_name")
    told = [labels for labels, _ in seen.last.series(_metrics.INFO.name)]
    if told:
        found.release, found.patch_set_id = told[-1].get("release"), told[-1].get("patch_set_id")
        found.patches = [name for name in told[-1].get("patches", "").split(",") if name]
    else:
        found.missing["patch_set_id"] = absent(_metrics.INFO)


def _load(found: Figures, seen: Between) -> None:
    tokens = seen.counted(upstream.TOKENS, ("mode",))
    for name, mode in (("output", "decode"), ("prompt", "prefill_compute"), ("cached", "prefill_cache")):
        if tokens:
            setattr(found, f"{name}_tokens_per_s", tokens.get((mode,), 0.0) / seen.seconds)
        else:
            found.missing[f"{name}_tokens_per_s"] = f"no {upstream.TOKENS}: no request yet"
    for name, metric in (
        ("running", upstream.RUNNING),
        ("queued", upstream.QUEUED),
        ("kv_tokens", upstream.KV_USED),
        ("kv_max", upstream.KV_MAX),
    ):
        value = _gauge(found, seen, name, metric)
        setattr(found, name, None if value is None else int(value))
    # Of several replicas the fullest: it is the one that makes requests wait.
    shares = [value for _, value in seen.last.series(upstream.TOKEN_USAGE)]
    found.kv_share = max(shares, default=None)
    if not shares:
        found.missing["kv_share"] = f"no {upstream.TOKEN_USAGE}: no request yet"


def _gauge(found: Figures, seen: Between, name: str, metric: str) -> float | None:
    values = latest(seen.last, metric)
    if not values:
        found.missing[name] = f"no {metric}: no request yet"
    return values.get(())


def _acceptance(found: Figures, seen: Between) -> None:
    for name, metric in (
        ("accept_length_window", _metrics.ACCEPT_LENGTH_WINDOW),
        ("accept_length_since_start", _metrics.ACCEPT_LENGTH),
        ("accept_alarm", _metrics.ACCEPT_ALARM),
    ):
        values = [value for _, value in seen.last.series(metric.name)]
        if not values:
            found.missing[name] = absent(metric)
        elif name == "accept_alarm":
            found.accept_alarm = any(values)
        else:
            setattr(found, name, sum(values) / len(values))
    verified = seen.counted(_metrics.VERIFIED.name)
    if not verified:
        found.missing["accept_length"] = found.missing["accepted"] = absent(_metrics.VERIFIED)
        return
    if not verified[()]:
        found.missing["accept_length"] = found.missing["accepted"] = "nothing was verified in this interval"
        return
    drafted, accepted = (seen.counted(metric.name, ("position",)) for metric in (_metrics.DRAFTED, _metrics.ACCEPTED))
    # The bonus token is one a pass.
    found.accept_length = 1 + sum(accepted.values()) / verified[()]
    if not any(drafted.values()):
        found.missing["accepted"] = "nothing was drafted in this interval"
        return
    found.accepted = [
        accepted.get((str(position),), 0.0) / drafted[str(position),] if drafted[str(position),] else None
        for position in sorted(int(position) for (position,) in drafted)
    ]


def _phase(found: Figures, seen: Between, phase: str) -> Phase:
    told = Phase()
    where = {"phase": phase}
    counts = seen.counted(_metrics.SPEC_FORWARD.name, ("path", "reason"), where)
    total = sum(counts.values())
    if counts:
        told.forwards_per_s = total / seen.seconds
    else:
        found.missing[f"{phase}.forwards"] = absent(_metrics.SPEC_FORWARD)
    if total:
        told.graph_share = sum(count for (path, _), count in counts.items() if path == "graph") / total
        told.reasons = {
            path if path == reason else f"{path}: {reason}": count / seen.seconds
            for (path, reason), count in sorted(counts.items(), key=lambda item: -item[1])
            if path != "graph" and count
        }
    metric = _metrics.SPEC_PHASE_SECONDS.name
    seconds, passes = (seen.counted(f"{metric}_{part}", ("clock",), where) for part in ("sum", "count"))
    if not passes:
        found.missing[f"{phase}.time"] = absent(_metrics.SPEC_PHASE_SECONDS)
    for clock, count in passes.items():
        told.clock = clock[0]
        if count:
            told.mean_ms = 1000 * seconds.get(clock, 0.0) / count
    return told


def _allreduce(found: Figures, seen: Between) -> None:
    by = ("group", "path", "up_to_bytes")
    name = _metrics.ALLREDUCE.name
    eager = seen.counted(name, by, {"when": "eager"})
    captured = latest(seen.last, name, by, {"when": "captured"})
    if not eager and not captured:
        found.missing["allreduce"] = absent(_metrics.ALLREDUCE)
    for key in sorted({*eager, *captured}, key=lambda key: (key[0], int(key[2]), key[1])):
        group, path, size = key
        found.allreduce.append(
            AllReduce(group, path, int(size), eager.get(key, 0.0) / seen.seconds, int(captured.get(key, 0.0)))
        )


def _oea(found: Figures, seen: Between) -> None:
    results = seen.counted(_metrics.OEA_PASSES.name, ("result",))
    found.oea = {result: count / seen.seconds for (result,), count in sorted(results.items())}
    experts = seen.counted(_metrics.OEA_EXPERTS.name, ("set",))
    if layers := seen.counted(_metrics.OEA_LAYERS.name).get((), 0.0):
        found.oea_experts, found.oea_upstream = (experts.get((name,), 0.0) / layers for name in ("loaded", "upstream"))
    elif results:
        found.missing["oea_experts"] = "nothing counted in this interval" if experts else absent(_metrics.OEA_EXPERTS)
    if not results and _metrics.OEA_PASSES.patch in found.patches:
        found.missing["oea"] = absent(_metrics.OEA_PASSES)


def as_json(found: Figures) -> dict[str, Any]:
    """The figures as a JSON-able document, by the names of the attributes."""
    from dataclasses import asdict

    return asdict(found)
