"""Results for tests: small, complete, and with the parts that break a careless reader."""

from __future__ import annotations

from typing import Any

from unit.documents import made as document
from unit.documents import patch

from sglang_patches.bench.model import Arm, Result, Sample, Turn, Workload

NASTY = "<script>alert('x')</script> & `b` | *c* _d_"


def comparison(verdict: str = "SLOWER", ratio: float | None = 0.9, **more: Any) -> dict[str, Any]:
    """As bench.statistics' Comparison tells itself."""
    return {
        "verdict": verdict, "ratio": ratio, "low": 0.88, "high": 0.92, "smallest_detectable": 0.03, "rounds": 4,
        "higher_is_better": True, "margin": 0.01, "confidence": 0.95, "comparisons": 1, **more,
    }  # fmt: skip


def compared(**figures: dict[str, Any]) -> dict[str, Any]:
    """The analysis that `bench ab` writes."""
    return {
        "a": "a", "b": "b", "primary": "tokens_per_s", "margin": 0.01, "confidence": 0.95, "seed": 0,
        "comparisons": figures, "notes": ["turn 3 began late"],
    }  # fmt: skip


def compare_upstream() -> Result:
    """Pristine upstream, which tells no code state, against `none` and `all`, as `bench compare-upstream` writes it."""
    names = ["pristine", "none", "all"]
    turns = [
        Turn(
            index=at, block=at // 3, arm=names[at % 3], ready_s=30, output_sha256=None,
            document=None if at % 3 == 0 else document(), figures={"tokens_per_s": 90.0 + at, "verify_ms": 29.0},
        )
        for at in range(6)
    ]  # fmt: skip
    both = {"verify_ms": comparison("SAME", 1.0), "tokens_per_s": comparison()}
    analysis = {
        "baseline": "pristine", "primary": "tokens_per_s", "margin": 0.01, "confidence": 0.95, "seed": 0,
        "comparisons": {"none": both, "all": both}, "notes": [],
    }  # fmt: skip
    arms = [Arm(name=name, spec=name) for name in names]
    return ab(kind="compare-upstream", name="pristine", headline="same", arms=arms, turns=turns, analysis=analysis)


def factorial() -> Result:
    """Two factors, of which `x` is slower by a tenth, with the analysis that `bench factorial` writes."""
    effect = {
        "kind": "main", "aliases": [], "low": 0.89, "high": 0.91, "low_adjusted": 0.88, "high_adjusted": 0.92,
        "verdict": "SLOWER", "smallest_detectable": 0.02,
    }  # fmt: skip
    none = {**effect, "ratio": 1.001, "low": 0.99, "high": 1.01, "low_adjusted": 0.98, "high_adjusted": 1.02}
    effects = [
        {**effect, "name": "x", "ratio": 0.9},
        {**none, "name": "env:NCCL_PROTO=LL", "verdict": "AMBIGUOUS"},
        {**none, "name": "x : env:NCCL_PROTO=LL", "kind": "interaction", "verdict": "AMBIGUOUS", "aliases": ["z : w"]},
    ]
    told = {
        "higher_is_better": True, "effects": effects, "residual": 0.013, "freedom": 9, "drift": -0.0004,
        "confidence": 0.95, "margin": 0.01,
    }  # fmt: skip
    analysis = {
        "factors": ["x", "env:NCCL_PROTO=LL"], "design": "full 2^2", "resolution": None, "base": "default", "rounds": 4,
        "runs": {"a": {"x": True, "env:NCCL_PROTO=LL": False}, "b": {"x": False, "env:NCCL_PROTO=LL": True}},
        "primary": "tokens_per_s", "margin": 0.01, "confidence": 0.95, "seed": 0, "notes": [],
        "effects": {"verify_ms": {**told, "figure": "verify_ms"}, "tokens_per_s": {**told, "figure": "tokens_per_s"}},
    }  # fmt: skip
    return ab(kind="factorial", name="x-and-proto", headline="`x` is SLOWER", analysis=analysis)


