"""Results of a batch: one answer or error per line of the output, as in OpenAI's Batch API."""

from __future__ import annotations

import msgspec

# Every line of the output begins with this.
LINE_START = b'{"id":"batch_req_'
# The request is not to blame for these statuses, so it may succeed later.
_PASSING = (408, 425, 429, 499)


class BatchResponse(msgspec.Struct):
    """An answer of the server with any status."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct):
    """Why there is no answer of the server."""

    code: str
    message: str


class BatchResult(msgspec.Struct):
    """A line of the output. Either ``response`` or ``error`` is null."""

    id: str
    custom_id: str
    response: BatchResponse | None
    error: BatchError | None

    @property
    def is_success(self) -> bool:
        """Whether the request got its answer."""
        return self.response is not None and is_success(self.response.status_code)

    def to_line(self) -> bytes:
        return _encoder.encode(self) + b"\n"


class _Response(msgspec.Struct):
    status_code: int


class WrittenResult(msgspec.Struct):
    """The fields of a line of the output from which we learn whether its request is done."""

    custom_id: str
    response: _Response | None

    @property
    def is_final(self) -> bool:
        """Whether a later run keeps the line."""
        return self.response is not None and is_final(self.response.status_code)

    @property
    def has_succeeded(self) -> bool:
        return self.response is not None and is_success(self.response.status_code)


_encoder = msgspec.json.Encoder()
_written = msgspec.json.Decoder(WrittenResult)


def parse_written(line: bytes) -> WrittenResult | None:
    """Parse a line of the output; None for any other line."""
    try:
        return _written.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def is_success(status: int) -> bool:
    """Whether an answer with this status has the requested content."""
    return 200 <= status < 300


def is_final(status: int) -> bool:
    """Whether the same request would get the same answer again, as far as the status says."""
    return status < 500 and status not in _PASSING


def is_worth_another_attempt(status: int) -> bool:
    """Whether the same run should send the request again, because the server is busy or failed. A
    later run repeats requests that somebody ended or whose time was up."""
    return status in (425, 429) or status >= 500
