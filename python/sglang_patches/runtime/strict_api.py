"""Patch ``strict-api``: the OpenAI-compatible endpoints refuse what they cannot do instead of doing something else.

Upstream 0.5.23 answers a request for any model name with the one model it serves, so that a client that asks for the
wrong model is never told.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi.responses import ORJSONResponse
    from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase

# What upstream's request types hold when the client names no model.
_UNNAMED = "default"


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
