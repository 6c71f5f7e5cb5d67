"""Fields of OpenAI's API that upstream accepts and does not do: a 400 instead of an answer to another question.

And the one of Ollama's that it does and passes on under a wrong name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager


def ollama_seed(convert: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Decorate the conversion of Ollama's options: a seed gets the name that upstream's sampling has for it."""

    @functools.wraps(convert)
    def converted(*args: Any, **named: Any) -> dict[str, Any]:
        params = convert(*args, **named)
        if "seed" in params:
            params["sampling_seed"] = params.pop("seed")
        return params

    return converted


def check(manager: TokenizerManager, request: Any) -> None:
    """Raise ValueError for the first field of an OpenAI request that would be ignored or fail.

    Reads ``__dict__``, since pydantic warns on reading a field that is marked as deprecated, as ``max_tokens`` is.
    """
    from sglang.srt.entrypoints.openai import protocol

    given = request.__dict__
    if isinstance(request, protocol.CompletionRequest):
        _check_completion(given)
    elif isinstance(request, protocol.ChatCompletionRequest):
        _check_chat(given)
    elif isinstance(request, protocol.DetokenizeRequest):
        _check_tokens(manager, request.tokens)


def _check_completion(given: dict[str, Any]) -> None:
    best_of, choices = given["best_of"], given["n"]
    if best_of is not None and best_of != choices:
        raise ValueError(f"best_of is {best_of} and n is {choices}; this server returns every sample it draws. Use n.")
    if given["suffix"]:
        raise ValueError("suffix is given; this server does not insert text before one. Leave it out.")


def _check_chat(given: dict[str, Any]) -> None:
    if given["top_logprobs"] and not given["logprobs"]:
        raise ValueError(f"top_logprobs is {given['top_logprobs']}, which is allowed only when logprobs is true.")
    for name in ("max_tokens", "max_completion_tokens"):
        if given[name] == 0:
            raise ValueError(f"{name} is 0; it must be at least 1.")


def _check_tokens(manager: TokenizerManager, tokens: list[Any]) -> None:
    ids = [token for entry in tokens for token in (entry if isinstance(entry, list) else [entry])]
    # Some vocabularies have rows beyond the tokenizer's, some tokenizers have tokens beyond the rows.
    limit = max(manager.model_config.vocab_size, len(manager.tokenizer or ()))
    for token in ids:
        if not 0 <= token < limit:
            raise ValueError(f"tokens holds token id {token}; this model's token ids are 0 to {limit - 1}.")
