"""Ways to a proxy: HTTP, or a call of its application in this process."""

from __future__ import annotations

import contextlib
import ssl
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple, Protocol

import httpx
import msgspec

from pd import __version__
from pd.core.addresses import parse_base_url
from pd.core.errors import PDError, UnavailableError, error_from_kind
from pd.proxy.http.exchange import Exchange, make_scope

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncGenerator

    from starlette.types import ASGIApp


_CONNECT_SECONDS = 10.0
# Shorter than servers keep idle connections, so none closes one while we send.
_IDLE_SECONDS = 2.0


class ProxyReply(NamedTuple):
    """A whole answer.

    Attributes:
        retry_after: seconds for which the server asks us to wait before we try again.
    """

    status: int
    body: bytes
    retry_after: float = 0.0


def read_error(reply: ProxyReply) -> PDError:
    """Make the error that a server answered with."""
    try:
        error = msgspec.json.decode(reply.body)["error"]
        return error_from_kind(error["code"], error["message"], error["param"])
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        text = reply.body[:300].decode(errors="replace")
        return PDError(f"the server answered with status {reply.status}: {text}")


class Transport(Protocol):
    """Sends requests to a proxy. Cancelling a call aborts its request."""

    async def send(self, method: str, path: str, content: bytes = b"") -> ProxyReply:
        """Send a request and wait for the whole answer.

        Raises UnavailableError if the connection failed, and NodeFailedError if the engine ended.
        """

    def stream(self, path: str, content: bytes) -> AsyncGenerator[bytes, None]:
        """POST, and yield the parts of the answer as they come. Closing the generator aborts the
        request. Raises as :meth:`send` does, and the error of an answer whose status is not 200."""

    async def close(self) -> None: ...


class HttpTransport:
    """Sends requests to a running proxy.

    We set no limit on the time of an answer, because a long batch may take hours.
    """

    def __init__(self, url: str, api_key: str | None, connections: int) -> None:
        """Raises UsageError for an invalid address."""
        self.url = parse_base_url(url, "url", "api_key")
        headers = {"Accept-Encoding": "identity", "User-Agent": f"pd/{__version__}"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        tls = ssl.create_default_context() if self.url.startswith("https:") else False
        # We ignore proxies of the environment, so the key reaches only the named server.
        self._client = httpx.AsyncClient(
            headers=headers,
            verify=tls,
            trust_env=False,
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=connections, keepalive_expiry=_IDLE_SECONDS),
        )

    async def send(self, method: str, path: str, content: bytes = b"") -> ProxyReply:
        headers = {"Content-Type": "application/json"} if content else {}
        try:
            answer = await self._client.request(
                method, self.url + path, content=content, headers=headers
            )
        except httpx.HTTPError as error:
            raise self._name_error(error) from error
        wait = answer.headers.get("retry-after", "")
        return ProxyReply(
            answer.status_code, answer.content, float(wait[:9]) if wait.isdecimal() else 0.0
        )

    async def stream(self, path: str, content: bytes) -> AsyncGenerator[bytes, None]:
        headers = {"Content-Type": "application/json"}
        try:
            async with self._client.stream(
                "POST", self.url + path, content=content, headers=headers
            ) as answer:
                if answer.status_code != HTTPStatus.OK:
                    raise read_error(ProxyReply(answer.status_code, await answer.aread()))
                async for part in answer.aiter_raw():
                    yield part
        except httpx.HTTPError as error:
            raise self._name_error(error) from error

    async def close(self) -> None:
        await self._client.aclose()

    def _name_error(self, error: httpx.HTTPError) -> PDError:
        return UnavailableError(f"no answer from {self.url}: {str(error) or type(error).__name__}")


class AppTransport:
    """Calls the application of a proxy in this process, on the proxy's event loop.

    Args:
        failure: gets the error for all requests when nothing can be answered any more.
    """

    def __init__(self, app: ASGIApp, failure: asyncio.Future[PDError]) -> None:
        self._app = app
        self._failure = failure

    async def send(self, method: str, path: str, content: bytes = b"") -> ProxyReply:
        exchange = self._begin(method, path, content)
        async with contextlib.aclosing(exchange.iter_parts()) as parts:
            body = b"".join([part async for part in parts])
        return ProxyReply(exchange.status, body)

    async def stream(self, path: str, content: bytes) -> AsyncGenerator[bytes, None]:
        exchange = self._begin("POST", path, content)
        error = bytearray()
        async with contextlib.aclosing(exchange.iter_parts()) as parts:
            async for part in parts:
                if exchange.status == HTTPStatus.OK:
                    yield part
                else:
                    error += part
        if exchange.status != HTTPStatus.OK:
            raise read_error(ProxyReply(exchange.status, bytes(error)))

    async def close(self) -> None:
        """Nothing to close: the proxy ends with its engine."""

    def _begin(self, method: str, path: str, content: bytes) -> Exchange:
        return Exchange(self._app, make_scope(method, path, content), content, self._failure)
