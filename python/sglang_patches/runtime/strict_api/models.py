"""Which model names pass: the served one, the path it was loaded from, either with ``:adapter``, and none."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang_patches.runtime.strict_api import fields

if TYPE_CHECKING:
    from fastapi import Response
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
    from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

# Error types of Anthropic's Messages API by status (https://docs.anthropic.com/en/api/errors).
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# What upstream's request types hold when the client names no model.
_UNNAMED = "default"


def unknown(manager: TokenizerManager, asked: str | None) -> str | None:
    """The sentence that refuses the model name ``asked``; None when it may pass.

    ``served-name:adapter`` passes for LoRA (which adapters exist is checked by upstream), and so Ollama's ``:latest``.
    """
    if asked is None or asked == _UNNAMED:
        return None
    known = (manager.served_model_name, manager.model_path)
    if asked in known or asked.startswith(tuple(f"{name}:" for name in known)):
        return None
    return f"The model '{asked}' does not exist. This server serves '{manager.served_model_name}'."


def refusal(serving: OpenAIServingBase, request: Any) -> Response | None:
    """A 404 in OpenAI's form when ``request`` names a model that is not served here; None when it may go on.

    Raises:
        ValueError: it asks for what upstream accepts and does not do (see `fields.check`).
    """
    told = unknown(serving.tokenizer_manager, getattr(request, "model", None))
    if told is None:
        fields.check(serving.tokenizer_manager, request)
        return None
    return serving.create_error_response(
        message=told, err_type="NotFoundError", status_code=HTTPStatus.NOT_FOUND, param="model"
    )


def anthropic_refusal(serving: AnthropicServing, request: Any) -> Response | None:
    """The same in the form of Anthropic's Messages API."""
    told = unknown(serving.openai_serving_chat.tokenizer_manager, request.model)
    if told is None:
        return None
    return serving._error_response(status_code=HTTPStatus.NOT_FOUND, error_type="not_found_error", message=told)


def anthropic_error_type(error_type: str, status_code: int) -> str:
    """``error_type`` if Anthropic's API has it, else the one of ``status_code``; upstream passes on OpenAI's types."""
    if error_type == "api_error" or error_type in ANTHROPIC_TYPES.values():
        return error_type
    return ANTHROPIC_TYPES.get(status_code, "invalid_request_error" if status_code < 500 else "api_error")


def ollama_refusal(manager: TokenizerManager, model: str) -> Response | None:
    """The same in the form of Ollama's API."""
    told = unknown(manager, model)
    if told is None:
        return None
    from fastapi.responses import JSONResponse

    return JSONResponse({"error": told}, status_code=HTTPStatus.NOT_FOUND)
