"""Addresses: hosts in URLs, the URLs of nodes, and the sockets of HTTP servers."""

from __future__ import annotations

import contextlib
import errno
import functools
import ipaddress
import re
import socket
from urllib.parse import urlsplit

from pd.core.brief import short_repr, shorten_text
from pd.core.errors import InvalidRequestError, SetupError, UsageError

_HOST_NAME = re.compile(r"\w[\w-]*(\.\w[\w-]*)*\.?")
_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def format_host(host: str) -> str:
    """Format a host for a URL: IPv6 addresses get brackets."""
    return f"[{host}]" if ":" in host else host


def is_host(text: str) -> bool:
    """Whether the text is an IP address or looks like a host name."""
    if _HOST_NAME.fullmatch(text):
        return True
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def resolve_host(host: str) -> str:
    """Return the IP address of a host. If it has several, prefer IPv4 and then the first.

    Raises OSError or UnicodeError.
    """
    addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(addresses, key=lambda each: each[0] != socket.AF_INET)[4][0])


def is_of_this_machine(address: str) -> bool:
    """Whether this machine has an IP address."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def bind_socket(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Bind a TCP socket, without listening.

    If a name has several addresses, we use the first one of this host and try IPv4 first. Raises
    SetupError in one line, naming ``flag``.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise SetupError(f"cannot use the address {host}:{port}: {error.strerror}") from None
    reason: str | None = None
    addresses.sort(key=lambda each: each[0] != socket.AF_INET)
    for family, kind, protocol, _, address in addresses:
        with contextlib.ExitStack() as on_error:
            try:
                listener = on_error.enter_context(socket.socket(family, kind, protocol))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
            except OSError as error:
                reason = error.strerror
                if error.errno not in _NO_SUCH_ADDRESS:
                    break  # the port is taken, so other addresses would not help
            else:
                on_error.pop_all()
                return listener
    raise SetupError(f"cannot listen on {host}:{port}: {reason}; choose another {flag} or --host")


def check_node_url(text: str) -> str:
    """Normalize the URL of a node to ``scheme://host:port``.

    Raises InvalidRequestError if the URL has a path, a query or user info, because a client could
    make the proxy send requests to any address with them. The message does not show these parts,
    because they may hold a password.
    """
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    else:
        # urlsplit drops some control characters instead of rejecting them.
        if not text.isprintable() or " " in text or parts.scheme not in ("http", "https"):
            host = None
    if not host or port == 0:
        raise InvalidRequestError(
            "a node's url must be like http://host:port"
            + ("" if "@" in text else f", not {short_repr(text)}"),
            param="url",
        )
    url = f"{parts.scheme}://{format_host(host)}" + ("" if port is None else f":{port}")
    extra = {
        "user info": "@" in parts.netloc,
        "a path": parts.path not in ("", "/"),
        "a query": bool(parts.query) or "?" in text,
        "a fragment": bool(parts.fragment) or "#" in text,
    }
    excess = [name for name, is_there in extra.items() if is_there]
    if excess:
        raise InvalidRequestError(
            f"a node's url is only http://host:port; {short_repr(url)} came with "
            f"{' and '.join(excess)}",
            param="url",
        )
    return url


@functools.lru_cache(maxsize=64)  # every request asks about its ``Host`` and its peer
def is_loopback(host: str) -> bool:
    """Whether ``host`` is ``localhost`` or an address of the loopback interface."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def parse_base_url(text: str, name: str, key_name: str) -> str:
    """Return the address of an HTTP server without ``/v1``. Without a scheme it is HTTP.

    Args:
        name: the argument that errors name.
        key_name: the argument for a key.

    Raises UsageError for an invalid address, without showing a possible password.
    """
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if is_url and "@" in parts.netloc:
        raise UsageError(f"{name} must be without a user and password; give {key_name} instead")
    if not is_url or "?" in url or "#" in url or not url.isprintable() or " " in url:
        shown = "" if "@" in text else f", not {shorten_text(text, 100)}"
        raise UsageError(f"{name} must be like http://HOST:PORT or https://HOST{shown}")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
