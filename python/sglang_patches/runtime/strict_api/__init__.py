"""Patch ``strict-api``: a request the server cannot serve gets a 4xx that says why.

Upstream 0.5.23 answers a request for any model name with the one model it serves, ends the whole server on a prompt of
token ids beyond the vocabulary, answers some JSON of the wrong type with a 500, and reads any file of the server's
machine that a request names as an image.

- `models`: which model names pass, on each API.
- `requests`: what every request must fulfil before it is sent to the scheduler.
- `fields`: fields of OpenAI's API that upstream accepts and does not do.
- `media`: where images, video and audio may come from, and what is told when they cannot be loaded.
- `answers`: exceptions and broken streams as 4xx answers.
"""

from __future__ import annotations

from sglang_patches.runtime.strict_api.answers import (
    add_handlers,
    bad_value,
    plain_validation_errors,
    profile_conflict,
    refuse_before_streaming,
    template_errors,
    vertex_parameters,
)
from sglang_patches.runtime.strict_api.fields import ollama_seed
from sglang_patches.runtime.strict_api.media import admit_source, load_errors, media_errors
from sglang_patches.runtime.strict_api.models import anthropic_error_type, anthropic_refusal, ollama_refusal, refusal
from sglang_patches.runtime.strict_api.requests import check_request, check_token_ids, normalized

__all__ = [
    "add_handlers",
    "admit_source",
    "anthropic_error_type",
    "anthropic_refusal",
    "bad_value",
    "check_request",
    "check_token_ids",
    "load_errors",
    "media_errors",
    "normalized",
    "ollama_refusal",
    "ollama_seed",
    "plain_validation_errors",
    "profile_conflict",
    "refusal",
    "refuse_before_streaming",
    "template_errors",
    "vertex_parameters",
]
