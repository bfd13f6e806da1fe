"""Request bodies: read within a memory budget, and parsed off the event loop if large."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, TypeVar

import numpy as np

from pd.core.errors import InvalidRequestError, QueueFullError
from pd.proxy.http.background import INLINE_BYTES, INLINE_TEXT_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from starlette.requests import Request

    from pd.proxy.http.background import Background

T = TypeVar("T")


class BodyModel(Protocol):
    """A model that validates a body."""

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parse a JSON text. Raises InvalidRequestError."""


Model = TypeVar("Model", bound=BodyModel)

MAX_BODY_BYTES = 8 << 20
# Limit for administrative requests, which neither generate nor tokenize.
MAX_ADMIN_BODY_BYTES = 64 << 10
# Budget for the bytes of all bodies in work. The first FREE_BYTES of each body are not counted,
# because the HTTP server holds as much per connection, and connections are limited.
MAX_BODIES_BYTES = 64 << 20
FREE_BYTES = 64 << 10
# A body that takes longer to arrive is dropped when others need its room.
SLOW_SECONDS = 2.0
# We read the rest of a refused body, up to this size, because otherwise the client would see a
# broken connection instead of the error.
MAX_DISCARDED_BYTES = 64 << 20
# The parser creates the objects of all values in a single call, and all other threads wait for it.
MAX_VALUES = 1_250_000
MAX_PARTS = 1 << 17
_BLOCK = 1 << 20
# Costs in bytes of plain text: parsing and validating a list or an object, and preparing a prompt.
_PART_BYTES = 32
_PROMPT_BYTES = 32
# Tokenizing a character outside ASCII costs as much as this many ASCII characters.
_OTHER_CHARACTER_BYTES = 3


class Counts(NamedTuple):
    """Size of a JSON text's contents.

    Attributes:
        values: number of commas, so about the members of all lists and objects.
        parts: number of lists, objects and strings.
    """

    values: int
    parts: int


def count_json(data: bytes) -> Counts:
    """Count the contents of a JSON text without parsing it. Invalid JSON gives any counts.

    Other threads can run meanwhile, because numpy releases the global interpreter lock.
    """
    # Without escapes, every quote begins or ends a string.
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


def estimate_text_bytes(prompts: Iterable[str | list[int]]) -> int:
    """Estimate the cost of preparing prompts, as bytes of text to tokenize."""
    size = 0
    for prompt in prompts:
        size += _PROMPT_BYTES
        if isinstance(prompt, str):
            size += len(prompt) * (1 if prompt.isascii() else _OTHER_CHARACTER_BYTES)
    return size


