"""Exceptions that a client causes, and streams that break before their first word, as 4xx answers.

Upstream's convention is that ValueError means the client's mistake, and most of its endpoints answer one with a 400;
here that holds for every endpoint, and for the exceptions that JSON of the wrong type raises where only the request
is read.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import warnings
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang_patches.runtime import _outcome
from sglang_patches.runtime.strict_api import media
from sglang_patches.runtime.strict_api.models import ANTHROPIC_TYPES

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response
    from fastapi.responses import StreamingResponse

logger = logging.getLogger("sglang_patches")

# What reading JSON of an unexpected type raises in code that does not expect it.
WRONG_TYPE = (AttributeError, KeyError, TypeError, IndexError, OverflowError, RecursionError)
_NAME = re.compile(r"[A-Za-z_]\w*")
_MOST_ERRORS = 5
_LONGEST_INPUT = 40
# Statuses of the error types that Anthropic's API has, for errors in its streams, which name no status.
_STATUS = {error_type: status for status, error_type in ANTHROPIC_TYPES.items()}


def bad_value(validator: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a pydantic "before" validator: a value of a type it did not expect is the client's mistake, a 400.

    Such validators read the raw JSON, and pydantic takes only ValueError and AssertionError as a verdict on it.
    """

    @functools.wraps(validator)
    def checked(*args: Any, **named: Any) -> Any:
        try:
            return validator(*args, **named)
        except WRONG_TYPE as error:
            raise ValueError(f"the request, or a part of it, is of the wrong type: {error}") from error

    return checked


