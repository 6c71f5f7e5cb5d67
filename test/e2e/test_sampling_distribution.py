"""What an EAGLE-3 server emits follows the target's distribution, computed by `transformers` from the same weights.

Many samples of a few tokens are drawn from one prompt, all settings at once, so that greedy and sampling requests share
verify batches. For every prefix seen often enough, the counts of the next token are compared with the exact
probabilities (G-test, rare tokens put together), and the statistics of all prefixes are added up. The same samples must
*reject* a slightly wrong reference, else the test could not fail.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import torch
from benchmark.tiny_kimi.reference import load_text_model
from scipy import stats

from .server import Server

PROMPT = "It is a truth universally acknowledged, that a single man in possession of a good"
LENGTH = 6
SAMPLES = 256
MIN_EXPECTED = 5.0
ACCEPT, REJECT = 1e-4, 1e-6


@dataclass(frozen=True)
class Setting:
    """Sampling parameters of one request, and parameters that its samples must be told from."""

    params: dict[str, Any]
    wrong: dict[str, Any]
    name: str = field(compare=False)


SETTINGS = [
    Setting({"temperature": 1.0}, {"temperature": 0.7}, "temperature 1"),
    Setting({"temperature": 0.7}, {"temperature": 1.0}, "temperature 0.7"),
    Setting({"temperature": 1.0, "top_k": 6}, {"temperature": 1.0, "top_k": 4}, "top-k"),
    Setting({"temperature": 1.0, "top_p": 0.7}, {"temperature": 1.0, "top_p": 0.85}, "top-p"),
    Setting({"temperature": 1.2, "min_p": 0.1}, {"temperature": 1.2, "min_p": 0.03}, "min-p"),
    Setting(
        {"temperature": 1.0, "frequency_penalty": 2.0, "presence_penalty": 2.0, "logit_bias": "common"},
        {"temperature": 1.0, "logit_bias": "common"},
        "additive penalties",
    ),
    Setting(
        {"temperature": 1.0, "repetition_penalty": 1.9, "logit_bias": "common"},
        {"temperature": 1.0, "logit_bias": "common"},
        "repetition penalty",
    ),
]


class Reference:
    """Next-token logits after the prompt and a prefix of output tokens; every prefix is computed once."""

    def __init__(self, server: Server) -> None:
        self.model = load_text_model(server.model_path)
        document = httpx.post(f"{server.url}/tokenize", json={"prompt": PROMPT}, timeout=60).json()
        self.prompt: list[int] = document["tokens"]
        self.vocab = self.model.config.vocab_size
        self.known: dict[tuple[int, ...], torch.Tensor] = {}
        self.compute({()})
        # Makes the likeliest tokens likelier still, so that outputs repeat and penalties have something to do.
        self.common = {str(t): 6.0 for t in self.known[()].topk(4).indices.tolist()}

    @torch.inference_mode()
    def compute(self, prefixes: set[tuple[int, ...]]) -> None:
        """Add the logits of these prefixes, float64 ``[vocab]`` each."""
        missing = sorted(prefixes - set(self.known), key=lambda p: (len(p), p))
        for start in range(0, len(missing), 64):
            chunk = [p for p in missing[start : start + 64] if len(p) == len(missing[start])]
            ids = torch.tensor([[*self.prompt, *p] for p in chunk])
            logits = self.model(input_ids=ids, logits_to_keep=1).logits[:, -1]
            self.known.update(zip(chunk, logits.double(), strict=True))
        if not prefixes <= set(self.known):
            self.compute(prefixes)

    def probs(self, prefix: tuple[int, ...], params: dict[str, Any]) -> torch.Tensor:
        """The distribution that the parameters ask for after a prefix, float64 ``[vocab]``."""
        logits = self.known[prefix].clone()
        counts = torch.bincount(torch.tensor(prefix, dtype=torch.long), minlength=self.vocab)
        logits -= params.get("frequency_penalty", 0.0) * counts + params.get("presence_penalty", 0.0) * (counts > 0)
        penalty = params.get("repetition_penalty", 1.0)
        logits = torch.where(counts > 0, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
        for token, bias in self.resolve(params).get("logit_bias", {}).items():
            logits[int(token)] += bias
        probs = torch.softmax(logits / params["temperature"], -1)
        ordered, ids = probs.sort(descending=True)
        keep = torch.arange(self.vocab) < params.get("top_k", self.vocab)
        keep &= ordered.cumsum(0) - ordered <= params.get("top_p", 2.0)
        keep &= ordered >= params.get("min_p", 0.0) * ordered[0]
        kept = torch.zeros_like(probs).scatter_(0, ids[keep], ordered[keep])
        return kept / kept.sum()

    def resolve(self, params: dict[str, Any]) -> dict[str, Any]:
        """The parameters as the server takes them."""
        return {**params, "logit_bias": self.common} if params.get("logit_bias") == "common" else params


def draw(url: str, params: dict[str, Any], samples: int) -> tuple[list[tuple[int, ...]], float]:
    """``samples`` outputs of `LENGTH` tokens, and the mean accept length of their verify cycles."""
    document = {
        "text": PROMPT,
        "sampling_params": {**params, "max_new_tokens": LENGTH, "ignore_eos": True, "n": samples},
    }
    answers = httpx.post(f"{url}/generate", json=document, timeout=600).raise_for_status().json()
    accepted = [answer["meta_info"].get("spec_accept_length", 1.0) for answer in answers]
    return [tuple(answer["output_ids"]) for answer in answers], sum(accepted) / len(accepted)


def p_value(outputs: list[tuple[int, ...]], probs: Callable[[tuple[int, ...]], torch.Tensor]) -> float:
    """G-test of the next tokens after every prefix against ``probs``, as one p-value.

    Tokens expected fewer than `MIN_EXPECTED` times after a prefix are one cell together; a prefix with fewer than two
    cells says nothing. A token of probability zero refutes the reference by itself.
    """
    after: dict[tuple[int, ...], Counter[int]] = {}
    for output in outputs:
        for at in range(len(output)):
            after.setdefault(output[:at], Counter())[output[at]] += 1
    statistic, freedom = 0.0, 0
    for prefix, counts in after.items():
        total = counts.total()
        if total < 2 * MIN_EXPECTED:
            continue
        expected = probs(prefix) * total
        if any(expected[token] == 0 for token in counts):
            return 0.0
        cells = (expected >= MIN_EXPECTED).nonzero().view(-1).tolist()
        observed = [counts[cell] for cell in cells]
        wanted = expected[cells].tolist()
        rest = total - sum(wanted)
        if rest >= MIN_EXPECTED or not cells:
            observed.append(total - sum(observed))
            wanted.append(rest)
        else:  # too few for a cell of their own: with the least of the others
            observed[-1] += total - sum(observed)
            wanted[-1] += rest
        if len(cells) < 2:
            continue
        statistic += 2 * sum(o * math.log(o / w) for o, w in zip(observed, wanted, strict=True) if o)
        freedom += len(observed) - 1
    assert freedom > 0, "no prefix was seen often enough to say anything: draw more samples"
    return float(stats.chi2.sf(statistic, freedom))


def check(server: Server, samples: int = SAMPLES) -> list[str]:
    """Draw from every setting at once and compare; returns a line a setting, AssertionError with them on failure."""
    reference = Reference(server)
    params = [reference.resolve(setting.params) for setting in SETTINGS]
    with ThreadPoolExecutor(len(params) + 1) as pool:
        greedy = pool.submit(draw, server.url, {"temperature": 0.0}, 8)
        drawn = list(pool.map(lambda p: draw(server.url, p, samples), params))
    best: tuple[int, ...] = ()
    for _ in range(LENGTH):
        reference.compute({best})
        best = (*best, int(reference.known[best].argmax()))
    assert set(greedy.result()[0]) == {best}, "a greedy request in a batch with sampling ones is not greedy"
    report = []
    for setting, (outputs, accepted) in zip(SETTINGS, drawn, strict=True):
        seen = Counter(output[:at] for output in outputs for at in range(LENGTH))
        reference.compute({prefix for prefix, n in seen.items() if n >= 2 * MIN_EXPECTED})
        right = p_value(outputs, lambda prefix, s=setting: reference.probs(prefix, s.params))  # type: ignore[misc]
        wrong = p_value(outputs, lambda prefix, s=setting: reference.probs(prefix, s.wrong))  # type: ignore[misc]
        line = f"{setting.name}: p = {right:.3g}, wrong reference p = {wrong:.3g}, accept length {accepted:.2f}"
        verdict = "" if right > ACCEPT else " <- does not follow the target's distribution"
        verdict += "" if wrong < REJECT else " <- cannot tell right from wrong"
        report.append(line + verdict)
    assert not any("<-" in line for line in report), "\n".join(report)
    return report


@pytest.mark.parametrize("fixture", ["spec_server", "tree_server"])
def test_samples_follow_the_targets_distribution(
    fixture: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    report = check(request.getfixturevalue(fixture))
    with capsys.disabled():
        print("", *report, sep="\n  ")
