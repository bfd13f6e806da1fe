"""The measured server: its address, and requests as they go over the wire."""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from pd.bench.load.reception import Reception
from pd.bench.load.stamped import connect_stamped
from pd.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class EndpointAddress:
    """The address of an endpoint.

    Attributes:
        path: path of the endpoint, below that of the URL.
        api_key: sent as a bearer token; None for none.
    """

    host: str
    port: int
    tls: bool
    path: str
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, path: str, api_key: str | None = None) -> EndpointAddress:
        """Raises UsageError for an address that is none."""
        parts = split_url(url)
        if parts is None or parts.hostname is None:
            raise UsageError(f"--url is http://HOST:PORT or https://HOST, not {url}")
        tls = parts.scheme == "https"
        where = parts.path.rstrip("/") + path
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, where, api_key)

    def head(self, size: int, name: str) -> bytes:
        """Head of a request whose body has ``size`` bytes; ``name`` becomes its X-Request-Id."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            f"Content-Length: {size}",
            f"X-Request-Id: {name}",
            "Connection: close",
        ]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def request(self, body: Mapping[str, Any], name: str) -> bytes:
        """A request as it goes over the wire."""
        content = json.dumps(body, separators=(",", ":")).encode()
        return self.head(len(content), name) + content

    async def connect(self) -> Reception:
        """A connection on which nothing was sent yet. Raises OSError."""
        if not self.tls:
            reception = Reception()
            await connect_stamped(self.host, self.port, reception)
            return reception
        loop = asyncio.get_running_loop()
        context = tls_context()
        _, reception = await loop.create_connection(Reception, self.host, self.port, ssl=context)
        return reception


def split_url(url: str) -> SplitResult | None:
    """Parts of an address of HTTP or HTTPS, which may lack ``http://``; None for what is none.

    The parts have a ``hostname``, and a ``port`` that is None or at least 1.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        # NOTE: the port is read from the text only here, and may be none.
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        return None
    return parts if is_address else None


@functools.cache
def tls_context() -> ssl.SSLContext:
    """A context that trusts the authorities of this machine, or of the file ``SSL_CERT_FILE``."""
    # NOTE: made once: it reads every certificate of the machine.
    return ssl.create_default_context()
