"""The one hierarchy of errors.

We raise an error where the fact is known, and translate it at the edge: into an HTTP status
(``status``), a wire message (``kind``) or an exit status (``exit_status``).
"""

from __future__ import annotations

from pd.core.brief import shorten_text

# Longest error message over HTTP, in characters.
MAX_MESSAGE_CHARACTERS = 4096


class PDError(Exception):
    """Base of every deliberate error of pd.

    Attributes:
        kind: name on the wire (see :func:`error_from_kind`).
        status: HTTP status of the proxy's answer.
        type: ``error.type`` in OpenAI's error shape.
        exit_status: exit status of a command after this error.
        param: name of the wrong parameter, if there is one.
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
    """Format an error for HTTP clients, in OpenAI's shape."""
    return {
        "error": {
            "message": shorten_text(error.message, MAX_MESSAGE_CHARACTERS),
            "type": error.type,
            "param": error.param,
            "code": error.kind,
        }
    }


class InvalidRequestError(PDError):
    """The client sent a value that can never work; ``message`` names it."""

    kind, status, type = "invalid_request", 400, "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """The prompt, with or without the answer, is longer than the model or its nodes can hold.

    ``kind`` is OpenAI's code.
    """

    kind = "context_length_exceeded"


class CostlyGrammarError(InvalidRequestError):
    """A grammar takes more than a node allows. Clients see an invalid request."""


class AuthenticationError(PDError):
    """The API key is missing or wrong."""

    kind, status, type = "authentication", 401, "authentication_error"


class ForbiddenError(PDError):
    """The client may not do this, whoever it is."""

    kind, status, type = "forbidden", 403, "permission_error"


class NotFoundError(PDError):
    """There is no such model, worker or request."""

    kind, status, type = "not_found", 404, "not_found_error"


class DeadlineExceededError(PDError):
    """The request's deadline passed before it finished."""

    kind, status, type = "deadline", 408, "timeout_error"


class UnsupportedMediaTypeError(PDError):
    """The request declares an unsupported media type."""

    kind, status, type = "unsupported_media_type", 415, "invalid_request_error"


class QueueFullError(PDError):
    """A bounded queue is full; the client should retry later."""

    kind, status, type = "queue_full", 429, "rate_limit_error"


class AbortedError(PDError):
    """``/abort_request`` ended the request, or its client went away."""

    kind, status, type = "aborted", 499, "request_aborted"


class NodeFailedError(PDError):
    """A node failed, restarted or became unreachable while it worked on the request."""

    kind, status, type = "node_failed", 502, "node_failed_error"


class PeerFailedError(NodeFailedError):
    """A request failed because the node's peer did. Clients see a failed node."""


class StepFailedError(NodeFailedError):
    """A request was part of a step that failed. Clients see a failed node."""


class UnavailableError(PDError):
    """No node can serve the request now."""

    kind, status, type = "unavailable", 503, "service_unavailable_error"


class RefusedError(UnavailableError):
    """A node takes no requests now. Clients see an unavailable service."""


class TransferError(NodeFailedError):
    """KV pages could not be moved, or arrived damaged."""

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
    """``config.json`` asks for an unsupported feature that changes results."""

    kind = "unsupported_model"


class ProgramError(PDError):
    """A program of the language failed.

    Attributes:
        function: name of the function.
        variable: the variable that was not computed; None if the body itself failed.
    """

    kind = "program"

    def __init__(
        self, message: str, *, function: str | None = None, variable: str | None = None
    ) -> None:
        super().__init__(message)
        self.function = function
        self.variable = variable


class TracingError(ProgramError):
    """A function cannot be traced, because a value that is not known yet would decide its way."""


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
    """Rebuild an error that arrived over the wire. Unknown kinds become :class:`PDError`."""
    return _BY_KIND.get(kind, PDError)(message, param=param)


def error_of_peer(kind: str, message: str) -> PDError:
    """Rebuild the error with which a peer gave up a room."""
    error = error_from_kind(kind, message)
    return PeerFailedError(message) if type(error) is NodeFailedError else error
