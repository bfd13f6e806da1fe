"""An HTTP request to a server we do not trust, with limits on its time and size."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping


def fetch(
    url: str,
    limit: int,
    seconds: float,
    *,
    content: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    context: ssl.SSLContext | None = None,
) -> tuple[int, bytes]:
    """Send ``GET``, or ``POST`` with content, and return status and body.

    We follow no redirect and ignore the environment's proxies, so headers reach no other server.

    Args:
        limit: largest accepted body, in bytes.
        context: checks the server's certificate; default: against the system's authorities.

    Raises:
        OSError or ValueError: no HTTP answer within these limits.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port
    connection = (
        http.client.HTTPSConnection(host, port, timeout=seconds, context=context)
        if parts.scheme == "https"
        else http.client.HTTPConnection(host, port, timeout=seconds)
    )
    # The socket's timeout restarts with every byte, so it would let a slow answer last for ever.
    is_late = threading.Event()
    watchdog = threading.Timer(seconds, _shut_down, [connection, is_late])
    watchdog.daemon = True
    watchdog.start()
    try:
        target, method = parts.path or "/", "GET" if content is None else "POST"
        connection.request(method, target, content, dict(headers or {}))
        response = connection.getresponse()
        body = response.read(limit + 1)
    except http.client.HTTPException as error:
        raise ValueError(f"{target}: not an HTTP answer ({type(error).__name__})") from None
    finally:
        watchdog.cancel()
        connection.close()
    if is_late.is_set():
        raise TimeoutError(f"{target}: the answer takes longer than {seconds:g} s")
    if len(body) > limit:
        raise ValueError(f"{target}: the answer exceeds {limit} bytes")
    if response.length:
        raise ValueError(f"{target}: the answer ends {response.length} bytes early")
    return response.status, body


def _shut_down(connection: http.client.HTTPConnection, is_late: threading.Event) -> None:
    is_late.set()
    with contextlib.suppress(OSError, AttributeError):  # the request has just ended
        connection.sock.shutdown(socket.SHUT_RDWR)
