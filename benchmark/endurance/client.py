"""Sends the requests of a plan and judges each answer against the unspeculated one.

``completions`` and ``chat`` go through the real ``openai`` client, ``generate`` through httpx, and so do bodies that no
client would build.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any

import httpx
import openai

from benchmark.endurance.plan import Planned, Question, body_of

# A request that takes longer is lost. The longest here takes seconds on an idle machine.
TIMEOUT_S = 240.0
_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "generate": "/generate"}
# A slow reader waits so long before it reads at all and between two reads, through a buffer of so many bytes.
_SLOW_BEGIN_S, _SLOW_EACH_S, _SLOW_BUFFER = 1.0, 0.02, 4096
# Statuses that refuse a bad request for what it is: not 408, 429 or 499, say.
_REFUSED = (400, 404, 413, 422)
# What reading an answer of another form than the API's raises.
_ODD_ANSWER = (ValueError, LookupError, TypeError, AttributeError)
#: Outcomes that are as they must be.
GOOD = {"equal", "refused", "cancelled"}


class _Status(Exception):
    """``/generate`` answered with another status than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"status {status}")
        self.status, self.text = status, text


class Client:
    """Connections to one server."""

    def __init__(self, url: str, model: str, references: Mapping[str, str] | None = None) -> None:
        self.url, self.model = url, model
        self.references = dict(references or {})
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=4)
        # A fresh connection is what most clients have, and a kept one what some have.
        self._http = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False, limits=limits)
        options = [(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_BUFFER)]
        narrow = httpx.AsyncHTTPTransport(socket_options=options)
        self._slow = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False, transport=narrow)
        self._openai = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S,
            http_client=httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, limits=limits),
        )  # fmt: skip

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()
        await self._slow.aclose()
        await self._openai.close()

    async def reference(self, question: Question) -> str:
        """The server's greedy answer to a question, asked plainly. Raises what the client raises."""
        one = Planned(-1, "whole", "chat" if question.chat else "completions", False, question)
        return await self._whole(one, body_of(one, self.model))

    async def send(self, one: Planned, begun: float) -> dict[str, Any]:
        """Send a request and judge what comes: its row for the result.

        ``outcome`` is ``equal``, ``refused`` (a bad one, with a 4xx), ``cancelled`` (what came before was right), or
        what is wrong: ``wrong`` (another text), ``accepted`` (a bad one), ``status`` (not the right one), ``lost`` (no
        whole answer came).
        """
        wanted = self.references[one.question.key]
        stop = _stop_string(wanted, one.where) if one.kind == "stop" else ""
        if stop:
            wanted = wanted[: wanted.index(stop)]
        started = time.monotonic()
        seen: dict[str, Any] = {"text": "", "chunks": 0}

        def arrived(text: str) -> None:
            seen["first"] = seen.get("first", time.monotonic() - started)
            seen["chunks"] += 1
            seen["text"] += text

        row: dict[str, Any] = {**one.told(), "sent": round(started - begun, 3)}
        row |= {"stop": stop} if one.kind == "stop" else {}
        try:
            row |= await asyncio.wait_for(self._judge(one, stop, wanted, seen, arrived), TIMEOUT_S)
        except openai.APIStatusError as error:
            row |= _refusal(one, error.status_code, error.response.text)
        except _Status as error:
            row |= _refusal(one, error.status, error.text)
        except (TimeoutError, httpx.HTTPError, httpx.StreamError, openai.APIError, *_ODD_ANSWER) as error:
            row |= {"outcome": "lost", "error": f"{type(error).__name__}: {error}"[:400]}
        row["latency"] = round(time.monotonic() - started, 3)
        if "first" in seen:
            row |= {"ttft": round(seen["first"], 3), "chunks": seen["chunks"]}
        return row

    async def _judge(
        self, one: Planned, stop: str, wanted: str, seen: dict[str, Any], arrived: Callable[[str], None]
    ) -> dict[str, Any]:
        body = body_of(one, self.model, stop)
        if one.kind == "bad":
            return await self._bad(one, body)
        if one.stream:
            async with contextlib.aclosing(self._stream(one, body)) as stream:
                async for text in stream:
                    arrived(text)
                    if one.kind == "cancel" and seen["chunks"] > one.after:
                        return _compared("cancelled", seen["text"], wanted[: len(seen["text"])])
            return _compared("equal", seen["text"], wanted)
        answer = asyncio.create_task(self._whole(one, body))
        try:
            done, _ = await asyncio.wait([answer], timeout=one.after if one.kind == "cancel" else None)
            return _compared("equal", answer.result(), wanted) if done else {"outcome": "cancelled"}
        finally:
            answer.cancel()  # hangs up
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await answer

    async def _bad(self, one: Planned, body: Any) -> dict[str, Any]:
        if isinstance(body, dict) and one.endpoint != "generate" and "model" in body and not body["stream"]:
            await self._whole(one, body)  # raises what `send` judges
            return {"outcome": "accepted"}
        content = body if isinstance(body, str) else json.dumps(body)
        headers = {"Content-Type": "application/json"}
        response = await self._http.post(_PATHS[one.endpoint], content=content, headers=headers)
        return _refusal(one, response.status_code, response.text)

    async def _whole(self, one: Planned, body: dict[str, Any]) -> str:
        """The text of an answer in one piece."""
        if one.endpoint == "generate":
            response = await self._http.post("/generate", json=body)
            if response.status_code != 200:
                raise _Status(response.status_code, response.text)
            return str(response.json()["text"])
        known, extra = _split(body)
        if one.endpoint == "chat":
            chat = await self._openai.chat.completions.create(**known, extra_body=extra)
            return chat.choices[0].message.content or ""
        completion = await self._openai.completions.create(**known, extra_body=extra)
        return str(completion.choices[0].text)

    async def _stream(self, one: Planned, body: dict[str, Any]) -> AsyncGenerator[str, None]:
        """The pieces of a streamed answer; ValueError if it does not end as a stream must."""
        if one.endpoint == "generate":
            async for text in self._generate_stream(one, body):
                yield text
            return
        known, extra = _split(body)
        resource: Any = self._openai.chat.completions if one.endpoint == "chat" else self._openai.completions
        reason = None
        async with await resource.create(**known, extra_body=extra) as stream:
            async for chunk in stream:
                for choice in chunk.choices:
                    reason = choice.finish_reason or reason
                    text = choice.delta.content if one.endpoint == "chat" else choice.text
                    yield text or ""
        if reason not in ("stop", "length"):
            raise ValueError(f"the stream ended with finish_reason {reason}")

    async def _generate_stream(self, one: Planned, body: dict[str, Any]) -> AsyncGenerator[str, None]:
        slow, before, last = one.kind == "slow", "", ""
        client = self._slow if slow else self._http
        async with client.stream("POST", "/generate", json=body) as response:
            if response.status_code != 200:
                raise _Status(response.status_code, (await response.aread()).decode("utf-8", "replace"))
            if slow:
                await asyncio.sleep(_SLOW_BEGIN_S)
            async for line in response.aiter_lines():
                if line:
                    last = line.removeprefix("data: ")
                if line.startswith("data: {"):
                    text = json.loads(last)["text"]
                    if not text.startswith(before):
                        raise ValueError(f"the text so far became another: {before!r}, then {text!r}")
                    yield text[len(before) :]
                    before = text
                if slow:
                    await asyncio.sleep(_SLOW_EACH_S)
        if last != "[DONE]":
            raise ValueError(f"the stream ended with {last[:80]!r}")


