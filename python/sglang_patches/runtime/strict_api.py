"""Patch ``strict-api``: a request the server cannot serve gets a 4xx that says why.

Upstream 0.5.23 answers a request for any model name with the one model it serves, ends the whole server on a prompt of
token ids beyond the vocabulary, and answers some JSON of the wrong type with a 500.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi.responses import ORJSONResponse
    from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

# What upstream's request types hold when the client names no model.
_UNNAMED = "default"
# Stays finite in float32 when divided by the lowest temperature that upstream takes for sampling, 1e-6.
_LARGEST_BIAS = 1e30
_LARGEST_TOP_K = 2**31 - 1
# Beyond any use, and finite in float32 also after a division of logits: (lowest, highest) of what may be asked for.
_RANGES = {"temperature": (0.0, 1e6), "repetition_penalty": (1e-3, 1e3), "n": (1, 4096), "top_k": (-1, _LARGEST_TOP_K)}
# The longest pattern upstream takes, in bytes; a longer one is left to its refusal.
_LONGEST_REGEX = 256
# Free-form, and made of other classes than JSON has.
_UNTYPED = {"custom_params", "watermark"}


def refusal(serving: OpenAIServingBase, request: Any) -> ORJSONResponse | None:
    """A 404 in OpenAI's form when ``request`` names a model that is not served here; None when it may go on.

    Accepts the served name, the path it was loaded from, no name, and ``served-name:adapter`` for LoRA; which adapters
    exist is checked by upstream.
    """
    asked = getattr(request, "model", None)
    if asked is None or asked == _UNNAMED:
        return None
    manager = serving.tokenizer_manager
    known = {manager.served_model_name, manager.model_path}
    base, _ = serving._parse_model_parameter(asked)
    if asked in known or base in known:
        return None
    return serving.create_error_response(
        message=f"The model '{asked}' does not exist. This server serves '{manager.served_model_name}'.",
        err_type="NotFoundError",
        status_code=HTTPStatus.NOT_FOUND,
        param="model",
    )


def check_token_ids(manager: TokenizerManager, request: Any, input_ids: Sequence[int] | None) -> None:
    """Raise ValueError, which becomes a 400, when a prompt has no token, or is given as ids the model has no row for.

    Upstream refuses an empty prompt only alone, not in a batch, and passes ids beyond the vocabulary to the embedding,
    where the lookup fails and ends the server. With images, video or audio,
    placeholders up to the tokenizer's size pass, since some models keep them beyond the embedding's rows.
    """
    if input_ids is not None and len(input_ids) == 0 and request.input_embeds is None:
        raise ValueError("The prompt is empty: it has no tokens.")
    if request.input_ids is None or not input_ids:
        return
    limit = manager.model_config.vocab_size
    if request.contains_mm_input() and manager.tokenizer is not None:
        limit = max(limit, len(manager.tokenizer))
    lowest, highest = min(input_ids), max(input_ids)
    if lowest < 0 or highest >= limit:
        seen = lowest if lowest < 0 else highest
        raise ValueError(f"The prompt holds token id {seen}; this model's token ids are 0 to {limit - 1}.")


def bad_value(validator: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a pydantic "before" validator: a value of a type it did not expect is the client's mistake, a 400.

    Such validators read the raw JSON, and pydantic takes only ValueError and AssertionError as a verdict on it.
    """

    @functools.wraps(validator)
    def checked(*args: Any, **named: Any) -> Any:
        try:
            return validator(*args, **named)
        except (AttributeError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"the request, or a part of it, is of the wrong type: {error}") from error

    return checked


def check_request(manager: TokenizerManager, request: Any) -> None:
    """Raise ValueError, which becomes a 400, for values that upstream passes on and that end the server or hang.

    ``n`` below 1 waits for no answer forever. More top log-probabilities than the vocabulary has tokens, stop token ids
    beyond it with ``min_tokens``, a ``top_k`` that is no int32, and a ``logit_bias`` that makes logits infinite fail in
    the scheduler, and so does any value of another type than upstream declares, which ``/generate`` passes on unread.
    A broken ``stop_regex`` and a list of ids for one request give a 500.
    A batch has lists where a single request has values.
    """
    if isinstance(request.rid, list) and isinstance(getattr(request, "text", None), str):
        raise ValueError(f"rid is a list of {len(request.rid)}, but there is one prompt; give one string.")
    vocabulary = manager.model_config.vocab_size
    for count in _values(getattr(request, "top_logprobs_num", None)):
        if isinstance(count, int) and not 0 <= count <= vocabulary:
            raise ValueError(f"{count} top log-probabilities are asked for; possible are 0 to {vocabulary}.")
    for params in _values(request.sampling_params):
        if isinstance(params, dict):
            _check_sampling(params, vocabulary)


@functools.cache
def _sampling_types() -> dict[str, Any]:
    """The type that upstream declares for each sampling parameter, and does not check where it takes plain JSON."""
    import msgspec
    from sglang.srt.sampling.sampling_params import SamplingParams

    return {field.name: field.type for field in msgspec.structs.fields(SamplingParams) if field.name not in _UNTYPED}


def _check_sampling(params: dict[str, Any], vocabulary: int) -> None:
    """Raise ValueError for the first value of one request's sampling parameters that is of a wrong type or size."""
    import msgspec

    for name, value in params.items():
        if value is None or name not in _sampling_types():
            continue
        try:
            msgspec.convert(value, _sampling_types()[name])
        except msgspec.ValidationError as error:
            raise ValueError(f"{name} is {value!r:.80}: {error}.") from None
        lowest, highest = _RANGES.get(name, (value, value))
        if name in _RANGES and not lowest <= value <= highest:
            raise ValueError(f"{name} is {value}; it must be between {lowest:g} and {highest:g}.")
    for token, bias in (params.get("logit_bias") or {}).items():
        if not abs(bias) <= _LARGEST_BIAS:
            raise ValueError(f"logit_bias of token {token} is {bias}; its size must not exceed {_LARGEST_BIAS:g}.")
    for pattern in _values(params.get("stop_regex")):
        if len(pattern.encode()) > _LONGEST_REGEX:
            continue
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"stop_regex {pattern!r} is no regular expression: {error}.") from None
    for token in _values(params.get("stop_token_ids")):
        if not 0 <= token < vocabulary:
            raise ValueError(f"stop_token_ids holds {token}; this model's token ids are 0 to {vocabulary - 1}.")


def _values(given: Any) -> Sequence[Any]:
    if given is None:
        return ()
    return list(given) if isinstance(given, (list, tuple, set)) else [given]
