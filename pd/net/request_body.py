"""Reads bodies of administrative requests, up to a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterable


async def read_body(parts: AsyncIterable[bytes], limit: int) -> bytes | None:
    """Join the parts of a body. Return None as soon as they exceed ``limit`` bytes."""
    body = bytearray()
    async for part in parts:
        body += part
        if len(body) > limit:
            return None
    return bytes(body)