def _split(body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What openai's client names itself, and what it must be given as extra."""
    extra: dict[str, Any] = {name: body[name] for name in ("stop_token_ids", "min_tokens") if name in body}
    return {name: value for name, value in body.items() if name not in extra}, extra


def _stop_string(answer: str, where: float) -> str:
    """Three characters of an answer; the answer must be cut at their first occurrence, which may be earlier."""
    at = int(len(answer) * where)
    return answer[at : at + 3]


def _compared(outcome: str, text: str, wanted: str) -> dict[str, Any]:
    if text == wanted:
        return {"outcome": outcome, "characters": len(text)}
    return {"outcome": "wrong", "error": f"{text!r}, wanted {wanted!r}"[:800]}


def _refusal(one: Planned, status: int, text: str) -> dict[str, Any]:
    if one.kind == "bad" and status == 200:
        return {"outcome": "accepted", "status": status, "error": text[:300]}
    if one.kind == "bad" and status in _REFUSED:
        return {"outcome": "refused", "status": status}
    return {"outcome": "status", "status": status, "error": text[:300]}


async def references(
    client: Client, questions: Iterable[Question], concurrency: int, said: Callable[[int], None]
) -> None:
    """Fill `client.references` with the answers that it lacks."""
    missing = [question for question in questions if question.key not in client.references]
    gate, done = asyncio.Semaphore(concurrency), 0

    async def one(question: Question) -> None:
        nonlocal done
        async with gate:
            client.references[question.key] = await client.reference(question)
        done += 1
        said(len(missing) - done)

    await asyncio.gather(*map(one, missing))


async def load(
    client: Client, planned: Iterable[Planned], concurrency: int, kept: Callable[[dict[str, Any]], None]
) -> None:
    """Send all, `concurrency` at a time; `kept` is given each row as it is done."""
    waiting, begun = iter(planned), time.monotonic()

    async def worker() -> None:
        for one in waiting:
            kept(await client.send(one, begun))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
