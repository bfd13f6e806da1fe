"""Requests of an offline model to a server that fails at times."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from pd.core.errors import InvalidRequestError, QueueFullError, UnavailableError
from pd.offline.client import OfflineClient, run_batch
from pd.offline.transport import ProxyReply

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

BUSY = ProxyReply(429, b'{"error": {"code": "queue_full", "message": "full", "param": null}}')
WRONG = ProxyReply(400, b'{"error": {"code": "invalid_request", "message": "no", "param": "n"}}')
FINE = ProxyReply(200, b'{"text": "fine"}')
LOST = UnavailableError("lost")


class ScriptedTransport:
    """Answers with one reply or error of a list after the other, and then with the last."""

    def __init__(self, *script: ProxyReply | UnavailableError) -> None:
        self._script = list(script)
        self.sent: list[object] = []

    async def send(self, method: str, path: str, content: bytes = b"") -> ProxyReply:
        self.sent.append(json.loads(content))
        answer = self._script.pop(0) if len(self._script) > 1 else self._script[0]
        if isinstance(answer, UnavailableError):
            raise answer
        return answer

    def stream(self, path: str, content: bytes) -> AsyncGenerator[bytes, None]:
        raise NotImplementedError

    async def close(self) -> None: ...


def post(transport: ScriptedTransport, patience: float) -> object:
    return asyncio.run(OfflineClient(transport, patience).post("/generate", {"n": 1}))


def test_a_request_is_sent_again_while_the_server_is_busy_or_away() -> None:
    transport = ScriptedTransport(BUSY, LOST, FINE)
    assert post(transport, 60.0) == {"text": "fine"}
    assert transport.sent == [{"n": 1}] * 3


def test_a_wrong_request_is_sent_once() -> None:
    transport = ScriptedTransport(WRONG, FINE)
    with pytest.raises(InvalidRequestError, match="no") as refused:
        post(transport, 60.0)
    assert refused.value.param == "n"
    assert len(transport.sent) == 1


def test_patience_ends() -> None:
    with pytest.raises(QueueFullError, match="full"):
        post(ScriptedTransport(BUSY), 0.15)
    with pytest.raises(UnavailableError, match="lost"):
        post(ScriptedTransport(LOST), 0.15)
    transport = ScriptedTransport(LOST, FINE)
    with pytest.raises(UnavailableError, match="lost"):
        post(transport, 0.0)
    assert len(transport.sent) == 1


def test_an_answer_without_our_errors_is_quoted() -> None:
    with pytest.raises(Exception, match="status 500: <html>"):
        post(ScriptedTransport(ProxyReply(500, b"<html>\xff")), 0.0)


def test_a_batch_does_so_much_at_a_time_and_ends_with_the_first_error() -> None:
    under_way: set[int] = set()
    most = 0
    ended: list[int] = []

    async def work(number: int, item: int) -> int:
        nonlocal most
        under_way.add(number)
        most = max(most, len(under_way))
        try:
            await asyncio.sleep(0)
            if item < 0:
                raise ValueError(f"item {number}")
            return 2 * item
        finally:
            under_way.discard(number)

    def run(items: list[int]) -> list[int]:
        return asyncio.run(run_batch(items, work, 3, lambda: ended.append(1)))

    assert run(list(range(10))) == list(range(0, 20, 2))
    assert most == 3
    assert len(ended) == 10
    with pytest.raises(ValueError, match="item 1"):
        run([1, -1, *range(100)])
    assert not under_way
    assert len(ended) < 20
