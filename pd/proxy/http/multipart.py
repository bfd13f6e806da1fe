"""Multipart forms, parsed while they arrive.

We parse them ourselves, because parts go to the disk as they come, and each piece of a form has a
limit. The syntax is that of RFC 7578; the headers of parts are read by the standard library.
"""

from __future__ import annotations

import re
from email.errors import MessageError
from email.message import Message
from email.parser import HeaderParser
from typing import NamedTuple

from pd.core.brief import short_repr
from pd.core.errors import InvalidRequestError

MAX_PARTS = 32
MAX_HEAD_BYTES = 4 << 10
# Text before the first part, which no client sends.
MAX_PREAMBLE_BYTES = 4 << 10
_BOUNDARY = re.compile(r"[!-~ ]{0,69}[!-~]")
_LINE = b"\r\n"
# White space that a sender may add to a boundary.
_PADDING = b" \t"
_MAX_PADDING_BYTES = 64


class PartStart(NamedTuple):
    """A part begins. Its content follows as bytes, and ends with the next part or the form.

    Attributes:
        filename: as the client wrote it; None for a plain field.
    """

    name: str
    filename: str | None


FormEvent = PartStart | bytes


def read_boundary(content_type: str) -> bytes:
    """Return the boundary of a form. Raises InvalidRequestError.

    Args:
        content_type: the request's header.
    """
    header = Message()
    header["Content-Type"] = content_type
    boundary = header.get_param("boundary")
    if not isinstance(boundary, str) or not _BOUNDARY.fullmatch(boundary):
        raise InvalidRequestError(
            f"Content-Type: {content_type[:100]!r} (must name a boundary of 1 to 70 characters); "
            "let your HTTP library write this header"
        )
    return boundary.encode()


class FormParser:
    """Turns the bytes of a form into events. Holds a few KiB at most."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        # The first boundary may have no line before it.
        self._held = bytearray(_LINE)
        self._state = self._read_preamble
        self._events: list[FormEvent] = []
        self._num_parts = 0
        self.is_complete = False

    def feed(self, data: bytes) -> list[FormEvent]:
        """Return the events in the next bytes. Raises InvalidRequestError."""
        self._held += data
        while self._state():
            pass
        events, self._events = self._events, []
        return events

    def check_end(self) -> None:
        """Raise InvalidRequestError if the form ends too early."""
        if not self.is_complete:
            raise InvalidRequestError("the form ends before its last boundary")

    # Each of these reads what it can, and returns whether there is more to read.

    def _read_preamble(self) -> bool:
        place = self._held.find(self._delimiter)
        if place < 0 and len(self._held) > MAX_PREAMBLE_BYTES:
            raise InvalidRequestError("the form does not begin with its boundary")
        if place < 0:
            return False
        del self._held[: place + len(self._delimiter)]
        self._state = self._read_boundary_end
        return True

    def _read_boundary_end(self) -> bool:
        """Read the end of a boundary's line, which tells whether another part follows."""
        if self._held.startswith(b"--"):
            self.is_complete = True
            self._state = self._skip_rest
            return True
        place = self._held.find(_LINE)
        if place >= 0 and not self._held[:place].strip(_PADDING):
            del self._held[: place + len(_LINE)]
            self._state = self._read_head
            return True
        if place >= 0 or len(self._held) > _MAX_PADDING_BYTES:
            raise InvalidRequestError("a boundary of the form is followed by other text")
        return False

    def _read_head(self) -> bool:
        place = self._held.find(b"\r\n\r\n")
        if place > MAX_HEAD_BYTES or (place < 0 and len(self._held) > MAX_HEAD_BYTES):
            raise InvalidRequestError(
                f"a part of the form has more than {MAX_HEAD_BYTES} bytes of headers"
            )
        if place < 0:
            return False
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidRequestError(f"the form has more than {MAX_PARTS} parts")
        self._events.append(_parse_head(bytes(self._held[:place])))
        # The line break before the content also begins the delimiter of an empty content.
        del self._held[: place + len(_LINE)]
        self._state = self._skip_head_end
        return True

    def _skip_head_end(self) -> bool:
        if self._held.startswith(self._delimiter):
            del self._held[: len(self._delimiter)]
            self._state = self._read_boundary_end
            return True
        if len(self._held) < len(self._delimiter) and self._delimiter.startswith(self._held):
            return False
        del self._held[: len(_LINE)]
        self._state = self._read_content
        return True

    def _read_content(self) -> bool:
        place = self._held.find(self._delimiter)
        size = place if place >= 0 else len(self._held) - len(self._delimiter) + 1
        if size > 0:
            self._events.append(bytes(self._held[:size]))
            del self._held[:size]
        if place < 0:
            return False
        del self._held[: len(self._delimiter)]
        self._state = self._read_boundary_end
        return True

    def _skip_rest(self) -> bool:
        self._held.clear()
        return False


def _parse_head(head: bytes) -> PartStart:
    """Parse the headers of a part. Raises InvalidRequestError."""
    try:
        headers = HeaderParser().parsestr(head.decode())
        kind, name = headers.get_content_disposition(), None
        if kind == "form-data":
            name = headers.get_param("name", header="content-disposition")
        filename = headers.get_filename()
    except (UnicodeDecodeError, MessageError, ValueError, LookupError) as error:
        raise InvalidRequestError(
            f"the headers of a part cannot be read ({error}): {short_repr(head)}"
        ) from None
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(
            "a part must have a header like 'Content-Disposition: form-data; name=\"file\"', not "
            f"{short_repr(head)}"
        )
    return PartStart(name, filename)
