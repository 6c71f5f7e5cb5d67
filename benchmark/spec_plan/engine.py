"""One engine, to run in a process of its own: greedy answers, then batches of every size, timed from outside."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from sglang_patches.bench import shard
from sglang_patches.bench.verify_step import arguments, grid

#: Upstream's default commits one token id for all, so that requests would read the same experts.
TOKEN_MODE = "real-draft-token"
_DRAFT_TOKENS = 4
_ANSWER_TOKENS = 64
_BEST = 5


@dataclass(frozen=True)
class Arm:
    """How an engine serves."""

    speculates: bool
    planned: bool = False
    upstream: bool = False  # no patch is on


#: Without speculation; a chain of 3 steps; a chain as long as the plan says for the batch; the first two of upstream.
ARMS = {
    "none": Arm(speculates=False),
    "fixed": Arm(speculates=True),
    "plan": Arm(speculates=True, planned=True),
    "upstream-none": Arm(speculates=False, upstream=True),
    "upstream-fixed": Arm(speculates=True, upstream=True),
}
#: What the answers of others are compared to, and their speeds where nothing else is said.
BASELINE = "none"
#: What rates are of. A prefill of one token a request runs eager, and takes as long as the host happens to take.
AFTER_FIRST = "what follows the first token"
WHOLE = "whole answers"


def split(name: str) -> tuple[Arm, str | None]:
    """How an arm serves, and its SGLANG_PATCHES; None where it has the caller's.

    ``fixed:-clean-stop:-provenance`` is the arm fixed without these two patches.

    Raises ValueError for a name that is no arm, and for changes to the patches of an arm that has none.
    """
    base, _, changes = name.partition(":")
    if base not in ARMS or (changes and ARMS[base].upstream):
        raise ValueError(
            f"{name!r}: not one of {', '.join(ARMS)}; ours also with patches changed, as fixed:-NAME:-NAME"
        )
    if ARMS[base].upstream:
        return ARMS[base], "none"
    return ARMS[base], changes.replace(":", ",") or None


def order(names: Iterable[str]) -> list[str]:
    """Arms among `names`, each once: in the order of `ARMS`, with patches changed after the arm that they change."""
    known = list(ARMS)
    found = dict.fromkeys(name for name in names if name.partition(":")[0] in ARMS and "_over_" not in name)
    return sorted(found, key=lambda name: known.index(name.partition(":")[0]))


def decoding(size: int, seconds: float, first: float) -> float:
    """Seconds in which a batch of answers got all tokens but the first of each.

    Args:
        size: of the batch.
        seconds: that the answers took.
        first: that answers of one token to the same prompts took, right before.

    Raises ValueError where that is nothing or less: the prefill differed by more than the decoding took.
    """
    if seconds <= first:
        raise ValueError(
            f"batch size {size}: the answers took {seconds} s and those of one token {first} s, which leaves no time "
            "to decode in; ask for more --tokens, or on a quieter host"
        )
    return seconds - first


class Turns:
    """When an engine may compute: always; or, where several share a GPU, once for every line on standard input.

    Args:
        reply: file descriptor that a byte is written to when it is ready and after every turn; None: always.
    """

    def __init__(self, reply: int | None) -> None:
        self._reply = reply

    def wait(self) -> None:
        """Until it may. Raises EOFError where the one who gives turns is gone."""
        if self._reply is not None and not sys.stdin.readline():
            raise EOFError("no more turns come on standard input")

    def done(self) -> None:
        """It is another's turn."""
        if self._reply is not None:
            os.write(self._reply, b".")


class Work(BaseModel):
    """What is served and asked."""

    model_config = ConfigDict(extra="forbid")

    layers: int
    weights: str
    model: Path | None
    draft: Path | None
    batch_sizes: list[int]
    context: int
    tokens: int
    repeats: int
    accept_lengths: list[float]
    answers: int
    plan: Path | None
    together: bool = False

    def chosen(self, folder: Path, cuda: bool, extra: list[str]) -> arguments.Chosen:
        """What is served: the pair named, or a share of Kimi-K2.5 that is written to `folder`."""
        asked = grid.Grid(
            batch_sizes=self.batch_sizes, contexts=[self.context], modes=["graph"], rounds=1,
            tokens=max(self.tokens, _ANSWER_TOKENS),
        )  # fmt: skip
        if self.model and self.draft:
            target, draft = self.model, self.draft
        else:
            target, draft = shard.write(folder, self.layers, self.weights)
        if self.together:
            # Idle schedulers would keep cores busy that the one whose turn it is shares with them.
            extra = [*extra, "--sleep-on-idle"]
        if self.together and cuda:
            # Upstream wants the rest of the whole GPU to be free, which others take; the KV pool has its own limit.
            extra = [*extra, "--mem-fraction-static", "0.97"]
        return arguments.Chosen(target, draft, dummy=not self.model, cuda=cuda, grid=asked, extra=extra)


