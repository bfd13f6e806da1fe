"""JSON responses, error responses, and the ``X-Request-Id`` header."""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec
from starlette.responses import Response

from pd.core.errors import (
    DeadlineExceededError,
    PDError,
    QueueFullError,
    UnavailableError,
)
from pd.proxy.http.error_shapes import shape_error

if TYPE_CHECKING:
    from starlette.types import Scope

RETRY_AFTER_SECONDS = 1
REQUEST_ID = b"x-request-id"
MAX_REQUEST_ID_CHARACTERS = 256
# Characters that a header cannot hold, and spaces that a client would strip.
_NOT_IN_HEADERS = re.compile("[^ -~]|^ | $")

_encoder = msgspec.json.Encoder()


def json_response(
    value: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(_encoder.encode(value), status, headers, "application/json")


def error_response(
    error: PDError, headers: dict[str, str] | None = None, *, path: str = ""
) -> Response:
    """Make the response for an error, in the shape of the API that ``path`` belongs to."""
    headers = dict(headers or {})
    if isinstance(error, QueueFullError | UnavailableError):
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    if isinstance(error, DeadlineExceededError):
        # OpenAI's clients retry after a 408, and the retry would take as long again.
        headers["X-Should-Retry"] = "false"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body, status = shape_error(error, path)
    return json_response(body, status, headers)


def quote_header(name: str) -> str:
    """Percent-encode the characters of a request's name that a header cannot hold."""
    return _NOT_IN_HEADERS.sub(lambda match: quote(match[0], errors="replace"), name)


def read_request_id(scope: Scope) -> str:
    """Return the client's ``X-Request-Id`` as the answer repeats it, or draw a new one."""
    given = next((value for key, value in scope["headers"] if key == REQUEST_ID), b"")
    name = given.decode(errors="replace").strip()[:MAX_REQUEST_ID_CHARACTERS]
    return quote_header(name) or uuid.uuid4().hex
