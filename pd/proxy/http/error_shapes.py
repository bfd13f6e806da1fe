"""Errors in the shape of the API that a client uses."""

from __future__ import annotations

from typing import Any

from pd.core.brief import shorten_text
from pd.core.errors import MAX_MESSAGE_CHARACTERS, PDError, error_body

ANTHROPIC_PATH = "/v1/messages"
_OLLAMA_PATHS = "/api/"
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# Anthropic's own status of an overloaded server.
_ANTHROPIC_STATUSES = {503: 529}


def takes_anthropic_key(path: str) -> bool:
    """Tell whether Anthropic's clients use a path. They send their key as ``x-api-key``."""
    return is_anthropic(path) or path == "/v1/models" or path.startswith("/v1/models/")


def is_anthropic(path: str) -> bool:
    """Tell whether a path belongs to Anthropic's API."""
    return path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")


def is_ollama(path: str) -> bool:
    """Tell whether a path belongs to Ollama's API."""
    return path.startswith(_OLLAMA_PATHS)


def ollama_error(error: PDError) -> dict[str, Any]:
    """Format an error in Ollama's shape, for a body or a line of a stream."""
    return {"error": shorten_text(error.message, MAX_MESSAGE_CHARACTERS)}


def anthropic_error(error: PDError) -> dict[str, Any]:
    """Format an error in Anthropic's shape, for a body or an event of a stream."""
    default = "invalid_request_error" if 400 <= error.status < 500 else "api_error"
    message = shorten_text(error.message, MAX_MESSAGE_CHARACTERS)
    kind = _ANTHROPIC_TYPES.get(error.status, default)
    return {"type": "error", "error": {"type": kind, "message": message}}


def shape_error(error: PDError, path: str) -> tuple[dict[str, Any], int]:
    """Return the body and the status of an error for the API of a path."""
    if is_anthropic(path):
        return anthropic_error(error), _ANTHROPIC_STATUSES.get(error.status, error.status)
    if is_ollama(path):
        return ollama_error(error), error.status
    return error_body(error), error.status
