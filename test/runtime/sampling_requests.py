"""Requests for tests of sampling, which tokens their filters leave, and whether counts follow probabilities."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from scipy import stats

OFF = 1 << 30  # upstream's top_k for "whole vocabulary"


def params(**given_params: Any) -> SimpleNamespace:
    defaults: dict[str, Any] = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "stop_token_ids": None,
        "sampling_seed": None,
    }
    return SimpleNamespace(**{**defaults, **given_params})


def request(output: Sequence[int] = (), **given_params: Any) -> SimpleNamespace:
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=0)
    return SimpleNamespace(
        sampling_params=params(**given_params), output_ids=array("q", output), eos_token_ids={0}, tokenizer=tokenizer
    )


def rejects(counts: Counter[Any], probs: dict[Any, float], level: float = 1e-4) -> bool:
    """Whether a G-test finds the counts unlike the probabilities; cells expected under 5 are put together."""
    total = sum(counts.values())
    assert set(counts) <= {k for k, p in probs.items() if p > 0}, "an outcome of probability zero was seen"
    big = [k for k, p in probs.items() if p * total >= 5]
    observed, expected = [float(counts[k]) for k in big], [probs[k] * total for k in big]
    if total - sum(expected) > 1e-6 * total:
        observed.append(total - sum(observed))
        expected.append(total - sum(expected))
    scale = total / sum(expected)
    return bool(
        stats.power_divergence(observed, [e * scale for e in expected], lambda_="log-likelihood").pvalue < level
    )


def filtered_reference(probs: list[float], top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """Token by token: its rank, the mass ahead of it and the largest probability decide whether it stays."""
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    kept, ahead = {}, 0.0
    for rank, token in enumerate(order):
        p = probs[token]
        if rank < top_k and (ahead <= top_p or top_p == 1.0) and p >= min_p * probs[order[0]]:
            kept[token] = p
        ahead += p
    return kept
