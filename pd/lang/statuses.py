"""Errors of servers, by their HTTP status."""

from __future__ import annotations

from pd.core.errors import (
    AbortedError,
    AuthenticationError,
    DeadlineExceededError,
    ForbiddenError,
    InvalidRequestError,
    NodeFailedError,
    NotFoundError,
    PDError,
    QueueFullError,
    UnavailableError,
)

_BY_STATUS: dict[int, type[PDError]] = {
    400: InvalidRequestError,
    401: AuthenticationError,
    403: ForbiddenError,
    404: NotFoundError,
    408: DeadlineExceededError,
    429: QueueFullError,
    499: AbortedError,
    502: NodeFailedError,
    503: UnavailableError,
}


def error_of_status(status: int, message: str, param: str | None = None) -> PDError:
    """Make the error that an HTTP status stands for."""
    return _BY_STATUS.get(status, PDError)(message, param=param)
