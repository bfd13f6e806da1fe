"""Stored content on its way to clients, which may read slowly or not at all."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pd.core.errors import QueueFullError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from pd.proxy.http.typed_routes import ClientRequest

# Answers up to this size are not counted, because the HTTP server holds as much per connection.
PIECE_BYTES = 64 << 10
# Limits of simultaneous larger answers of a kind from one process, because each of them holds a
# block of a file or a whole response.
MAX_ANSWERS, MAX_KEY_ANSWERS = 64, 16


class LargeAnswers:
    """Counts large answers by key. Runs on the event loop."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    @contextmanager
    def take_turn(self, owner: str, size: int) -> Iterator[None]:
        """Count an answer of ``size`` bytes in this context. Raises QueueFullError."""
        if size <= PIECE_BYTES:
            yield
            return
        if self._counts[owner] >= MAX_KEY_ANSWERS or self._counts.total() >= MAX_ANSWERS:
            raise QueueFullError(
                f"{self._counts[owner]} large answers are on their way to you (limit "
                f"{MAX_KEY_ANSWERS}; {MAX_ANSWERS} of all keys); read them first"
            )
        self._counts[owner] += 1
        try:
            yield
        finally:
            self._counts[owner] -= 1
            self._counts += Counter()  # drops keys without answers


async def send_pieces(request: ClientRequest, size: int, blocks: AsyncIterator[bytes]) -> None:
    """Send a body of ``size`` bytes in small pieces, and stop if the client leaves.

    The transport holds everything that it is given, so it gets a piece when the client has read
    the one before. If ``blocks`` end too early, the server closes the connection.
    """
    sent = 0
    async for block in blocks:
        for start in range(0, len(block), PIECE_BYTES):
            piece = block[start : start + PIECE_BYTES]
            sent += len(piece)
            await request.send_part(piece, is_last=sent >= size)
        if sent >= size or await request.is_disconnected():
            return