class RawBody:
    """A request's bytes until they are parsed, and the CPU work for the request.

    Work is called here or on another thread, depending on the size of the body.
    """

    def __init__(
        self, data: bytes, background: Background, release: Callable[[], None] | None = None
    ) -> None:
        """``release`` returns the body's bytes to the budget. It may be called several times."""
        self._data = data
        self._size = len(data)
        self._background = background
        self._release = release

    def release(self) -> None:
        """Return the body's bytes to the budget, because preparing the request is over."""
        if self._release is not None:
            self._release()

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Call ``function(*args)``, on another thread if the body is large.

        Use :meth:`run_tokenizing` for functions that tokenize.
        """
        return await self._background.run(self._size, function, *args)

    async def run_tokenizing(
        self,
        function: Callable[..., T],
        *args: object,
        text_bytes: int | None = None,
        may_be_long: bool = False,
    ) -> T:
        """Call ``function(*args)``, which tokenizes, on another thread unless the text is short.

        Args:
            text_bytes: cost as of :func:`estimate_text_bytes`; the body's size if None.
            may_be_long: the call may take long even for a short text.
        """
        if text_bytes is None:
            text_bytes = self._size
        if not may_be_long and text_bytes <= INLINE_TEXT_BYTES and self._size <= INLINE_BYTES:
            return function(*args)
        return await self._background.run_on_thread(max(self._size, text_bytes), function, *args)

    async def parse(self, model: type[Model]) -> Model:
        """Parse and validate the body, on another thread if it is large.

        We drop the bytes, because a body is parsed once and its request may last for hours.

        Raises InvalidRequestError.
        """
        data, self._data = self._data, b""
        # A large body goes to a thread in any case, so we do not scan it here.
        small = len(data) <= INLINE_BYTES
        parts = data.count(b"[") + data.count(b"{") if small else 0
        size = len(data) + _PART_BYTES * parts
        return await self._background.run(size, _parse_body, data, model)


def _parse_body(data: bytes, model: type[Model]) -> Model:
    if len(data) > INLINE_BYTES:
        counts = count_json(data)
        if counts.values > MAX_VALUES:
            raise InvalidRequestError(
                f"the body has {counts.values} values; at most {MAX_VALUES} are allowed"
            )
        if counts.parts > MAX_PARTS:
            raise InvalidRequestError(
                f"the body has {counts.parts} lists, objects and strings; at most {MAX_PARTS} "
                "are allowed"
            )
    return model.parse(data)


class _IncomingBody:
    """A body on its way.

    Attributes:
        counted: its bytes in the budget.
        is_dropped: we hold nothing of it any more.
    """

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.chunks: list[bytes] = []
        self.counted = 0
        self.is_dropped = False


class Bodies:
    """Reads request bodies within a budget of bytes.

    Slow bodies make room for others. Otherwise a few clients could use up the budget by withholding
    the ends of their bodies.
    """

    def __init__(self, background: Background, processes: int = 1) -> None:
        """``processes``: number of the proxy's processes. They share the budget evenly."""
        self._background = background
        self._processes = processes
        self._held = 0
        # Incomplete bodies, oldest first.
        self._incoming: dict[_IncomingBody, None] = {}

    @property
    def held(self) -> int:
        """Number of bytes in the budget now."""
        return self._held

    @property
    def _budget(self) -> int:
        # There is always room for two bodies.
        least = min(MAX_BODIES_BYTES, 2 * MAX_BODY_BYTES)
        return max(MAX_BODIES_BYTES // self._processes, least)

    @asynccontextmanager
    async def open_body(self, request: Request, *, is_small: bool) -> AsyncIterator[RawBody]:
        """Read a request's body. Its bytes count until it is released or the context ends.

        ``is_small`` limits the body to MAX_ADMIN_BODY_BYTES.

        Raises:
            InvalidRequestError: the body is too large.
            QueueFullError: the budget is used up.
        """
        body, size = _IncomingBody(), 0
        limit = MAX_ADMIN_BODY_BYTES if is_small else MAX_BODY_BYTES
        self._incoming[body] = None
        try:
            async for chunk in request.stream():
                size += len(chunk)
                more = max(0, size - FREE_BYTES) - body.counted
                if size > limit or body.is_dropped or not self._make_room(body, more):
                    self._drop(body)
                    if size > MAX_DISCARDED_BYTES:
                        break
                    continue
                body.counted += more
                self._held += more
                body.chunks.append(chunk)
            self._incoming.pop(body, None)
            if size > limit:
                raise InvalidRequestError(
                    f"the body has {'over ' if size > MAX_DISCARDED_BYTES else ''}{size} bytes; "
                    f"at most {limit} are allowed"
                )
            if body.is_dropped:
                raise QueueFullError(
                    f"bodies of {self._budget} bytes are being worked on; try again later"
                )
            yield RawBody(b"".join(body.chunks), self._background, partial(self._drop, body))
        finally:
            self._drop(body)

    def _make_room(self, body: _IncomingBody, more: int) -> bool:
        """Make sure ``more`` bytes of a body fit the budget, dropping slow bodies if needed."""
        while self._held + more > self._budget:
            oldest = next(iter(self._incoming))
            if oldest is body or time.monotonic() - oldest.since < SLOW_SECONDS:
                return False
            self._drop(oldest)
        return True

    def _drop(self, body: _IncomingBody) -> None:
        """Forget a body's bytes. It may have been dropped before."""
        self._incoming.pop(body, None)
        self._held -= body.counted
        body.counted, body.is_dropped = 0, True
        body.chunks.clear()
