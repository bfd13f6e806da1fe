"""Request bodies: read within budgets, and parsed where that holds nobody up."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from pd.core.errors import InvalidRequestError, QueueFullError
from pd.proxy.background import INLINE_BYTES
from pd.proxy.fields import Fields, parse_object

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.requests import Request

    from pd.proxy.background import Background

T = TypeVar("T")

MAX_BODY_BYTES = 8 << 20
# Of all bodies that are being read or worked on, beyond the first FREE_BYTES of each. Those are not
# counted: the HTTP server holds as much for every connection, and connections are counted.
MAX_BODIES_BYTES = 64 << 20
FREE_BYTES = 64 << 10
# The rest of a body that is refused is read all the same, or the client would see a broken
# connection and no error; but not endlessly.
MAX_DISCARDED_BYTES = 64 << 20
# The parser makes an object of each value in one go, and meanwhile everybody waits.
MAX_VALUES = 1_250_000
MAX_PARTS = 1 << 17
_BLOCK = 1 << 20


class Counts(NamedTuple):
    """What a JSON text consists of. ``values``: commas, so members of lists and objects; ``parts``:
    lists, objects and strings."""

    values: int
    parts: int


def count_json(data: bytes) -> Counts:
    """Count without parsing; of what is not valid JSON any number may be returned.

    numpy lets go of Python's global lock meanwhile, so other threads run.
    """
    # What remains are quotes that begin or end a string.
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    values = openings = quotes = 0
    inside = False
    for start in range(0, len(data), _BLOCK):
        chars = np.frombuffer(data, np.uint8, min(_BLOCK, len(data) - start), start)
        is_quote = chars == ord('"')
        in_string = np.logical_xor.accumulate(is_quote)
        if inside:
            np.logical_not(in_string, out=in_string)
        inside = bool(in_string[-1])
        outside = ~in_string
        quotes += int(np.count_nonzero(is_quote))
        values += int(np.count_nonzero((chars == ord(",")) & outside))
        openings += int(np.count_nonzero(((chars == ord("{")) | (chars == ord("["))) & outside))
    return Counts(values, openings + quotes // 2)


class Body:
    """One request's body, and the work on it."""

    def __init__(self, data: bytes, background: Background) -> None:
        self._data = data
        self._background = background

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Call ``function(*args)``, on another thread if the body is large."""
        return await self._background.run(len(self._data), function, *args)

    async def read(self, function: Callable[[Fields], T]) -> T:
        """Parse the body and hand its object to ``function``, on another thread if it is large.

        Raises InvalidRequestError.
        """
        return await self.run(lambda: function(self._parse()))

    def _parse(self) -> Fields:
        if len(self._data) > INLINE_BYTES:
            counts = count_json(self._data)
            if counts.values > MAX_VALUES:
                raise InvalidRequestError(
                    f"the body has {counts.values} values; at most {MAX_VALUES} are taken"
                )
            if counts.parts > MAX_PARTS:
                raise InvalidRequestError(
                    f"the body has {counts.parts} lists, objects and strings; at most {MAX_PARTS} "
                    "are taken"
                )
        return Fields(parse_object(self._data))


class Bodies:
    """Reads bodies of requests, as many bytes at a time as the budget allows."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._held = 0

    @property
    def held(self) -> int:
        """Bytes counted at present."""
        return self._held

    @asynccontextmanager
    async def open(self, request: Request) -> AsyncIterator[Body]:
        """The request's body; its bytes count until the context ends.

        Raises:
            InvalidRequestError: it is too large.
            QueueFullError: too many bytes of bodies are in the proxy at present.
        """
        chunks: list[bytes] = []
        size = counted = 0
        full = False
        try:
            async for chunk in request.stream():
                size += len(chunk)
                more = max(0, size - FREE_BYTES) - counted
                if size > MAX_BODY_BYTES or full or self._held + more > MAX_BODIES_BYTES:
                    full = full or size <= MAX_BODY_BYTES
                    self._held -= counted
                    counted = 0
                    chunks.clear()
                    if size > MAX_DISCARDED_BYTES:
                        break
                    continue
                counted += more
                self._held += more
                chunks.append(chunk)
            if size > MAX_BODY_BYTES:
                raise InvalidRequestError(
                    f"the body has {'over ' if size > MAX_DISCARDED_BYTES else ''}{size} bytes; "
                    f"at most {MAX_BODY_BYTES} are taken"
                )
            if full:
                raise QueueFullError(
                    f"bodies of {MAX_BODIES_BYTES} bytes are being worked on; try again later"
                )
            yield Body(b"".join(chunks), self._background)
        finally:
            self._held -= counted
