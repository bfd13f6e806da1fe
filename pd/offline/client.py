"""Requests of an offline model: retries, errors and batches."""

from __future__ import annotations

import asyncio
import logging
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pd.core.errors import UnavailableError
from pd.offline.transport import read_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from pd.offline.transport import Transport

logger = logging.getLogger(__name__)
Item = TypeVar("Item")
Result = TypeVar("Result")

# A restarted proxy or node is back within this time.
PATIENCE_SECONDS = 120.0
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 2.0
# The server is busy, or a node failed. The same request may succeed later.
_PASSING = (429, 502, 503, 504)


class OfflineClient:
    """Sends requests until they have an answer that will not change.

    Args:
        patience: seconds for which we repeat a request that the server cannot serve now. With 0 we
            never do.
    """

    def __init__(self, transport: Transport, patience: float) -> None:
        self._transport = transport
        self._patience = patience

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """POST, and return the answer's JSON. Raises the server's error as a PDError."""
        return msgspec.json.decode(await self._request("POST", path, msgspec.json.encode(body)))

    async def get(self, path: str) -> Any:
        """GET, and return the answer's JSON. Raises as :meth:`post` does."""
        return msgspec.json.decode(await self._request("GET", path, b""))

    async def close(self) -> None:
        await self._transport.close()

    async def _request(self, method: str, path: str, content: bytes) -> bytes:
        deadline, wait = 0.0, _FIRST_WAIT
        while True:
            began, asked = time.monotonic(), 0.0
            try:
                reply = await self._transport.send(method, path, content)
                if reply.status == HTTPStatus.OK:
                    return reply.body
                error = read_error(reply)
                if reply.status not in _PASSING:
                    raise error
                asked = reply.retry_after
            except UnavailableError as lost:
                error = lost
            now = time.monotonic()
            if not deadline or now - began > self._patience:
                deadline = now + self._patience  # the server worked on it for long before it failed
            if now >= deadline:
                raise error
            logger.warning("sending a request again: %s", error.message)
            await asyncio.sleep(max(wait, asked))
            wait = min(2 * wait, _LONGEST_WAIT)


async def run_batch(
    items: Sequence[Item],
    work: Callable[[int, Item], Awaitable[Result]],
    concurrency: int,
    on_done: Callable[[], object],
) -> list[Result]:
    """Do work for each item, at most ``concurrency`` at a time, and return the results in order.

    The first error ends the other work and is raised.
    """
    results: dict[int, Result] = {}
    waiting = iter(enumerate(items))

    async def take_items() -> None:
        for number, item in waiting:
            results[number] = await work(number, item)
            on_done()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(items))):
                group.create_task(take_items())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [results[number] for number in range(len(items))]
