"""Lines of a batch's output: one answer or error each, in the format of OpenAI's Batch API."""

from __future__ import annotations

import msgspec

# A line of the output begins with this.
LINE_START = b'{"id":"batch_req_'
# The request itself is all right: the same request may succeed later.
_PASSING = (408, 425, 429, 499)


class BatchResponse(msgspec.Struct):
    """An answer of the server, whatever its status."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct):
    """The reason why there is no answer of the server."""

    code: str
    message: str


class BatchResult(msgspec.Struct):
    """A line of the output. Either ``response`` or ``error`` is null."""

    id: str
    custom_id: str
    response: BatchResponse | None
    error: BatchError | None

    def line(self) -> bytes:
        return _encoder.encode(self) + b"\n"


class _Response(msgspec.Struct):
    status_code: int


class WrittenResult(msgspec.Struct):
    """The members of a line of the output that say whether its request is done."""

    custom_id: str
    response: _Response | None

    @property
    def is_final(self) -> bool:
        """Whether a later run takes the line as it is."""
        return self.response is not None and is_final(self.response.status_code)

    @property
    def succeeded(self) -> bool:
        return self.response is not None and succeeded(self.response.status_code)


_encoder = msgspec.json.Encoder()
_written = msgspec.json.Decoder(WrittenResult)


def parse_written(line: bytes) -> WrittenResult | None:
    """Parse a line of the output; None if it is none."""
    try:
        return _written.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def succeeded(status: int) -> bool:
    """Whether a request with an answer of this status has what it asked for."""
    return 200 <= status < 300


def is_final(status: int) -> bool:
    """Whether the same request would get the same answer again, as far as the status tells."""
    return status < 500 and status not in _PASSING


def is_worth_another_attempt(status: int) -> bool:
    """Whether the same run should send the request again: the server is busy, or has failed. A
    request that somebody has ended, or whose time was up, is left to a later run."""
    return status in (425, 429) or status >= 500