def bisect() -> Result:
    """Two patches that hurt only together, with the analysis that `bench bisect` writes."""
    bad = {"value": 40.1, "ratio": 1.38, "low": 1.33, "high": 1.44, "turns": 4}
    fine = {"value": 29.0, "ratio": 1.0, "low": 0.97, "high": 1.03, "turns": 2}
    step = {
        "step": 0,
        "asked": "is bad worse?",
        "changes": ["p", "q", "r"],
        "arm": "bad",
        "answer": "bad",
        "failure": "",
    }
    suspect = {"changes": ["p", "q"], "needs": [], "minimal": True, "only_one": True, **bad}
    analysis = {
        "metric": "verify_ms", "higher_is_better": False, "threshold": 0.05, "confidence": 0.95, "found": True,
        "good": fine, "bad": {**bad, "answer": "bad"}, "changes": ["p", "q", "r"],
        "scatter": {"standard_deviation": 0.01, "degrees_of_freedom": 7},
        "steps": [
            {**step, **bad, "measured": [0, 1]},
            {**step, **fine, "step": 1, "changes": ["p"], "answer": "good", "measured": [2]},
            {**step, "step": 2, "changes": ["q"], "answer": None, "failure": "the server ended", "measured": []},
        ],
        "suspects": [suspect],
        "checks": [{"without": "p", "from": "suspect", "changes": ["q"], "answer": "good", **fine}],
        "rest": {"changes": ["r"], "answer": "good", **fine},
        "notes": ["Step 2 could not be measured: the server ended"],
    }  # fmt: skip
    return ab(kind="bisect", name="found", headline="p and q only together: verify_ms 40.1", analysis=analysis)


def verify_step() -> Result:
    """Two batch sizes, from graphs and eager, with the analysis that `bench verify-step` writes."""
    rows = []
    for tokens in (0, 4):
        for batch in (1, 16):
            for mode in ("graph", "eager"):
                slow = 6.0 if mode == "eager" else 1.0
                rows.append(
                    {
                        "draft_tokens": tokens, "context": 1024, "batch_size": batch, "mode": mode,
                        "verify": slow * batch**0.2, "cycle": slow * batch**0.2, "p10": slow, "p90": 3 * slow,
                        "cycle_floor": 0.5, "times_floor": 2.0, "decode_steps": 1.25 if tokens else None,
                        "experts_per_layer": 31.5, "busy_ms": None, "operations": None, "cycles": 60,
                        "graph_share": 1.0,
                    }
                )  # fmt: skip
    cell = {"draft_tokens": 4, "context": 1024, "batch_size": 1, "mode": "graph"}
    kernel = {"name": "void gemm<float, 3>(int)", "part": "verify", "us": 812.5, "launches": 61.0}
    engine = {"complete": True, "device": "NVIDIA H200", "copy_gb_per_s": 4100.0, "start_s": 61.0, "no_document": ""}
    analysis = {
        "unit": "milliseconds", "rows": rows, "kernels": [{**cell, **kernel}], "engines": {"tokens-4": engine}
    }  # fmt: skip
    return ab(kind="verify-step", name="grid", headline="At batch 1 ...", turns=[], workload=None, analysis=analysis)


def ab(**changed: Any) -> Result:
    """Four rounds of A and B, where B has one patch more and is slower."""
    documents = {"a": document(), "b": document(id="ba9876543210", patches=[patch("one"), patch("two")])}
    turns = [
        Turn(
            index=index, block=index // 2, arm=arm, ready_s=30, output_sha256="ab" * 32, document=documents[arm],
            figures={"tokens_per_s": 90.0 + index if arm == "a" else 80.0 + index, "verify_ms": 29.0},
            log=f"logs/{index}.log",
        )
        for index, arm in enumerate("abbaabba")
    ]  # fmt: skip
    fields: dict[str, Any] = {
        "kind": "ab",
        "name": "one-against-two",
        "headline": "b is SLOWER than a: 0.9 of the tokens/s (0.88 to 0.92)",
        "command": ["sglang-patches", "bench", "ab", "--a", "default", "--b", "+two", "--out", "with space"],
        "when": "2026-11-30T00:00:00+00:00",
        "arms": [Arm(name="a", spec="default"), Arm(name="b", spec="+two", patches="+two", arguments=["--x", "1 2"])],
        "workload": Workload(
            name="tiny", prompts_sha256="cd" * 32, prompts=8, prompt_tokens=64, output_tokens=32, concurrency=1,
            warm_up=2,
        ),
        "turns": turns,
        "analysis": compared(
            tokens_per_s=comparison(), verify_ms=comparison("AMBIGUOUS", 1.0, low=0.0, high=None, comparisons=1)
        ),
        "document": document(server_args=None),
    }  # fmt: skip
    return Result(**{**fields, **changed})


def sample(arm: str = "a", **changed: Any) -> Sample:
    """One request of turn 0."""
    fields: dict[str, Any] = {
        "turn": 0, "arm": arm, "prompt": 0, "prompt_tokens": 64, "output_tokens": 32, "sent": 0.0, "latency": 1.0,
        "ttft": 0.1, "itl": [0.1, 0.2], "output_sha256": None,
    }  # fmt: skip
    return Sample(**{**fields, **changed})
