"""Sends a workload with upstream's load generator, and keeps of every request what the server told of it.

`sglang.benchmark.serving.benchmark` schedules and sends. Its own request function does the HTTP; it is wrapped only to
know which request it serves, and its session hands out responses that note when which line arrived. So samples come
from the stream itself: also where the server has no tokenizer, and without text upstream sees no token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from sglang_patches.bench.model import Sample
from sglang_patches.bench.workload import Prompts
from sglang_patches.errors import PatchError

_BACKEND = "sglang-patches"
_READ_BUFFER = 10 << 20  # bytes: a line holds all tokens of an answer so far


@dataclass
class _Seen:
    """What one request's response showed; times on the clock of `time.perf_counter`."""

    prompt: int
    started: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    ids: list[int] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    first_tokens: int = 0
    first_passes: int = 0
    error: str = ""
    ended: bool = False

    def line(self, line: bytes) -> None:
        """Take one line of the stream at the time it arrived."""
        now = time.perf_counter()
        text = line.strip().removeprefix(b"data:").strip()
        if not text or text == b"[DONE]":
            return
        data = json.loads(text)
        if "error" in data:
            self.error = str(data["error"])[:500]
            return
        self.meta = data.get("meta_info") or {}
        tokens, ids = self.meta.get("completion_tokens", 0), data.get("output_ids") or []
        # A server may send all ids so far with each line, or only the new ones.
        self.ids = ids if len(ids) == tokens else [*self.ids, *ids]
        if tokens > self.tokens:
            if not self.arrivals:
                self.first_tokens, self.first_passes = tokens, self.meta.get("spec_verify_ct") or 0
            self.tokens = tokens
            self.arrivals.append(now)


_current: ContextVar[_Seen | None] = ContextVar("_current", default=None)


class _Lines:
    """A response's stream that shows each line to `_Seen` before handing it on."""

    def __init__(self, stream: aiohttp.StreamReader, seen: _Seen) -> None:
        self._stream, self._seen = stream, seen

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for line in self._stream:
            self._seen.line(line)
            yield line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Response(aiohttp.ClientResponse):
    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        await super().start(connection)
        seen = _current.get()
        if seen is not None and self.status == 200:
            self.content = _Lines(self.content, seen)  # type: ignore[assignment]
        return self


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None), read_bufsize=_READ_BUFFER, response_class=_Response
    )


class _NoTokenizer:
    """Upstream counts the tokens of texts once more; we have the ids."""

    def encode(self, text: str, **_options: Any) -> list[int]:
        return []


@contextlib.contextmanager
def _wrapped(seen: list[_Seen], said: Callable[[int], None]) -> Iterator[Any]:
    """Upstream's module with our backend in it, whose requests fill `seen`; afterwards it is as before."""
    from sglang.benchmark import serving

    async def request(request_func_input: Any, pbar: Any = None) -> Any:
        mine = _Seen(int(request_func_input.extra_request_body["rid"].rpartition("-")[2]), time.perf_counter())
        seen.append(mine)
        _current.set(mine)  # of this request's task only
        output = await serving.async_request_sglang_generate(request_func_input, pbar)
        if not output.success:
            mine.error = mine.error or output.error.strip()[-500:] or "failed without a reason"
        elif not mine.error and mine.tokens != request_func_input.output_len:
            mine.error = f"{mine.tokens} tokens came, {request_func_input.output_len} were asked for"
        elif not mine.error and mine.meta.get("prompt_tokens") != request_func_input.prompt_len:
            told = mine.meta.get("prompt_tokens")
            mine.error = f"the server read {told} prompt tokens, {request_func_input.prompt_len} were sent"
        mine.ended = True
        said(sum(one.ended for one in seen))
        return output

    session = serving._create_bench_client_session
    serving._create_bench_client_session = _session
    serving.ASYNC_REQUEST_FUNCS[_BACKEND] = request
    try:
        yield serving
    finally:
        serving._create_bench_client_session = session
        del serving.ASYNC_REQUEST_FUNCS[_BACKEND]


@contextlib.contextmanager
def _no_proxy() -> Iterator[None]:
    """Upstream flushes the cache with `requests`, which asks a proxy that the shell names also for this machine."""
    names = {"no_proxy", "NO_PROXY"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "*"))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def prepare() -> None:
    """Import upstream's load generator, which takes about ten seconds the first time."""
    # Which patches this process has, and which kernels it lacks, is not what it measures.
    logger = logging.getLogger("sglang_patches")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import sglang.benchmark.serving  # noqa: F401
    finally:
        logger.setLevel(level)


