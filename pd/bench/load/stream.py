"""Parses HTTP answers and server-sent events from the pieces in which they arrived."""

from __future__ import annotations

import re
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pd.bench.load.reception import Piece

_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
# Nobody sends a longer length, and Python refuses to parse a number of 5,000 digits.
_LENGTH = re.compile(rb"\d{1,18}")
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})(?: |$)")


class HTTPAnswer(NamedTuple):
    """One answer.

    Attributes:
        status: 0 if no head of an HTTP answer came.
        content_type: in lower case, without parameters.
        body: parts of the body, each with the time at which its last byte arrived.
        complete: whether the body ended as its head announced. A body without a length ends with
            its connection, so it is always complete.
    """

    status: int
    content_type: str
    body: list[Piece]
    complete: bool

    @property
    def content(self) -> bytes:
        return b"".join(data for _, data in self.body)


def parse_http(pieces: Sequence[Piece]) -> HTTPAnswer:
    """Parse the status and the body of an answer; status 0 if it is not an answer of HTTP/1.1."""
    raw = b"".join(data for _, data in pieces)
    head, blank, _ = raw.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    status = _STATUS_LINE.match(lines[0])
    if not blank or status is None:
        return HTTPAnswer(0, "", [], False)
    pairs = (line.partition(b":") for line in lines[1:])
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    content_type = headers.get(b"content-type", b"").partition(b";")[0].strip()
    begin = len(head) + len(blank)
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        body, complete = _split_chunks(pieces, raw, begin)
    else:
        body, length = _drop_bytes(pieces, begin), headers.get(b"content-length", b"")
        complete = _LENGTH.fullmatch(length) is None or len(raw) - begin >= int(length)
    kind = content_type.decode("latin-1").lower()
    return HTTPAnswer(int(status[1]), kind, body, complete)


def _split_chunks(pieces: Sequence[Piece], raw: bytes, offset: int) -> tuple[list[Piece], bool]:
    """Return the chunks of a body, and whether the last one came."""
    ends = list(accumulate(len(data) for _, data in pieces))
    body: list[Piece] = []
    while (line_end := raw.find(b"\r\n", offset)) >= 0:
        try:
            size = int(raw[offset:line_end].split(b";")[0], 16)
        except ValueError:
            return body, False
        begin = line_end + 2
        offset = begin + size + 2
        if size <= 0:
            return body, size == 0
        if begin + size > len(raw):
            break
        # The chunk is complete with the first piece that reaches its end.
        body.append((pieces[bisect_left(ends, begin + size)][0], raw[begin : begin + size]))
    return body, False


def _drop_bytes(pieces: Sequence[Piece], offset: int) -> list[Piece]:
    """Drop the first ``offset`` bytes."""
    body = []
    for at, data in pieces:
        if offset < len(data):
            body.append((at, data[offset:]))
        offset = max(0, offset - len(data))
    return body


def parse_events(body: Sequence[Piece]) -> Iterator[Piece]:
    """Yield the data of each whole server-sent event, and when its last byte arrived."""
    raw = b"".join(data for _, data in body)
    ends = list(accumulate(len(data) for _, data in body))
    begin = 0
    for blank in _BLANK_LINE.finditer(raw):
        block, begin = raw[begin : blank.start()], blank.end()
        data = [line[5:].removeprefix(b" ") for line in block.splitlines() if line[:5] == b"data:"]
        if data:
            yield body[bisect_left(ends, begin)][0], b"\n".join(data)
