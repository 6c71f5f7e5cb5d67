"""Where images, video and audio of a request may come from, and what a client is told when they cannot be loaded.

Upstream 0.5.23 opens any path that a request names as a medium and, when it cannot be decoded, answers with the first
100 bytes of what it read (``multimodal/processors/base_processor.py``, ``_load_single_item``). Its many loaders decide
each by its own rules what is a path, so sources are checked and put into one unmistakable form before any of them runs.
"""

from __future__ import annotations

import binascii
import dataclasses
import functools
import inspect
import logging
import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlparse

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = logging.getLogger("sglang_patches")

ALLOWED_PATH = "SGLANG_PATCHES_ALLOWED_MEDIA_PATH"
_KINDS = ("image", "video", "audio")
# Keys under which upstream's loaders look for a source in an object.
_SOURCE_KEYS = {"url", "path", *_KINDS, *(f"{kind}_url" for kind in _KINDS)}
_BASE64 = re.compile(r"[A-Za-z0-9+/]*={0,2}")
# No path is longer on Linux (PATH_MAX), so a longer text with a leading slash, as base64 of JPEG has, is not one.
_LONGEST_PATH = 4096
# What upstream says of a URL it does not fetch; it names nothing that the client does not know or may not.
_ABOUT_URLS = ("Media URL", "Remote media", "Invalid media URL")


class MediaError(ValueError):
    """A medium of a request cannot be loaded; the message is for the client and holds nothing of the medium."""


def check_media(manager: TokenizerManager, request: Any) -> None:
    """Raise ValueError when ``request`` has a medium that the model ignores or that is a file it may not read.

    Sources of the request are replaced by equal ones that no loader of upstream takes for a path, save allowed files.
    """
    for kind in _KINDS:
        given = getattr(request, f"{kind}_data", None)
        if not _present(given):
            continue
        setattr(request, f"{kind}_data", _admit(given, kind))
        if not _takes(manager, kind):
            raise ValueError(f"The request holds {kind} data, which the served model does not take.")


def _present(given: Any) -> bool:
    if isinstance(given, (list, tuple)):
        return any(_present(entry) for entry in given)
    return given is not None


def _takes(manager: TokenizerManager, kind: str) -> bool:
    """Whether the model's processor reads this kind at all; the kinds that it does not read are dropped by upstream."""
    processor = getattr(manager, "mm_processor", None)
    if processor is None:
        return bool(manager.model_config.is_multimodal)  # another process has the processor, or there is no tokenizer
    cls: Any = type(processor)
    return _reads(cls, f"{kind}_data")


@functools.cache
def _reads(processor: Any, field: str) -> bool:
    """Whether the code of ``processor``'s class, or of one it builds on, names ``field``; the common base names all."""
    from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

    own = [cls for cls in processor.__mro__ if cls not in BaseMultimodalProcessor.__mro__]
    return any(field in inspect.getsource(sys.modules[cls.__module__]) for cls in own)


def _admit(given: Any, kind: str) -> Any:
    """``given`` with every source in it checked: one, a list of them (of lists, for a batch), or upstream's objects."""
    if isinstance(given, str):
        return admit_source(given, kind)
    if isinstance(given, (list, tuple)):
        return [_admit(entry, kind) for entry in given]
    if isinstance(given, dict):
        return {key: _admit_entry(key, value, kind) for key, value in given.items()}
    url = getattr(given, "url", None)
    if isinstance(url, str):
        return dataclasses.replace(given, url=admit_source(url, kind))
    return given


def _admit_entry(key: str, value: Any, kind: str) -> Any:
    looks_local = isinstance(value, str) and (value.startswith("file:") or _short_path(value))
    if key in _SOURCE_KEYS or isinstance(value, (dict, list)) or looks_local:
        return _admit(value, kind)
    return value


def _short_path(source: str) -> bool:
    return source.startswith("/") and len(source) < _LONGEST_PATH


def admit_source(source: str, kind: str = "image") -> str:
    """The source of one medium in a form that every loader of upstream takes for what it is.

    Args:
        source: an http(s) URL, a ``data:`` URL, base64, or a path or ``file:`` URL below the folder that the operator
            allows in ``SGLANG_PATCHES_ALLOWED_MEDIA_PATH`` (symbolic links are followed first).

    Returns:
        http(s) and ``data:`` URLs unchanged, base64 as a ``data:`` URL, an allowed file as the ``file:`` URL of its
        real path.

    Raises:
        MediaError: anything else; nothing is opened or looked for outside the allowed folder.
    """
    if source.startswith(("http://", "https://")):
        return source
    if source.startswith("data:"):
        if "," not in source:
            raise MediaError(f"The {kind} is a data: URL without a comma before its data.")
        return source
    if not _short_path(source) and _BASE64.fullmatch(source, 0, _LONGEST_PATH):
        return f"data:application/octet-stream;base64,{source}"
    return f"file://{quote(_allowed_file(source, kind))}"