def send(
    url: str,
    model: str,
    prompts: Prompts,
    output_tokens: int,
    concurrency: int,
    *,
    turn: int,
    arm: str,
    report: Path,
    timeout: float,
    label: str = "prompt",
    said: Callable[[int], None] = lambda done: None,
) -> list[Sample]:
    """Ask the server every prompt once, greedily, for exactly `output_tokens` tokens, from an empty prefix cache.

    Args:
        url: of the server, without a path.
        model: the name it serves.
        concurrency: requests in flight at most.
        turn, arm: for the samples.
        report: upstream's own summary is appended to this file.
        timeout: seconds for all of it.
        label: begins the request ids, which the server logs.
        said: called with the number of requests that ended.

    Returns: a sample a prompt, in order of prompts; one that failed has its `error`.

    Raises:
        PatchError: it took longer than `timeout`, or no request could be made at all.
    """
    seen: list[_Seen] = []
    screen = sys.stdout

    def tell(done: int) -> None:
        with contextlib.redirect_stdout(screen):
            said(done)

    # `prompt` of upstream's rows may be ids; it tells apart turns of a chat by what the first element is.
    from sglang.benchmark.datasets import DatasetRow

    rows = [
        DatasetRow(list(ids), len(ids), output_tokens, extra_request_body={"rid": f"{label}-{turn}-{index}"})
        for index, ids in enumerate(prompts.ids)
    ]
    failure = ""
    with (
        warnings.catch_warnings(),
        report.open("a", encoding="utf-8") as file,
        contextlib.redirect_stdout(file),
        _wrapped(seen, tell) as serving,
        _no_proxy(),
    ):
        warnings.simplefilter("ignore")  # upstream's means of no requests, where all failed
        serving.set_global_args(_arguments())
        work = serving.benchmark(
            backend=_BACKEND, api_url=f"{url}/generate", base_url=url, model_id=model, tokenizer=_NoTokenizer(),
            input_requests=rows, request_rate=float("inf"), max_concurrency=concurrency, disable_tqdm=True,
            lora_names=[], lora_request_distribution=None, lora_zipf_alpha=None, extra_request_body={}, profile=False,
            flush_cache=True, warmup_requests=0,
        )  # fmt: skip
        try:
            asyncio.run(asyncio.wait_for(work, timeout))
        except TimeoutError:
            raise PatchError(
                f"{url}: {len(prompts.ids)} requests took longer than {timeout:.0f} s\n"
                f"  remedy     see the server's log for what it waits for; --turn-timeout gives it longer"
            ) from None
        except Exception as error:  # upstream's summary does not survive every failure, and the samples tell them all
            failure = f"{type(error).__name__}: {error}"
            traceback.print_exc(file=file)
    if len(seen) < len(rows):
        raise PatchError(
            f"{url}: the load generator made {len(seen)} of {len(rows)} requests: {failure or 'and told no reason'}\n"
            f"  remedy     see {report}"
        )
    begin = min(one.started for one in seen)
    ordered = sorted(seen, key=lambda one: one.prompt)
    return [_sample(one, begin, prompts.tokens, turn, arm) for one in ordered]


def _sample(seen: _Seen, begin: float, prompt_tokens: int, turn: int, arm: str) -> Sample:
    times = [arrival - seen.started for arrival in seen.arrivals]
    whole = len(seen.ids) == seen.tokens > 0
    return Sample(
        turn=turn,
        arm=arm,
        prompt=seen.prompt,
        prompt_tokens=seen.meta.get("prompt_tokens", prompt_tokens),
        output_tokens=seen.tokens,
        sent=seen.started - begin,
        latency=times[-1] if times else 0.0,
        ttft=times[0] if times else 0.0,
        itl=[after - before for before, after in itertools.pairwise(times)],
        verify_passes=seen.meta.get("spec_verify_ct"),
        first_tokens=seen.first_tokens or 1,
        first_passes=seen.first_passes,
        output_sha256=hash_ids(seen.ids) if whole else None,
        error=seen.error,
    )


def hash_ids(ids: Sequence[int]) -> str:
    """sha256 of token ids as comma-joined decimals, as `Sample.output_sha256` has it."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()


def _arguments() -> argparse.Namespace:
    """What upstream's functions read from its command line, at the values that change nothing."""
    return argparse.Namespace(
        backend=_BACKEND, dataset_name="custom", temperature=0.0, top_p=1.0, disable_ignore_eos=False,
        disable_stream=False, return_logprob=False, top_logprobs_num=0, token_ids_logprob=None, logprob_start_len=-1,
        return_routed_experts=False, cache_report=False, header=None, warmup_requests=0, plot_throughput=False,
        goodput=None, tag=None, output_file=os.devnull, output_details=False, sharegpt_output_len=None,
        random_input_len=None, random_output_len=None, random_range_ratio=None,
    )  # fmt: skip