class Served:
    """The engine of an arm."""

    def __init__(self, arm: str, work: Work, folder: Path, cuda: bool) -> None:
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.server_args import prepare_server_args

        from sglang_patches.bench.verify_step import probe

        how, _ = split(arm)

        class Probed(Engine):
            run_scheduler_process_func = staticmethod(probe.run_speculative if how.speculates else probe.run_plain)

        planned = ["--speculative-adaptive", "--speculative-adaptive-config", str(work.plan)]
        self.chosen = work.chosen(folder, cuda, planned if how.planned else [])
        self.steps = _DRAFT_TOKENS if how.speculates else 0
        generator = np.random.default_rng(0)
        requests = max(*work.batch_sizes, work.answers)
        # The first ids are special tokens.
        self.prompts = generator.integers(8, self.chosen.vocabulary(), (requests, work.context)).tolist()
        self.engine = Probed(server_args=prepare_server_args(self.chosen.arguments(self.steps)))
        self._answer = folder / "answer.json"

    def ask(self, do: str, **named: Any) -> Any:
        """Call the probe in the scheduler; returns its answer."""
        self.engine.collective_rpc("verify_step", do=do, out=str(self._answer), **named)
        return json.loads(self._answer.read_text())

    def answer(self, prompt: list[int]) -> dict[str, Any]:
        """One greedy answer: its ``tokens``, and by position the ``logprob`` of each (nats) and of the five best
        tokens (``best``, pairs of token and nats).
        """
        params = {"temperature": 0, "max_new_tokens": _ANSWER_TOKENS, "ignore_eos": True}
        got = self.engine.generate(
            input_ids=prompt, sampling_params=params, return_logprob=True, top_logprobs_num=_BEST
        )
        told = got["meta_info"]
        tokens = [token for _, token, _ in told["output_token_logprobs"]]
        if len(tokens) != _ANSWER_TOKENS:
            raise ValueError(f"{_ANSWER_TOKENS} tokens were asked for, {len(tokens)} came")
        return {
            "tokens": tokens,
            "logprob": [nats for nats, _, _ in told["output_token_logprobs"]],
            "best": [[(token, nats) for nats, token, _ in best] for best in told["output_top_logprobs"]],
        }

    def generate(self, size: int, tokens: int) -> tuple[float, int]:
        """Seconds of a batch of greedy answers, and target passes of its first request."""
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        begun = time.perf_counter()
        answers = self.engine.generate(input_ids=self.prompts[:size], sampling_params=params)
        seconds = time.perf_counter() - begun
        told = answers[0]["meta_info"]
        if told["completion_tokens"] != tokens:
            raise ValueError(f"{tokens} tokens were asked for, {told['completion_tokens']} came")
        return seconds, int(told.get("spec_verify_ct") or tokens)


def measure(arm: str, work: Work, out: Path, cuda: bool, turns: Turns) -> None:
    """Serve as `arm` says and write what was measured; begins when a line comes on standard input.

    Upstream is imported before that, while another engine still starts. Answers come first, each prompt alone, so that
    all arms prefill in the same shapes. Then prompts are prefilled once and stay in the radix cache: a timed answer
    computes one prompt token a request. An answer of one token does so right before it. A turn is a batch size's
    warm-up or one repeat of it, both answers at every accept length.

    Written: ``answers`` (see `Served.answer`); ``batches`` (``batch_size``; ``accept_length``, the pinned one or None
    without speculation; by repeat ``first_seconds``, of the answers of one token, and of
    the long ones ``seconds`` and ``passes``, target passes of the first request); ``start_seconds``, ``values_drawn``,
    ``arguments``, ``outcomes`` and ``provenance``.
    """
    import sglang.srt.entrypoints.engine
    import sglang.srt.server_args  # noqa: F401

    from sglang_patches.nccl.provenance import whole

    if not sys.stdin.readline():
        return
    with tempfile.TemporaryDirectory() as scratch:
        begun = time.perf_counter()
        served = Served(arm, work, Path(scratch), cuda)
        started = time.perf_counter() - begun
        drawn = served.ask("draw_all") if served.chosen.dummy else 0
        answers = [served.answer(prompt) for prompt in served.prompts[: work.answers]]
        batches = _batches(served, work, split(arm)[0].speculates, turns)
        state = served.engine.get_server_info()["internal_states"][0].get("sglang_patches", {})
        served.engine.shutdown()
        told = {"arm": arm, "answers": answers, "batches": batches, "start_seconds": round(started, 1)}
        told |= {"values_drawn": drawn, "arguments": served.chosen.shown(served.steps)}
        told |= {"outcomes": state.get("outcomes", {}), "patches": os.environ.get("SGLANG_PATCHES", "")}
        out.write_text(json.dumps({**told, "provenance": whole()}))


def _batches(served: Served, work: Work, speculates: bool, turns: Turns) -> list[dict[str, Any]]:
    served.generate(max(work.batch_sizes), 1)
    turns.done()
    lengths: list[float | None] = [*work.accept_lengths] if speculates else [None]
    batches: dict[tuple[int, float | None], dict[str, Any]] = {}
    for size in work.batch_sizes:
        for repeat in range(work.repeats + 1):
            turns.wait()
            for length in lengths if repeat % 2 else lengths[::-1]:
                if length is not None:
                    served.ask("pin", accept_length=length, token_mode=TOKEN_MODE)
                # The same prefill, as near in time as can be: what it takes comes and goes with the host.
                first = round(served.generate(size, 1)[0], 5)
                # Warm-up is as long, so that nothing is compiled, captured or compared first in what counts.
                seconds, passes = served.generate(size, work.tokens)
                if repeat:
                    row = batches.setdefault((size, length), {"first_seconds": [], "seconds": [], "passes": []})
                    row["first_seconds"].append(first)
                    row["seconds"].append(round(seconds, 5))
                    row["passes"].append(passes)
                    decoding(size, row["seconds"][-1], first)  # now, and not when all has been measured
            turns.done()
    return [{"batch_size": size, "accept_length": length, **row} for (size, length), row in batches.items()]
