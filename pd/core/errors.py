"""The one hierarchy of errors.

Errors are raised where the fact is known and turned into an HTTP status (``status``), a wire
message (``kind``) or an exit status (``exit_status``) at the edge.
"""

from __future__ import annotations

from pd.core.brief import shorten

# Characters of a message over HTTP.
MAX_MESSAGE_CHARACTERS = 4096


class PDError(Exception):
    """Base of every error that pd raises on purpose.

    Attributes:
        kind: name that travels between processes (see :func:`error_from_kind`).
        status: HTTP status at the proxy's edge.
        type: ``error.type`` in OpenAI's error shape.
        exit_status: exit status of a command that ends with it.
    """

    kind = "internal"
    status = 500
    type = "internal_server_error"
    exit_status = 1

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


def error_body(error: PDError) -> dict[str, dict[str, str | None]]:
    """An error as clients get it over HTTP, in OpenAI's shape."""
    return {
        "error": {
            "message": shorten(error.message, MAX_MESSAGE_CHARACTERS),
            "type": error.type,
            "param": error.param,
            "code": error.kind,
        }
    }


class InvalidRequestError(PDError):
    """The client sent something that can never work; ``message`` names the value."""

    kind, status, type = "invalid_request", 400, "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """The prompt, or it and the answer, is longer than the model or its nodes can hold. ``kind`` is
    OpenAI's word for it."""

    kind = "context_length_exceeded"


class AuthenticationError(PDError):
    """The API key is missing or wrong."""

    kind, status, type = "authentication", 401, "authentication_error"


class ForbiddenError(PDError):
    """Known or not, this client may not do that."""

    kind, status, type = "forbidden", 403, "permission_error"


class NotFoundError(PDError):
    """No such model, worker or request."""

    kind, status, type = "not_found", 404, "not_found_error"


class DeadlineExceededError(PDError):
    """The request's deadline passed before it finished."""

    kind, status, type = "deadline", 408, "timeout_error"


class UnsupportedMediaTypeError(PDError):
    """The body is not declared as what the server takes."""

    kind, status, type = "unsupported_media_type", 415, "invalid_request_error"


class QueueFullError(PDError):
    """The bounded queue is full; the client should retry later."""

    kind, status, type = "queue_full", 429, "rate_limit_error"


class AbortedError(PDError):
    """The request was ended by ``/abort_request`` or because its client went away."""

    kind, status, type = "aborted", 499, "request_aborted"


class NodeFailedError(PDError):
    """A node failed, restarted or became unreachable while it worked on the request."""

    kind, status, type = "node_failed", 502, "node_failed_error"


class PeerFailedError(NodeFailedError):
    """A request failed on a node since its peer did; on the wire and for clients no other kind."""


class StepFailedError(NodeFailedError):
    """A request was in a step that failed; on the wire and for clients no other kind."""


class UnavailableError(PDError):
    """No node can serve the request at present."""

    kind, status, type = "unavailable", 503, "service_unavailable_error"


class RefusedError(UnavailableError):
    """A node takes no requests at present; on the wire and for clients no other kind."""


class TransferError(NodeFailedError):
    """KV pages could not be moved, or what arrived is not what was sent."""

    kind = "transfer"


class HandshakeError(NodeFailedError):
    """Two nodes cannot work together; ``message`` names both values."""

    kind = "handshake"


class UsageError(PDError):
    """A command was called with values that cannot work (exit status 2)."""

    kind, exit_status = "usage", 2


class SetupError(PDError):
    """The machine lacks what a command needs: a port, a library, a file (exit status 1)."""

    kind, exit_status = "setup", 1


class UnsupportedModelError(UsageError):
    """``config.json`` asks for something that changes results and is not supported."""

    kind = "unsupported_model"


_BY_KIND: dict[str, type[PDError]] = {
    cls.kind: cls
    for cls in (
        PDError,
        InvalidRequestError,
        ContextLengthError,
        AuthenticationError,
        NotFoundError,
        DeadlineExceededError,
        QueueFullError,
        AbortedError,
        NodeFailedError,
        UnavailableError,
        TransferError,
        HandshakeError,
    )
}


def error_from_kind(kind: str, message: str, param: str | None = None) -> PDError:
    """Rebuild an error that arrived over the wire; unknown kinds become :class:`PDError`."""
    return _BY_KIND.get(kind, PDError)(message, param=param)


def error_of_peer(kind: str, message: str) -> PDError:
    """Rebuild an error for which a peer gave a room up."""
    error = error_from_kind(kind, message)
    return PeerFailedError(message) if type(error) is NodeFailedError else error
