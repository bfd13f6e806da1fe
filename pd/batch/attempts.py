"""Attempts at one request of a batch, and the pauses between them. It knows no way to a server."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import random
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pd.batch.results import BatchError, BatchResponse, is_success, is_worth_another_attempt
from pd.core.brief import shorten_text

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

# Limit of one answer. All requests under way may need this much at once.
MAX_ANSWER_BYTES = 64 << 20
# Pause before the second attempt at a request; it doubles for each further one.
FIRST_PAUSE_SECONDS = 0.5
_MAX_PAUSE_SECONDS = 60.0
_MAX_RETRY_AFTER_SECONDS = 300.0
_MAX_NAME_CHARACTERS = 256

# Validates JSON without making objects of its values.
_RAW = msgspec.json.Decoder(msgspec.Raw)


class BatchAttempt(NamedTuple):
    """The outcome of one attempt. Either ``response`` or ``error`` is None.

    Attributes:
        try_again: whether the same run should send the request again.
        wait: seconds for which the server asked us to wait (``Retry-After``); 0 if it did not.
        unreachable: whether there was no connection.
    """

    response: BatchResponse | None = None
    error: BatchError | None = None
    try_again: bool = False
    wait: float = 0.0
    unreachable: bool = False

    @property
    def reason(self) -> str:
        """The failure as text."""
        if self.error is not None:
            return self.error.message
        assert self.response is not None
        message = _error_message(bytes(self.response.body))
        return f"HTTP status {self.response.status_code}" + (f": {message}" if message else "")

    @property
    def is_turned_away(self) -> bool:
        """Whether the server has no room for the request now, or no node."""
        return self.response is not None and self.response.status_code in (429, 503)


async def try_request(
    send: Callable[[], Awaitable[BatchAttempt]],
    stopping: asyncio.Event,
    max_retries: int,
    *,
    has_patience: bool = False,
) -> BatchAttempt | None:
    """Send a request until an attempt is the last one, with growing pauses.

    Args:
        stopping: ends the run.
        max_retries: most further attempts.
        has_patience: do not count attempts that the server turned away.

    Returns:
        The last attempt; None if the run ends before another attempt.
    """
    counted = number = 0
    while True:
        attempt = await send()
        if not attempt.try_again:
            return attempt
        if not (has_patience and attempt.is_turned_away):
            counted += 1
            if counted > max_retries:
                return attempt
        pause = min(_MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(number, 16))
        pause = max(pause, min(attempt.wait, _MAX_RETRY_AFTER_SECONDS))
        # Random pauses keep failed requests from returning all at once.
        pause *= random.uniform(1.0, 1.5)
        number += 1
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), pause)
        if stopping.is_set():
            return None


def make_attempt(status: int, headers: Mapping[str, str], body: bytes, name: str) -> BatchAttempt:
    """Make the outcome of an answered attempt."""
    try:
        body.decode()
        _RAW.decode(body)
        is_object = body.lstrip().startswith(b"{")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        is_object = False
    if not is_object:
        text = shorten_text(body[:2000].decode(errors="replace").strip(), 300)
        if is_success(status):
            return make_failure("invalid_answer", f"the answer is no JSON object: {text}")
        error = {"message": text, "type": None, "param": None, "code": None}
        body = msgspec.json.encode({"error": error})
    # JSON has line breaks only between values, never inside of them.
    body = body.replace(b"\n", b" ").replace(b"\r", b" ")
    request_id = headers.get("x-request-id") or name
    response = BatchResponse(
        status, shorten_text(request_id, _MAX_NAME_CHARACTERS), msgspec.Raw(body)
    )
    return BatchAttempt(
        response,
        try_again=is_worth_another_attempt(status),
        wait=_parse_retry_after(headers.get("retry-after", "")),
    )


def make_failure(code: str, message: str) -> BatchAttempt:
    return BatchAttempt(error=BatchError(code, message))


def _error_message(body: bytes) -> str:
    try:
        return shorten_text(str(msgspec.json.decode(body)["error"]["message"]), 300)
    except (msgspec.DecodeError, KeyError, TypeError, RecursionError):
        return ""


def _parse_retry_after(retry_after: str) -> float:
    """Return the seconds of a ``Retry-After`` header, which may name a time; 0 if it is invalid."""
    if retry_after.isascii() and retry_after.isdigit():
        return float(retry_after[:9])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0
