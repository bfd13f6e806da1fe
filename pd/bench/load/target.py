"""The measured server: its address, requests for the wire, and connections."""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from pd.bench.load.reception import Reception
from pd.bench.load.stamped import connect_stamped
from pd.core.addresses import format_host
from pd.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

R = TypeVar("R", bound=Reception)


@dataclass(frozen=True)
class EndpointAddress:
    """The address of an endpoint.

    Attributes:
        path: path of the endpoint, including the path of the URL.
        api_key: bearer token of requests; None for none.
    """

    host: str
    port: int
    tls: bool
    path: str
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, path: str, api_key: str | None = None) -> EndpointAddress:
        """Parse a URL. Raises UsageError for an invalid one."""
        parts = split_url(url)
        if parts is None or parts.hostname is None:
            raise UsageError(f"--url is http://HOST:PORT or https://HOST, not {url}")
        tls = parts.scheme == "https"
        where = parts.path.rstrip("/") + path
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, where, api_key)

    def make_request(
        self, body: Mapping[str, Any], name: str = "", *, keep_alive: bool = False
    ) -> bytes:
        """Make a request for the wire. ``name`` becomes its X-Request-Id."""
        content = json.dumps(body, separators=(",", ":")).encode()
        headers = {
            "Host": f"{format_host(self.host)}:{self.port}",
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            "Content-Length": len(content),
            "X-Request-Id": name,
            "Connection": "keep-alive" if keep_alive else "close",
            "Authorization": "" if self.api_key is None else f"Bearer {self.api_key}",
        }
        lines = [f"{key}: {value}\r\n" for key, value in headers.items() if value != ""]
        return f"POST {self.path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode() + content

    async def connect(self) -> Reception:
        """Open a connection for one request. Raises OSError."""
        if self.tls:
            return await self.connect_unstamped(Reception)
        reception = Reception()
        await connect_stamped(self.host, self.port, reception)
        return reception

    async def connect_unstamped(self, make: Callable[[], R]) -> R:
        """Open a connection whose pieces get the time at which we read them. Raises OSError."""
        loop = asyncio.get_running_loop()
        tls = make_tls_context() if self.tls else None
        _, reception = await loop.create_connection(make, self.host, self.port, ssl=tls)
        return reception


def split_url(url: str) -> SplitResult | None:
    """Split an address of HTTP or HTTPS, with or without ``http://``; None for any other text.

    The parts have a ``hostname``, and a ``port`` that is None or at least 1.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        # NOTE: urlsplit parses the port only on access, and raises ValueError then.
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        return None
    return parts if is_address else None


@functools.cache
def make_tls_context() -> ssl.SSLContext:
    """Make a context that trusts this machine's authorities, or the file ``SSL_CERT_FILE``."""
    # NOTE: we cache it, because making it reads every certificate of the machine.
    return ssl.create_default_context()
