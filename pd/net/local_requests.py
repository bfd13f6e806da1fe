"""Checks whether a request without a key comes from a program on this host, not from a web page.

A browser sends any web page's requests to any address it reaches, loopback included. A page whose
name resolves to a loopback address (DNS rebinding) can even read the answers. You recognise such
requests by a foreign ``Origin``, by a ``Host`` that is not local, or by a body not declared as JSON
(browsers send those without asking the server first). So we check these three headers and the
peer's address. Every function takes an ASGI scope.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pd.core.addresses import is_loopback
from pd.core.errors import ForbiddenError, UnsupportedMediaTypeError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    Scope = Mapping[str, Any]

ANY_ORIGIN = "*"
JSON = "application/json"
FORM = "multipart/form-data"
# A server that adds one of these forwards other clients' requests, so its address proves nothing.
_FORWARDING = (b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip")

_OTHERS = ("cross-site", "same-site")

# [::1]:8000, localhost:8000, 127.0.0.1
_HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^\[\]:@,\s]+))(?::\d*)?")


def read_header(scope: Scope, name: bytes) -> str:
    """Return a header's value, or ``""``. Joins several with commas. ``name``: in lower case."""
    return ", ".join(value.decode("latin-1") for key, value in scope["headers"] if key == name)


def has_local_host(scope: Scope, names: Collection[str] = ()) -> bool:
    """Return whether ``Host`` is loopback, ``localhost`` or one of ``names``, at any port."""
    match = _HOST.fullmatch(read_header(scope, b"host"))
    name = match[1] or match[2] if match else ""
    return is_loopback(name) or (bool(name) and name.lower() in names)


def find_foreign_origin(scope: Scope, allowed: Collection[str] = ()) -> str | None:
    """Return the ``Origin`` of a request from a foreign web page, or None.

    A page is foreign unless it is the server's own (at a local ``Host``) or its origin is allowed
    (``*`` allows all). Browsers request images, frames and the like without an ``Origin``, so we
    recognise these by ``Sec-Fetch-Site``.
    """
    origin = read_header(scope, b"origin")
    if ANY_ORIGIN in allowed or origin.lower() in allowed:
        return None
    if not origin:
        is_part = read_header(scope, b"sec-fetch-dest") != "document"
        return (
            "another site" if is_part and read_header(scope, b"sec-fetch-site") in _OTHERS else None
        )
    own = f"{scope.get('scheme', 'http')}://{read_header(scope, b'host')}"
    return None if origin == own and has_local_host(scope) else origin


def is_from_this_host(scope: Scope) -> bool:
    """Return whether the peer is on this host and does not forward other clients' requests."""
    client = scope.get("client")
    if client is None or not is_loopback(client[0]):
        return False
    return not any(name in _FORWARDING for name, _ in scope["headers"])


def is_from_browser(scope: Scope) -> bool:
    """Return whether a browser sent the request, by headers that no page can take away.

    Every browser names itself as Mozilla. A page that changes this name has to ask the server
    first, as it has to for JSON.
    """
    names = {name for name, _ in scope["headers"]}
    if b"origin" in names or b"sec-fetch-site" in names:
        return True
    return "mozilla/" in read_header(scope, b"user-agent").lower()


def check_json(scope: Scope) -> None:
    """Raise UnsupportedMediaTypeError for a body not declared as JSON."""
    length = read_header(scope, b"content-length")
    if length in ("", "0") and not read_header(scope, b"transfer-encoding"):
        return
    content_type = read_header(scope, b"content-type")
    if content_type.partition(";")[0].strip().lower() != JSON:
        raise UnsupportedMediaTypeError(
            f"Content-Type: {content_type[:100]!r} (must be {JSON}); "
            f"with curl add -H 'Content-Type: {JSON}'"
        )


def check_form(scope: Scope) -> None:
    """Check a request that uploads a form. Call :func:`check_origin` first.

    Any page may send a form without asking the server. A browser that tells no ``Origin``, which
    old ones omit, may send the form of any page.

    Raises UnsupportedMediaTypeError for another content type, ForbiddenError for such a browser.
    """
    content_type = read_header(scope, b"content-type")
    if content_type.partition(";")[0].strip().lower() != FORM:
        raise UnsupportedMediaTypeError(f"Content-Type: {content_type[:100]!r} (must be {FORM})")
    if is_from_browser(scope) and not read_header(scope, b"origin"):
        raise ForbiddenError("a browser must send an Origin with a form")


def check_origin(scope: Scope, allowed: Collection[str], remedy: str) -> None:
    """Raise ForbiddenError for a request of a foreign web page; ``remedy`` ends the message."""
    origin = find_foreign_origin(scope, allowed)
    if origin is not None:
        raise ForbiddenError(f"requests from web pages of {origin[:100]!r} are refused{remedy}")


def check_host(scope: Scope, names: Collection[str], remedy: str) -> None:
    """Raise ForbiddenError unless :func:`has_local_host`. ``remedy`` ends the message."""
    if not has_local_host(scope, names):
        host = read_header(scope, b"host")
        raise ForbiddenError(f"the Host {host[:100]!r} is not a name of this machine{remedy}")


def check_local(scope: Scope, names: Collection[str], remedy: str) -> None:
    """Refuse requests that may not come from a program on this host.

    Args:
        scope: of the request.
        names: allowed values of ``Host`` in addition to loopback addresses, in lower case.
        remedy: end of the message, which tells clients how to get in.

    Raises:
        ForbiddenError: the peer, ``Host`` or ``Origin`` is foreign.
        UnsupportedMediaTypeError: the body is not declared as JSON.
    """
    if not is_from_this_host(scope):
        raise ForbiddenError(f"only programs on the server's host may do this{remedy}")
    check_host(scope, names, remedy)
    check_origin(scope, (), remedy)
    check_json(scope)
