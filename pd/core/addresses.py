"""Addresses: hosts in URLs, the URLs of nodes, and the sockets of HTTP servers."""

from __future__ import annotations

import errno
import socket
from typing import Any
from urllib.parse import urlsplit

from pd.core.brief import brief
from pd.core.errors import InvalidRequestError, SetupError

_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def in_url(host: str) -> str:
    """A name or an IP address as it stands in a URL: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def bind(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A TCP socket that is bound and does not listen yet. Of the addresses that a name has, it gets
    the first that this host has, those of IPv4 before others.

    Raises SetupError in one line, naming ``flag``.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise SetupError(f"cannot use the address {host}:{port}: {error.strerror}") from None
    reason: str | None = None
    for family, kind, protocol, _, address in sorted(found, key=lambda x: x[0] != socket.AF_INET):
        try:
            return _bound(socket.socket(family, kind, protocol), address)
        except OSError as error:
            reason = error.strerror
            if error.errno not in _NO_SUCH_ADDRESS:
                break  # a port that is taken is taken, whatever other addresses there are
    raise SetupError(f"cannot listen on {host}:{port}: {reason}; choose another {flag} or --host")


def _bound(made: socket.socket, address: tuple[Any, ...]) -> socket.socket:
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def check_node_url(text: str) -> str:
    """The URL as ``scheme://host:port``.

    Raises InvalidRequestError for anything else: a path, a query or user info would make the proxy
    send requests to whatever address a client chose. The message shows none of these, because
    they may hold a password.
    """
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    else:
        # urlsplit drops some control characters instead of refusing them.
        if not text.isprintable() or " " in text or parts.scheme not in ("http", "https"):
            host = None
    if not host or port == 0:
        raise InvalidRequestError(
            "a node's url must be like http://host:port"
            + ("" if "@" in text else f", not {brief(text)}"),
            param="url",
        )
    url = f"{parts.scheme}://{in_url(host)}" + ("" if port is None else f":{port}")
    extra = {
        "user info": "@" in parts.netloc,
        "a path": parts.path not in ("", "/"),
        "a query": bool(parts.query) or "?" in text,
        "a fragment": bool(parts.fragment) or "#" in text,
    }
    found = [name for name, there in extra.items() if there]
    if found:
        raise InvalidRequestError(
            f"a node's url is only http://host:port; {brief(url)} came with {' and '.join(found)}",
            param="url",
        )
    return url
