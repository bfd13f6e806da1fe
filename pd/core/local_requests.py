"""HTTP requests without a key: whether one comes from this host, and from no web page.

A browser sends requests of any web page to any address that it reaches, loopback included, and a
page whose name resolves to a loopback address (DNS rebinding) reads the answers as well. Such
requests carry an ``Origin`` that is not the server's, a ``Host`` that is not local, or, where the
browser asks nobody for permission, a body that is not declared as JSON. Servers look at these three
headers and at the address of the peer. Every function takes an ASGI scope.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Any

from pd.core.errors import ForbiddenError, UnsupportedMediaTypeError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    Scope = Mapping[str, Any]

ANY_ORIGIN = "*"
JSON = "application/json"
# A server that adds one of these passes on requests of others, so its address proves nothing.
_FORWARDING = (b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip")

_OTHERS = ("cross-site", "same-site")

# [::1]:8000, localhost:8000, 127.0.0.1
_HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^\[\]:@,\s]+))(?::\d*)?")


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


def header(scope: Scope, name: bytes) -> str:
    """A header's value (of several, all, separated by commas), or ``""``. ``name``: lower case."""
    return ", ".join(value.decode("latin-1") for key, value in scope["headers"] if key == name)


def has_local_host(scope: Scope, names: Collection[str] = ()) -> bool:
    """Whether ``Host`` is a loopback address, ``localhost`` or one of ``names``, at any port."""
    found = _HOST.fullmatch(header(scope, b"host"))
    name = found[1] or found[2] if found else ""
    return is_loopback(name) or (bool(name) and name.lower() in names)


def foreign_origin(scope: Scope, allowed: Collection[str] = ()) -> str | None:
    """The ``Origin`` of a request that a web page sent, unless the page is the server's own (at a
    local ``Host``) or its origin is allowed (``*`` allows all). Images, frames and the like come
    without one; browsers say of them that they are of another site."""
    origin = header(scope, b"origin")
    if ANY_ORIGIN in allowed or origin.lower() in allowed:
        return None
    if not origin:
        is_part = header(scope, b"sec-fetch-dest") != "document"
        return "another site" if is_part and header(scope, b"sec-fetch-site") in _OTHERS else None
    own = f"{scope.get('scheme', 'http')}://{header(scope, b'host')}"
    return None if origin == own and has_local_host(scope) else origin


def is_from_this_host(scope: Scope) -> bool:
    """Whether the peer is a process of this host that does not pass on requests of others."""
    client = scope.get("client")
    if client is None or not is_loopback(client[0]):
        return False
    return not any(name in _FORWARDING for name, _ in scope["headers"])


def check_json(scope: Scope) -> None:
    """Raise UnsupportedMediaTypeError for a body that is not declared as JSON."""
    length = header(scope, b"content-length")
    if length in ("", "0") and not header(scope, b"transfer-encoding"):
        return
    given = header(scope, b"content-type")
    if given.partition(";")[0].strip().lower() != JSON:
        raise UnsupportedMediaTypeError(
            f"the body must be JSON and say so, but its Content-Type is {given[:100]!r}; "
            f"with curl add -H 'Content-Type: {JSON}'"
        )


def check_origin(scope: Scope, allowed: Collection[str], remedy: str) -> None:
    """Raise ForbiddenError for a request of a foreign web page; ``remedy`` ends the message."""
    origin = foreign_origin(scope, allowed)
    if origin is not None:
        raise ForbiddenError(f"requests of web pages from {origin[:100]!r} are refused{remedy}")


def check_host(scope: Scope, names: Collection[str], remedy: str) -> None:
    """Raise ForbiddenError for a ``Host`` that is no name of this machine, see
    :func:`has_local_host`; ``remedy`` ends the message."""
    if not has_local_host(scope, names):
        host = header(scope, b"host")
        raise ForbiddenError(f"the Host {host[:100]!r} is not a name of this machine{remedy}")


def check_local(scope: Scope, names: Collection[str], remedy: str) -> None:
    """Let in what can only come from a program on this host.

    Args:
        scope: of the request.
        names: what ``Host`` may be besides loopback addresses, in lower case.
        remedy: what helps others; the end of the message.

    Raises:
        ForbiddenError: the peer, ``Host`` or ``Origin`` is foreign.
        UnsupportedMediaTypeError: there is a body that is not declared as JSON.
    """
    if not is_from_this_host(scope):
        raise ForbiddenError(f"only programs on the server's host may do this{remedy}")
    check_host(scope, names, remedy)
    check_origin(scope, (), remedy)
    check_json(scope)
