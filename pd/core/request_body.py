"""Bodies of requests that administrate: read whole, and bounded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterable


async def read_body(parts: AsyncIterable[bytes], most: int) -> bytes | None:
    """All parts of a body; None as soon as it has more than ``most`` bytes."""
    body = bytearray()
    async for part in parts:
        body += part
        if len(body) > most:
            return None
    return bytes(body)