def allowed_folder() -> str | None:
    """The folder whose files a request may name, with symbolic links resolved; None when it may name no file."""
    folder = os.environ.get(ALLOWED_PATH)
    return os.path.realpath(folder) if folder else None


def _allowed_file(source: str, kind: str) -> str:
    folder = allowed_folder()
    if folder is None:
        raise MediaError(
            f"The {kind} {source[:80]!r} is a local file, and this server reads none for a request. "
            f"Send a data: URL or an http(s) URL; the operator can allow a folder with {ALLOWED_PATH}."
        )
    real = os.path.realpath(unquote(urlparse(source).path) if source.startswith("file:") else source)
    if os.path.commonpath([folder, real]) != folder:
        raise MediaError(f"The {kind} {source[:80]!r} is outside the folder whose files this server reads.")
    if not os.path.isfile(real):
        raise MediaError(f"The {kind} {source[:80]!r} is no file.")
    return real


def load_errors(load: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate upstream's loader of one medium: its errors hold no byte of what was read.

    Decoders raise much that upstream does not count as the client's mistake (PIL's DecompressionBombError, struct.error
    and more), so here all is that does not come from the machine.
    """

    @functools.wraps(load)
    def checked(cls: Any, data: Any, modality: Any, *args: Any, **named: Any) -> Any:
        try:
            return load(cls, data, modality, *args, **named)
        except (ValueError, RuntimeError) as error:
            cause = error.__cause__ or error
            kind = modality.name.lower()
            if _of_the_machine(cause):
                raise RuntimeError(f"The {kind} could not be loaded: {type(cause).__name__}") from cause
            raise MediaError(_describe(cause, kind)) from cause

    return checked


def _of_the_machine(cause: BaseException) -> bool:
    """Whether the machine failed: no memory, no decoder, CUDA (a RuntimeError), files or the network's own errors."""
    from sglang.srt.utils.common import CLIENT_MEDIA_EXCEPTIONS

    if isinstance(cause, CLIENT_MEDIA_EXCEPTIONS):
        return False
    return isinstance(cause, (MemoryError, ImportError, RuntimeError, OSError)) and not isinstance(
        cause, (RecursionError, NotImplementedError)
    )


def media_errors(tokenize: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Decorate the tokenisation of one request: a medium that cannot be fetched or decoded is a ValueError, a 400."""

    @functools.wraps(tokenize)
    async def checked(manager: Any, request: Any, *args: Any, **named: Any) -> Any:
        try:
            return await tokenize(manager, request, *args, **named)
        except Exception as error:
            told = _verdict(error) if request.contains_mm_input() else None
            if told is None:
                raise
            logger.info("sglang-patches: refused a request: %s", told, exc_info=error)
            raise ValueError(told) from None

    return checked


def _verdict(error: BaseException) -> str | None:
    """What to tell the client when ``error`` comes from loading a medium; None when it comes from elsewhere."""
    import requests
    from PIL import UnidentifiedImageError

    for cause in _chain(error):
        if isinstance(cause, MediaError):
            return str(cause)
        if isinstance(cause, (requests.exceptions.RequestException, UnidentifiedImageError, binascii.Error)):
            return _describe(cause, "medium")
        if isinstance(cause, ValueError) and str(cause).startswith(_ABOUT_URLS):
            return str(cause)
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _describe(cause: BaseException, kind: str) -> str:
    import requests

    if isinstance(cause, requests.exceptions.HTTPError) and cause.response is not None:
        return f"The {kind} could not be fetched: its server answered {cause.response.status_code}."
    if isinstance(cause, requests.exceptions.Timeout):
        return f"The {kind} could not be fetched in time."
    if isinstance(cause, requests.exceptions.RequestException):
        return f"The {kind} could not be fetched: {type(cause).__name__}."
    if str(cause).startswith(_ABOUT_URLS):
        return str(cause)
    return f"The {kind} could not be decoded: what was sent or fetched is broken or of an unknown format."
