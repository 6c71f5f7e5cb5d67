"""What a load run sends: a fixed list of requests drawn from a seed, and what each must lead to."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmark.endurance.servers import REPO

#: Share of each kind. ``slow`` reads its stream late and bit by bit, ``cancel`` hangs up.
KINDS = {"whole": 0.48, "stop": 0.14, "cancel": 0.16, "slow": 0.07, "bad": 0.15}
ENDPOINTS = ("completions", "chat", "generate")
#: Sampling parameters, prompts and bodies that a server must refuse with a 4xx: (endpoint, fields put into a request).
BAD: dict[str, tuple[str, Any]] = {
    "unknown model": ("completions", {"model": "gpt-4o"}),
    "unknown model in chat": ("chat", {"model": "gpt-4o"}),
    "token id beyond the vocabulary": ("completions", {"prompt": [10**6]}),
    "token id beyond the vocabulary, streaming": ("generate", {"input_ids": [10**6], "text": None, "stream": True}),
    "negative max_tokens": ("chat", {"max_tokens": -1}),
    "no messages": ("chat", {"messages": []}),
    "prompt too long": ("completions", {"prompt": "word " * 20_000}),
    "temperature of a wrong type": ("completions", {"temperature": "hot"}),
    "stop token beyond the vocabulary": ("completions", {"stop_token_ids": [10**6], "min_tokens": 3}),
    "n of 0": ("completions", {"n": 0}),
    "infinite logit_bias": ("generate", {"sampling_params": {"logit_bias": {"5": 1e308}}}),
    "top_k beyond int32": ("generate", {"sampling_params": {"top_k": 2**40}}),
    "broken grammar, streaming": ("chat", {"stream": True, "response_format": {
        "type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}}),
    "malformed JSON": ("generate", "{"),
    "JSON of another type": ("completions", [1, 2]),
}  # fmt: skip


@dataclass(frozen=True)
class Question:
    """What a completed answer depends on: `text` as a prompt or as a chat's message, greedy, at most `tokens`."""

    chat: bool
    text: str
    tokens: int

    @property
    def key(self) -> str:
        """Name in the file of references."""
        return json.dumps([self.chat, self.text, self.tokens])


@dataclass(frozen=True)
class Planned:
    """One request of a run.

    `after`: a ``cancel`` hangs up after so many chunks where it streams, or so many seconds where it does not.
    `where`: for ``stop``, at which part of the unspeculated answer the stop string is taken, 0 to 1.
    """

    index: int
    kind: str
    endpoint: str
    stream: bool
    question: Question
    after: float = 0.0
    where: float = 0.0
    bad: str = ""
    body: Any = field(default=None, repr=False)

    def told(self) -> dict[str, Any]:
        """For a result file: without the prompt, which the questions of the file hold."""
        kept = {name: value for name, value in asdict(self).items() if name in ("after", "where", "bad") and value}
        always = {"index": self.index, "kind": self.kind, "endpoint": self.endpoint, "stream": self.stream}
        return {**always, "tokens": self.question.tokens, **kept}


def texts(count: int) -> list[str]:
    """The first so many held-out prompts of the bundled model, cut to different lengths."""
    lines = (REPO / "test/models/prompts.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line)["text"] for line in lines[:: max(1, len(lines) // count)]][:count]
    return [text[: 40 + 37 * at % len(text)] for at, text in enumerate(found)]


def questions(prompts: Sequence[str], lengths: Sequence[int]) -> list[Question]:
    """All that may be asked."""
    return [Question(chat, text, tokens) for chat in (False, True) for text in prompts for tokens in lengths]


def make(count: int, prompts: Sequence[str], lengths: Sequence[int], seed: int) -> list[Planned]:
    """`count` requests, the same ones for the same arguments, with every kind in its share (rounded, at least one)."""
    drawn = random.Random(seed)
    kinds = [kind for kind, share in KINDS.items() for _ in range(max(1, round(share * count)))]
    drawn.shuffle(kinds)
    kinds = (kinds + ["whole"] * count)[:count]
    planned, bad = [], list(BAD)
    for index, kind in enumerate(kinds):
        endpoint = drawn.choice(ENDPOINTS)
        stream = kind == "slow" or drawn.random() < 0.5
        # A request that is to be stopped or hung up on must last long enough for that.
        tokens = max(lengths) if kind in ("stop", "cancel", "slow") else drawn.choice(lengths)
        case, body = "", None
        if kind == "bad":
            case = bad[index % len(bad)]
            endpoint, body = BAD[case]
        if kind == "slow":
            endpoint = "generate"  # the only endpoint whose stream repeats all so far, and so fills buffers
        question = Question(endpoint == "chat", drawn.choice(list(prompts)), tokens)
        after = float(drawn.randint(0, 8)) if stream else drawn.uniform(0.05, 1.5)
        planned.append(
            Planned(
                index, kind, endpoint, stream, question, after=after if kind == "cancel" else 0.0,
                where=drawn.uniform(0.2, 0.9) if kind == "stop" else 0.0, bad=case, body=body,
            )
        )  # fmt: skip
    return planned


def body_of(one: Planned, model: str, stop: str = "") -> Any:
    """The JSON that is sent to the request's endpoint."""
    question = one.question
    if one.endpoint == "generate":
        sampling = {"temperature": 0, "max_new_tokens": question.tokens, **({"stop": stop} if stop else {})}
        body: dict[str, Any] = {"text": question.text, "sampling_params": sampling, "stream": one.stream}
        if one.kind == "slow":
            body |= {"return_logprob": True, "top_logprobs_num": 20}
    else:
        body = {"model": model, "temperature": 0, "max_tokens": question.tokens, "stream": one.stream}
        body |= {"stop": stop} if stop else {}
        prompt: Any = [{"role": "user", "content": question.text}] if question.chat else question.text
        body["messages" if question.chat else "prompt"] = prompt
    if isinstance(one.body, Mapping):
        return {**body, **one.body}
    return body if one.body is None else one.body
