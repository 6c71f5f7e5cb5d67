"""The document of a server: made in its processes, and asked for over HTTP."""

from __future__ import annotations

import http.client
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from sglang_patches import direct
from sglang_patches.document import collect, schema
from sglang_patches.document.schema import Document, Process
from sglang_patches.document.secrets import mask_text
from sglang_patches.errors import PatchError

logger = logging.getLogger("sglang_patches")

_TIMEOUT_S = 60
# This process's answers; a document is collected when it is first asked for.
_process: Process | None = None
_document: Document | None = None
# What could not be told, which is tried and said once.
_failed: set[str] = set()


def process(name: Callable[[], str]) -> dict[str, Any] | None:
    """What this process runs, JSON-able; collected once, save for hashes of libraries that come later.

    Args:
        name: tells it (`schema.Process`).

    Returns: None where it cannot be told, which is logged once: telling must never end a server.
    """
    global _process
    if "process" in _failed:
        return None
    try:
        if _process is None:
            _process = collect.process(name())
        elif any(library.sha256 is None for library in _process.libraries):
            # Another process, such as `sglang-patches provenance`, may have hashed them by now.
            _process.libraries = collect.libraries(budget=0)
        return _process.model_dump()
    except Exception as error:  # whatever it is, the server goes on without
        _give_up("process", error)
        return None


def _give_up(what: str, error: Exception) -> None:
    _failed.add(what)
    logger.warning("no provenance document: %s: %s", type(error).__name__, error)


def document(
    server_args: Callable[[], Mapping[str, Any]], others: Sequence[Mapping[str, Any] | None]
) -> dict[str, Any] | None:
    """The document of a server, from the process that answers its requests; JSON-able, collected once.

    Args:
        server_args: tells the resolved arguments.
        others: what `process` told in the schedulers; None from one that cannot tell.

    Returns: None where it cannot be told, as for `process`.
    """
    global _document
    mine = process(lambda: "http")
    if mine is None or _process is None or "document" in _failed:
        return None
    try:
        if _document is None:
            _document = collect.document(_process, server_args())
    except Exception as error:  # whatever it is, the server goes on without
        _give_up("document", error)
        return None
    return {**_document.model_dump(), "processes": [mine, *(other for other in others if other)]}


def ask(url: str, api_key: str = "", with_time: bool = False, with_host: bool = False) -> Document:
    """The document of the server at a URL.

    Args:
        with_time: add the time of asking.
        with_host: add the server's host as the URL names it.

    Raises:
        PatchError: it does not answer, or tells no document.
    """
    shown = mask_text(url)
    request = direct.request(url, "/server_info", api_key)
    try:
        with direct.opener.open(request, timeout=_TIMEOUT_S) as answer:
            data = json.load(answer)
    except urllib.error.HTTPError as error:
        remedy = (
            "give its API key: SGLANG_API_KEY_FILE, SGLANG_API_KEY or --api-key"
            if error.code in (401, 403)
            else "look at its log"
        )
        if 300 <= error.code < 400:
            remedy = "name the URL that it redirects to: redirects are not followed"
        raise PatchError(f"{shown}/server_info: answered {error.code}\n  remedy     {remedy}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise PatchError(
            f"{shown}/server_info: {error}\n  remedy     name a running SGLang server that listens there"
        ) from None
    ours = data.get("sglang_patches") if isinstance(data, dict) else None
    found = ours.get("document") if isinstance(ours, dict) else None
    if found is None:
        raise PatchError(
            f"{shown}: the server tells no provenance document\n"
            f"  expected   sglang_patches.document in /server_info\n"
            f"  remedy     start it with this sglang-patches and patch `provenance` on; its log says if it cannot tell"
        )
    told = schema.parse(found, shown)
    told.time = datetime.now(UTC).isoformat(timespec="seconds") if with_time else None
    told.host = urlsplit(url).hostname if with_host else None
    return told
