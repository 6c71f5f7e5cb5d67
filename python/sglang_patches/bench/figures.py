"""What one turn's samples say: the figures that turns are compared by."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sglang_patches.bench.model import Sample

#: Counts up when the same samples would give other figures: turns of two versions are not of one run.
VERSION = 2
_GRAPHS = "eagle-verify-cuda-graph"


def figures(samples: Sequence[Sample]) -> dict[str, float]:
    """The figures of a turn whose requests all succeeded.

    tokens_per_s: output tokens of all requests over the time from the first sending to the last token.
    ttft_ms_p50, _p95, _p99: over requests, from sending to the first tokens, waiting in the server included.
    tpot_ms_p50, _p95, _p99: over requests with tokens after the first chunk, (latency - ttft) / (tokens - those of the
        first chunk), which is the one token of the prefill unless a busy server joined it with later ones.
    verify_ms (with speculation only): the sum over requests of (latency - ttft), over the sum of verify passes after
        the first chunk. One cycle is draft, verify and draft-extend.
    accept_length (with speculation only): the prefill gives a request's first token and verify passes all others, so it
        is the sum over requests of (tokens - 1), over the sum of verify passes. Upstream's counts the first token too.
    measured_s: from the first sending to the last token.
    """
    end = max(sample.sent + sample.latency for sample in samples)
    told = {"tokens_per_s": sum(sample.output_tokens for sample in samples) / end, "measured_s": end}
    told |= _percentiles("ttft_ms", [1e3 * sample.ttft for sample in samples])
    long = [sample for sample in samples if sample.output_tokens > sample.first_tokens]
    told |= _percentiles("tpot_ms", [1e3 * (s.latency - s.ttft) / (s.output_tokens - s.first_tokens) for s in long])
    if passes := sum((sample.verify_passes or 0) - sample.first_passes for sample in long):
        told["verify_ms"] = 1e3 * sum(sample.latency - sample.ttft for sample in long) / passes
    if passes := sum(sample.verify_passes or 0 for sample in samples):
        told["accept_length"] = sum(sample.output_tokens - 1 for sample in samples) / passes
    return told


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}_p{p}": float(np.percentile(values, p)) for p in (50, 95, 99)} if values else {}


def graph_share(before: Mapping[str, Any], after: Mapping[str, Any]) -> float | None:
    """Share of target verify passes between two answers' outcomes that replayed a CUDA graph.

    None where patch eagle-verify-cuda-graph is off or there was none.
    """
    counts: dict[str, int] = {}
    for sign, outcomes in ((-1, before), (1, after)):
        by_path = (outcomes.get(_GRAPHS) or {}).get("passes", {}).get("verify", {})
        for path, reasons in by_path.items():
            counts[path] = counts.get(path, 0) + sign * sum(reasons.values())
    total = sum(counts.values())
    return counts.get("graph", 0) / total if total else None


def outputs_sha256(samples: Sequence[Sample]) -> str | None:
    """Over all outputs in order of prompts; None where one of them is unknown."""
    hashes = [sample.output_sha256 for sample in sorted(samples, key=lambda sample: sample.prompt)]
    if any(sha is None for sha in hashes):
        return None
    return hashlib.sha256("\n".join(filter(None, hashes)).encode()).hexdigest()
