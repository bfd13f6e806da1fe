"""Pd's native requests over a connection, for the language."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from pd.core.errors import NodeFailedError, NotFoundError
from pd.lang.native import NativeBackend
from pd.offline.client import OfflineClient

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Mapping

    from pd.offline.connection import Connection


def make_backend(connection: Connection) -> NativeBackend:
    """Make a backend for programs. Raises PDError if the model's description cannot be had."""
    return NativeBackend(ConnectionService(connection))


class ConnectionService:
    """The requests of :class:`pd.lang.backend.NativeService`, sent over a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._client = OfflineClient(connection.transport, 0.0)

    def generate(self, body: Mapping[str, Any]) -> Any:
        return self._post("/generate", body)

    def stream(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        parts = self._connection.transport.stream("/generate", msgspec.json.encode(body))
        return self._connection.iterate(_read_events(parts))

    def abort(self, rid: str) -> None:
        try:
            self._post("/abort_request", {"rid": rid})
        except NotFoundError:
            return  # it has ended

    def flush_cache(self) -> None:
        self._post("/flush_cache", {})

    def describe_model(self) -> dict[str, Any]:
        return self._get("/get_model_info")

    def describe_tokenizer(self) -> dict[str, Any]:
        return self._get("/tokenizer_info")

    def describe_server(self) -> dict[str, Any]:
        return self._get("/server_info")

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._connection.run(self._client.post(path, body))

    def _get(self, path: str) -> dict[str, Any]:
        answer: dict[str, Any] = self._connection.run(self._client.get(path))
        return answer


async def _read_events(parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the events of a stream until its end. Raises NodeFailedError for an error in it."""
    received = b""
    try:
        async for part in parts:
            *events, received = (received + part).split(b"\n\n")
            for event in events:
                data = event.removeprefix(b"data: ")
                if data == b"[DONE]":
                    return
                value = msgspec.json.decode(data)
                if "error" in value:
                    raise NodeFailedError(value["error"]["message"])
                yield value
    finally:
        await parts.aclose()