def template_errors(render: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the rendering of messages by the chat template: what it cannot render is the client's mistake, a 400.

    The traceback is logged, since a template or parser of the server may be at fault as well.
    """

    @functools.wraps(render)
    def checked(*args: Any, **named: Any) -> Any:
        try:
            return render(*args, **named)
        except WRONG_TYPE as error:
            logger.warning("sglang-patches: refused messages that could not be rendered", exc_info=True)
            first: BaseException = error
            while first.__context__ is not None:
                first = first.__context__
            raise ValueError(f"The chat template cannot render this request's messages and options: {first}") from error

    return checked


def profile_conflict(execute: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Decorate the start and stop of a profile: a 409 for a start while one runs and a stop while none does."""

    @functools.wraps(execute)
    async def checked(*args: Any, **named: Any) -> Any:
        try:
            return await execute(*args, **named)
        except RuntimeError as error:
            if "in progress" not in str(error):
                raise
            from fastapi import HTTPException

            raise HTTPException(HTTPStatus.CONFLICT, str(error)) from error

    return checked


def vertex_parameters(endpoint: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Decorate Vertex AI's endpoint, which makes keyword arguments of what a client sends: unknown ones are a 400."""

    @functools.wraps(endpoint)
    async def checked(*args: Any, **named: Any) -> Any:
        try:
            return await endpoint(*args, **named)
        except TypeError as error:
            told = str(error)
            if "GenerateReqInput" not in told:
                raise
            raise ValueError(f"parameters must be fields of /generate: {told.partition('() ')[2]}.") from error

    return checked


def add_handlers(app: FastAPI) -> None:
    """Answer a ValueError that an endpoint lets through with a 400, and record where media may come from."""
    app.add_exception_handler(ValueError, _on_value_error)  # type: ignore[arg-type]
    # Upstream's own answers are of this class; the warning names the caller of the code that makes one, here.
    warnings.filterwarnings("ignore", "ORJSONResponse is deprecated", module=r"sglang_patches\.runtime\.strict_api")
    folder = media.allowed_folder()
    if folder and not os.path.isdir(folder):
        detail = f"{media.ALLOWED_PATH} is {folder}, which is no folder: no local file is read as a medium"
        _outcome.record("strict-api", "failed", detail, allowed_media_path=folder)
        return
    where = f"those below {folder}" if folder else "none"
    _outcome.record("strict-api", "applied", f"local files read as media: {where}", allowed_media_path=folder)


async def _on_value_error(request: Request, error: ValueError) -> Response:
    from fastapi.responses import JSONResponse
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        # Requests were validated before; this one is an answer that upstream built wrongly.
        raise error
    path, told = request.url.path, str(error)
    logger.warning("sglang-patches: refused a request to %s: %s", path, told, exc_info=error)
    body: dict[str, Any] = {"error": {"message": told, "type": "invalid_request_error", "param": None, "code": 400}}
    if path.startswith("/v1/messages"):
        body = {"type": "error", "error": {"type": "invalid_request_error", "message": told}}
    elif path.startswith("/api/"):
        body = {"error": told}
    return JSONResponse(body, status_code=HTTPStatus.BAD_REQUEST)


def plain_validation_errors(handler: Callable[..., Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
    """Decorate the answer to a request of the wrong form: it names fields, not files of the server.

    FastAPI's text of such an error ends with the file and line of the endpoint, and holds the whole input.
    """

    @functools.wraps(handler)
    async def checked(request: Request, error: Any) -> Response:
        from fastapi.exceptions import RequestValidationError

        class Plain(RequestValidationError):
            def errors(self) -> Any:
                return _Told(error.errors())

            def __str__(self) -> str:
                return tell_fields(error.errors())

        return await handler(request, Plain(error.errors()))

    return checked


class _Told(list):  # type: ignore[type-arg]
    """Validation errors whose text is for a client."""

    def __str__(self) -> str:
        return tell_fields(self)


def tell_fields(errors: list[dict[str, Any]]) -> str:
    """Pydantic's errors as one sentence for a client: the field, what is wrong with it, and a short value as sent."""
    told: list[str] = []
    for error in errors:
        # Between the fields' names pydantic names its own machinery, such as "list[int]" or "function-after[...]".
        parts = [str(p) for p in error.get("loc", ()) if isinstance(p, int) or _NAME.fullmatch(str(p))]
        where = ".".join(parts[1:] if parts[:1] == ["body"] and len(parts) > 1 else parts)
        if error.get("type") == "json_invalid":
            where = f"character {parts[-1]}" if parts else ""
        what = str(error.get("msg", "")).removeprefix("Value error, ")
        detail = (error.get("ctx") or {}).get("error")
        if isinstance(detail, str):
            what += f" ({detail})"
        value = error.get("input")
        if error.get("type") not in ("missing", "json_invalid") and (
            value is None or isinstance(value, (str, float, int))
        ):
            what += f", got {_short(value)}"
        sentence = f"{where}: {what}" if where else what
        if sentence not in told:
            told.append(sentence)
    more = len(told) - _MOST_ERRORS
    return "; ".join(told[:_MOST_ERRORS]) + (f"; and {more} more" if more > 0 else "") or "Invalid request"


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_INPUT else f"{text[:_LONGEST_INPUT]}..."


def refuse_before_streaming(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Decorate an endpoint that may stream: an error before the first word has its own status, not 200.

    Waits for the first chunk, as upstream's OpenAI endpoints do, and for one more where the first is Anthropic's
    ``message_start``, which comes before errors too.
    """

    @functools.wraps(handler)
    async def checked(*args: Any, **named: Any) -> Any:
        from fastapi.responses import StreamingResponse

        response = await handler(*args, **named)
        return await _look_ahead(response) if isinstance(response, StreamingResponse) else response

    return checked


async def _look_ahead(response: StreamingResponse) -> Response:
    from fastapi.responses import JSONResponse

    chunks = aiter(response.body_iterator)
    held: list[Any] = []
    async for chunk in chunks:
        held.append(chunk)
        text = chunk if isinstance(chunk, str) else bytes(chunk).decode("utf-8", "replace")
        refused = _streamed_error(text)
        if refused is not None:
            await chunks.aclose()  # type: ignore[attr-defined]
            return JSONResponse(refused[1], status_code=refused[0])
        if "message_start" not in text or len(held) > 1:
            break

    async def replayed() -> Any:
        for chunk in held:
            yield chunk
        async for chunk in chunks:
            yield chunk

    response.body_iterator = replayed()
    return response


def _streamed_error(chunk: str) -> tuple[int, dict[str, Any]] | None:
    """Status and body of an error that is the first of a stream; None when ``chunk`` is no error."""
    for line in chunk.splitlines():
        if not (line.startswith("data: {") and '"error"' in line):
            continue
        try:
            event = json.loads(line.removeprefix("data: "))
        except ValueError:
            continue
        error = event.get("error")
        if isinstance(error, dict):
            status = error.get("code", _STATUS.get(str(error.get("type")), 500))
            return (status if isinstance(status, int) else 500), event
    return None
