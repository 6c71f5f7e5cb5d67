"""What every request must fulfil before it is sent to the scheduler, whichever API it came through."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sglang_patches.runtime.strict_api.answers import WRONG_TYPE
from sglang_patches.runtime.strict_api.media import check_media

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

# Stays finite in float32 when divided by the lowest temperature that upstream takes for sampling, 1e-6.
_LARGEST_BIAS = 1e30
_LARGEST_TOP_K = 2**31 - 1
# (lowest, highest) of what may be asked for: beyond any use, and finite in float32 also after a division of logits.
# Upstream refuses a repetition penalty above 2.
_RANGES = {"temperature": (0.0, 1e6), "repetition_penalty": (1e-3, 2.0), "n": (1, 4096)}
# The longest pattern upstream takes, in bytes; a longer one is left to its refusal.
_LONGEST_REGEX = 256
# Free-form, and made of other classes than JSON has.
_UNTYPED = {"custom_params", "watermark"}
# Fields with one value a prompt, and so one value for a single prompt and a list or one value for all in a batch.
_PER_PROMPT = (
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_sampling_mask",
    "sampling_logprobs_mode",
    "return_hidden_states",
    "lora_path",
    "custom_logit_processor",
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


def normalized(normalize: Callable[[Any], None]) -> Callable[[Any], None]:
    """Decorate upstream's normalisation of a request: a ValueError also for what has the wrong type or length.

    It reads nothing but the request, so whatever fails in it is the client's mistake.
    """

    @functools.wraps(normalize)
    def checked(request: Any) -> None:
        try:
            normalize(request)
        except (*WRONG_TYPE, AssertionError) as error:
            raise ValueError(f"A part of the request is of the wrong type or length: {error}") from error
        _check_lengths(request)

    return checked


def _check_lengths(request: Any) -> None:
    """Raise ValueError for a list of another length than the request has prompts (times ``n`` once expanded)."""
    if not request.is_single and request.batch_size == 0:
        raise ValueError("The list of prompts is empty.")
    rows = request.batch_size * getattr(request, "parallel_sample_num", 1)
    for name in _PER_PROMPT:
        value = getattr(request, name, None)
        if not isinstance(value, list):
            continue
        if request.is_single:
            raise ValueError(f"{name} is a list of {len(value)}, but there is one prompt; give one value.")
        if len(value) != rows:
            raise ValueError(f"{name} has a value for {len(value)} prompts, but there are {rows}.")


def check_request(manager: TokenizerManager, request: Any, local: bool = False) -> None:
    """Raise ValueError, which becomes a 400, for values that upstream passes on and that end the server or hang.

    ``n`` below 1 waits for no answer forever. More top log-probabilities than the vocabulary has tokens, stop token ids
    beyond it with ``min_tokens``, a ``top_k`` that is no int32, and a ``logit_bias`` that makes logits infinite fail in
    the scheduler, and so does any value of another type than upstream declares, which ``/generate`` passes on unread.
    A broken ``stop_regex`` and a list of ids for one request give a 500.
    A batch has lists where a single request has values. Media are checked here too (see `media`), but not where the
    request comes from the program itself (``local``, upstream's offline ``Engine``): its files are its own.
    """
    if getattr(request, "text", None) is not None and request.input_ids is not None:
        raise ValueError("Both text and input_ids are given; give one of them as the prompt.")
    overrides = getattr(request, "positional_embed_overrides", None)
    if any(isinstance(value, (bool, int, float, str, dict, list)) for value in _values(overrides)):
        raise ValueError("positional_embed_overrides is set by the server's own scoring endpoints; leave it out.")
    labels = getattr(request, "custom_labels", None)
    if labels:
        _check_labels(labels)
    if not local:
        check_media(manager, request)
    if isinstance(request.rid, list) and isinstance(getattr(request, "text", None), str):
        raise ValueError(f"rid is a list of {len(request.rid)}, but there is one prompt; give one string.")
    _check_ids(request)
    vocabulary = manager.model_config.vocab_size
    for count in _values(getattr(request, "top_logprobs_num", None)):
        if isinstance(count, int) and not 0 <= count <= vocabulary:
            raise ValueError(f"{count} top log-probabilities are asked for; possible are 0 to {vocabulary}.")
    for params in _values(request.sampling_params):
        if isinstance(params, dict):
            _check_sampling(params, vocabulary)


def _check_ids(request: Any) -> None:
    """Raise ValueError for the id of a health check: a busy scheduler drops such requests, and they wait forever."""
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

    if not request.log_metrics and request.input_ids == [0]:
        return  # as the server's own health checks are
    for rid in _values(request.rid):
        if str(rid).startswith(HEALTH_CHECK_RID_PREFIX):
            raise ValueError(
                f"rid is {rid[:80]!r}; ids that begin with {HEALTH_CHECK_RID_PREFIX} are the server's own."
            )


def _check_labels(labels: dict[str, str]) -> None:
    """Raise ValueError for a metric label that was not declared at start: Prometheus's refusal would end the server."""
    from sglang.srt.runtime_context import get_observability

    allowed = set(get_observability().tokenizer_metrics_allowed_custom_labels or ())
    if unknown := sorted(set(labels) - allowed):
        raise ValueError(
            f"custom_labels holds {unknown[0]!r}; this server's labels are {sorted(allowed) or 'none'} "
            "(--tokenizer-metrics-allowed-custom-labels)."
        )


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
        if name == "n" and value is None:
            raise ValueError("n is null; give a number of samples, or leave it out for 1.")
        if name == "custom_params" and not isinstance(value, (dict, type(None))):
            raise ValueError(f"custom_params is {value!r:.80}; it must be an object.")
        if name in _UNTYPED:
            continue
        if name not in _sampling_types():
            raise ValueError(f"sampling_params holds {name[:80]!r}, which is no sampling parameter of this server.")
        if value is None:
            continue
        try:
            msgspec.convert(value, _sampling_types()[name])
        except msgspec.ValidationError as error:
            raise ValueError(f"{name} is {value!r:.80}: {error}.") from None
        lowest, highest = _RANGES.get(name, (value, value))
        if name in _RANGES and not lowest <= value <= highest:
            raise ValueError(f"{name} is {value}; it must be between {lowest:g} and {highest:g}.")
        if name == "top_k" and value != -1 and not 1 <= value <= _LARGEST_TOP_K:
            raise ValueError(f"top_k is {value}; it must be -1 (all tokens) or between 1 and {_LARGEST_TOP_K}.")
        if name == "stop" and "" in _values(value):
            raise ValueError("stop holds an empty string, which no text can be searched for; leave it out.")
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
