"""Access to the proxy: API keys, web pages, and programs of this host.

Every request passes :class:`Guard`, and :func:`caller_of` says which client sent it.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import stat
from typing import TYPE_CHECKING, NamedTuple, get_args
from urllib.parse import urlsplit

from pd.core.connections import OPEN_PATHS
from pd.core.errors import AuthenticationError, ForbiddenError, PDError, UsageError
from pd.core.local_requests import (
    ANY_ORIGIN,
    check_host,
    check_json,
    check_local,
    check_origin,
    header,
)
from pd.proxy.api_keys import ApiKey, KeyRole
from pd.proxy.web import error_response

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger(__name__)

_READING = ("GET", "HEAD", "OPTIONS")
_HOST_REMEDY = (
    "; what passes requests on to a proxy on loopback must set a local Host, or the proxy needs an "
    "--api-key"
)
_LINE = "a line is 'inference KEY' or 'admin KEY', and a name for the key if you like"


def load_api_keys(path: Path) -> list[ApiKey]:
    """Read ``--api-keys FILE``: a line per key, ``#`` begins a comment.

    Raises UsageError, which shows no key, for a file that cannot be used.
    """
    try:
        text = path.read_text()
        others_read = path.stat().st_mode & stat.S_IROTH
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read --api-keys {path}: {error}") from error
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        role, *rest = line.partition("#")[0].split() or [""]
        if not role:
            continue
        if role not in get_args(KeyRole) or not 1 <= len(rest) <= 2:
            raise UsageError(f"--api-keys {path}, line {number}: {_LINE}")
        keys.append(ApiKey(rest[0], role, *rest[1:]))  # type: ignore[arg-type]  # checked above
    if not keys:
        raise UsageError(f"--api-keys {path} holds no key: {_LINE}")
    check_api_keys(keys)
    if others_read:
        logger.warning("every user of this host can read the keys in %s: chmod 600 it", path)
    return keys


def check_api_keys(keys: Sequence[ApiKey]) -> None:
    """Raise UsageError for keys that no client can send, or that are there twice."""
    for key in keys:
        if not key.key or not key.key.isprintable() or " " in key.key:
            raise UsageError(
                f"an API key (--api-key, --admin-api-key, --api-keys; here {key.name or key.role}) "
                "must be printable and not empty, without spaces"
            )
    if len({key.key for key in keys}) < len(keys):
        raise UsageError("an API key is given twice; each has one role")


def check_cors_origins(origins: Sequence[str]) -> None:
    """Raise UsageError for what is no origin."""
    for origin in origins:
        parts = urlsplit(origin)
        is_origin = bool(parts.netloc) and origin == f"{parts.scheme}://{parts.netloc}"
        if not is_origin and origin != ANY_ORIGIN:
            raise UsageError(
                f"--cors-origins takes origins like https://chat.example.org, or *, not {origin!r}"
            )


class Caller(NamedTuple):
    """The client that sent a request.

    Attributes:
        owner: tells keys apart without telling what they are; ``""`` without one.
        is_admin: an admin key was shown.
        name: for logs.
    """

    owner: str = ""
    is_admin: bool = False
    name: str = "a client without a key"


def caller_of(scope: Scope) -> Caller:
    """The client of a request that passed :class:`Guard`."""
    caller = scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


class Access:
    """The rules.

    Args:
        keys: all that clients may show.
        key_required: whether requests that generate need one of them.
        cors_origins: of web pages that may use the proxy, in lower case.
        on_loopback: the proxy listens on a loopback address.
        host: ``--host``, by which a proxy on loopback may be addressed too.
    """

    def __init__(
        self,
        keys: Sequence[ApiKey],
        *,
        key_required: bool,
        cors_origins: Sequence[str] = (),
        on_loopback: bool = True,
        host: str = "",
    ) -> None:
        self._callers = [
            (
                key.digest,
                Caller(key.digest.hex(), key.role == "admin", key.name or f"a {key.role} key"),
            )
            for key in keys
        ]
        self._key_required = key_required
        self._has_admin_key = any(caller.is_admin for _, caller in self._callers)
        self._origins = frozenset(cors_origins)
        self._on_loopback = on_loopback
        self._names = frozenset({host.lower()} if on_loopback and host else ())

    def admit(self, scope: Scope) -> Caller:
        """The client of a request that may go on.

        Raises:
            AuthenticationError: a key is needed and none that is known was shown.
            ForbiddenError: a web page asks that may not, or one whose name was made to resolve to
                this host.
            UnsupportedMediaTypeError: there is a body that is not declared as JSON.
        """
        check_origin(scope, self._origins, "; --cors-origins lets them in")
        # With a slash at its end a path is redirected to the one without.
        is_open = scope["path"].removesuffix("/") in OPEN_PATHS
        caller = self._caller(scope)
        if caller is None and self._key_required and not is_open:
            raise AuthenticationError(
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
            )
        # A key proves more than a Host: no web page has one.
        if self._on_loopback and not self._key_required and caller is None:
            check_host(scope, self._names, _HOST_REMEDY)
        if scope["method"] not in _READING:
            check_json(scope)
        return caller or Caller()

    def check_admin(self, scope: Scope) -> Caller:
        """The client of a request for administration.

        Raises ForbiddenError for anybody without an admin key or, where there is none, anybody but
        programs of this host.
        """
        caller = caller_of(scope)
        if caller.is_admin:
            return caller
        if self._has_admin_key:
            raise ForbiddenError("this needs an admin key (--admin-api-key of the proxy)")
        check_local(scope, self._names, "; others need an admin key (--admin-api-key of the proxy)")
        return caller

    def _caller(self, scope: Scope) -> Caller | None:
        scheme, _, given = header(scope, b"authorization").partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest = hashlib.sha256(given.strip().encode("latin-1")).digest()
        found = None
        # All are compared, so that time tells nothing of which one it is.
        for known, caller in self._callers:
            if hmac.compare_digest(digest, known):
                found = caller
        return found


class Guard:
    """ASGI middleware that answers requests that are not admitted."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                caller = self._access.admit(scope)
            except PDError as error:
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)
