"""Request bodies: read within budgets, and parsed where that holds nobody up."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from pd.core.errors import InvalidRequestError, QueueFullError
from pd.proxy.background import INLINE_BYTES, INLINE_TEXT_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from starlette.requests import Request
    from starlette.types import Scope

    from pd.proxy.background import Background
    from pd.proxy.request_model import RequestModel

    Model = TypeVar("Model", bound=RequestModel)

T = TypeVar("T")

MAX_BODY_BYTES = 8 << 20
# Limit for requests that generate nothing and tokenize nothing.
MAX_ADMIN_BODY_BYTES = 64 << 10
# Bytes of all bodies that are being read or worked on, but for the first FREE_BYTES of each. Those
# are not counted: the HTTP server holds as much for every connection, and connections are counted.
MAX_BODIES_BYTES = 64 << 20
FREE_BYTES = 64 << 10
# A body that takes longer than this to come is given up when others need its room.
SLOW_SECONDS = 2.0
# The rest of a body that is refused is read all the same, or the client would see a broken
# connection and no error; but not endlessly.
MAX_DISCARDED_BYTES = 64 << 20
# The parser makes an object of each value in one go, and meanwhile everybody waits.
MAX_VALUES = 1_250_000
MAX_PARTS = 1 << 17
_BLOCK = 1 << 20
# A list or an object takes as long to be parsed and validated as so many bytes that are none, and a
# prompt takes as long to be prepared as tokenizing so many bytes of text.
_PART_BYTES = 32
_PROMPT_BYTES = 32
# A character that is not ASCII takes as long to be tokenized as so many that are.
_OTHER_CHARACTER_BYTES = 3


class Counts(NamedTuple):
    """Contents of a JSON text. ``values``: commas, so members of lists and objects; ``parts``:
    lists, objects and strings."""

    values: int
    parts: int


def count_json(data: bytes) -> Counts:
    """Count without parsing; of what is not valid JSON any number may be returned.

    numpy lets go of Python's global lock meanwhile, so other threads run.
    """
    # The quotes that remain begin or end a string.
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


def text_size(prompts: Iterable[str | list[int]]) -> int:
    """Bytes of text that take as long to be tokenized as these prompts to be prepared."""
    size = 0
    for prompt in prompts:
        size += _PROMPT_BYTES
        if isinstance(prompt, str):
            size += len(prompt) * (1 if prompt.isascii() else _OTHER_CHARACTER_BYTES)
    return size


class Body:
    """One request's body until it is parsed, and the work on what it asked for."""

    def __init__(self, data: bytes, background: Background) -> None:
        self._data = data
        self._size = len(data)
        self._background = background

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Call ``function(*args)``, which tokenizes nothing, on another thread if the body is
        large."""
        return await self._background.run(self._size, function, *args)

    async def tokenize(
        self,
        function: Callable[..., T],
        *args: object,
        text: int | None = None,
        may_be_long: bool = False,
    ) -> T:
        """Call ``function(*args)``, which tokenizes, on another thread unless it is a short text.

        Args:
            text: bytes of text, see :func:`text_size`; without it as many as the body has.
            may_be_long: it may take long, however short the text is.
        """
        text = self._size if text is None else text
        if not may_be_long and text <= INLINE_TEXT_BYTES and self._size <= INLINE_BYTES:
            return function(*args)
        return await self._background.run_on_thread(max(self._size, text), function, *args)

    async def read(self, model: type[Model]) -> Model:
        """Parse and validate the body, on another thread if it is large.

        The bytes are dropped: the body is read once, and its request may last for hours.

        Raises InvalidRequestError.
        """
        data, self._data = self._data, b""
        # A large body goes to a thread whatever it holds.
        small = len(data) <= INLINE_BYTES
        parts = data.count(b"[") + data.count(b"{") if small else 0
        size = len(data) + _PART_BYTES * parts
        return await self._background.run(size, _parse, data, model)


def _parse(data: bytes, model: type[Model]) -> Model:
    if len(data) > INLINE_BYTES:
        counts = count_json(data)
        if counts.values > MAX_VALUES:
            raise InvalidRequestError(
                f"the body has {counts.values} values; at most {MAX_VALUES} are taken"
            )
        if counts.parts > MAX_PARTS:
            raise InvalidRequestError(
                f"the body has {counts.parts} lists, objects and strings; at most {MAX_PARTS} "
                "are taken"
            )
    return model.parse(data)


def body_of(scope: Scope) -> Body:
    """The body of a request whose handler is called with it."""
    body = scope["state"]["body"]
    assert isinstance(body, Body)
    return body


class _Incoming:
    """A body that is being read, or was given up for want of room."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.chunks: list[bytes] = []
        self.counted = 0
        self.given_up = False


class Bodies:
    """Reads bodies of requests, as many bytes at a time as the budget allows. Bodies that come
    slowly give way to others, or a few clients that send almost all of one would use it up."""

    def __init__(self, background: Background, processes: int = 1) -> None:
        """``processes``: those of the proxy, which share the budget evenly."""
        self._background = background
        self._processes = processes
        self._held = 0
        # Bodies that are not complete, the oldest first.
        self._incoming: dict[_Incoming, None] = {}

    @property
    def held(self) -> int:
        """Bytes counted at present."""
        return self._held

    @property
    def _budget(self) -> int:
        """Bytes that may be counted at a time: room for two bodies at least."""
        least = min(MAX_BODIES_BYTES, 2 * MAX_BODY_BYTES)
        return max(MAX_BODIES_BYTES // self._processes, least)

    @asynccontextmanager
    async def open(self, request: Request, *, administrative: bool) -> AsyncIterator[Body]:
        """The request's body; its bytes count until the context ends.

        ``administrative``: a body of at most MAX_ADMIN_BODY_BYTES.

        Raises:
            InvalidRequestError: it is too large.
            QueueFullError: too many bytes of bodies are in the proxy at present.
        """
        body, size = _Incoming(), 0
        most = MAX_ADMIN_BODY_BYTES if administrative else MAX_BODY_BYTES
        self._incoming[body] = None
        try:
            async for chunk in request.stream():
                size += len(chunk)
                more = max(0, size - FREE_BYTES) - body.counted
                if size > most or body.given_up or not self._make_room(body, more):
                    self._give_up(body)
                    if size > MAX_DISCARDED_BYTES:
                        break
                    continue
                body.counted += more
                self._held += more
                body.chunks.append(chunk)
            self._incoming.pop(body, None)
            if size > most:
                raise InvalidRequestError(
                    f"the body has {'over ' if size > MAX_DISCARDED_BYTES else ''}{size} bytes; "
                    f"at most {most} are taken"
                )
            if body.given_up:
                raise QueueFullError(
                    f"bodies of {self._budget} bytes are being worked on; try again later"
                )
            yield Body(b"".join(body.chunks), self._background)
        finally:
            self._give_up(body)

    def _make_room(self, body: _Incoming, more: int) -> bool:
        """Whether ``more`` bytes of a body may be held, giving up slow ones if need be."""
        while self._held + more > self._budget:
            oldest = next(iter(self._incoming))
            if oldest is body or time.monotonic() - oldest.since < SLOW_SECONDS:
                return False
            self._give_up(oldest)
        return True

    def _give_up(self, body: _Incoming) -> None:
        """Hold nothing of a body any more."""
        self._incoming.pop(body, None)
        self._held -= body.counted
        body.counted, body.given_up = 0, True
        body.chunks.clear()
