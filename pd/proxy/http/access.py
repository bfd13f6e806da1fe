"""Decides who may use the proxy: API keys, web pages, and programs on this host.

Every request passes :class:`Guard`. After that, :func:`get_caller` returns its client.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from typing import TYPE_CHECKING, NamedTuple, get_args
from urllib.parse import urlsplit

from pd.core.errors import AuthenticationError, ForbiddenError, PDError, UsageError
from pd.net.connection_limits import OPEN_PATHS
from pd.net.local_requests import (
    ANY_ORIGIN,
    check_form,
    check_host,
    check_json,
    check_local,
    check_origin,
    is_from_browser,
    read_header,
)
from pd.proxy.http.api_keys import ApiKey, KeyRole
from pd.proxy.http.error_shapes import is_ollama, takes_anthropic_key
from pd.proxy.http.json_responses import REQUEST_ID, error_response, read_request_id
from pd.proxy.http.key_guesses import KeyGuesses
from pd.util.secret_files import find_exposure

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from pd.net.guarded_protocol import GuardedProtocol

logger = logging.getLogger(__name__)

# The only path that takes a form, and any amount of bytes.
UPLOAD_PATH = "/v1/files"
_READING = ("GET", "HEAD", "OPTIONS")
_HOST_REMEDY = (
    "; a gateway before a proxy on loopback must set a local Host, or the proxy needs an --api-key"
)
_LINE = "write 'inference KEY' or 'admin KEY', and optionally a name for the key"


def load_api_keys(path: Path) -> list[ApiKey]:
    """Read ``--api-keys FILE``. Each line holds a key, and ``#`` begins a comment.

    Raises UsageError, which shows no key, if the file cannot be used.
    """
    try:
        text = path.read_text()
        warnings = find_exposure(path, f"the keys in {path}")
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
    for warning in warnings:
        logger.warning("%s", warning)
    return keys


def check_api_keys(keys: Sequence[ApiKey]) -> None:
    """Raise UsageError for duplicate keys, and for keys that no client can send."""
    for key in keys:
        if not key.key or not key.key.isprintable() or " " in key.key:
            raise UsageError(
                f"an API key (--api-key, --admin-api-key, --api-keys; here {key.name or key.role}) "
                "must be printable and not empty, without spaces"
            )
    if len({key.key for key in keys}) < len(keys):
        raise UsageError("an API key is given twice; each has one role")


def check_cors_origins(origins: Sequence[str]) -> None:
    """Raise UsageError for anything but an origin."""
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
        owner: identifies the client's key without revealing it; ``""`` without a key.
        is_admin: the client sent an admin key.
        name: the client's name in logs.
        max_priority: limit of its requests' ``priority``; None without a limit.
    """

    owner: str = ""
    is_admin: bool = False
    name: str = "a client without a key"
    max_priority: int | None = None


def get_caller(scope: Scope) -> Caller:
    """Return the client of a request that passed :class:`Guard`."""
    caller = scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


def is_public(scope: Scope) -> bool:
    """Tell whether a path is public. Requests for it need no key."""
    return scope["path"] in OPEN_PATHS


class Access:
    """The access rules.

    Args:
        keys: all accepted keys.
        key_required: requests need one of the keys, unless their path is public.
        cors_origins: origins of web pages that may use the proxy, in lower case.
        on_loopback: the proxy listens on a loopback address.
        host: ``--host``, which clients may use as ``Host`` if the proxy is on loopback.
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
        self._guesses = KeyGuesses()
        self._key_required = key_required
        self._has_admin_key = any(caller.is_admin for _, caller in self._callers)
        self._origins = frozenset(cors_origins)
        self._on_loopback = on_loopback
        self._names = frozenset({host.lower()} if on_loopback and host else ())

    async def check_access(self, scope: Scope) -> Caller:
        """Check a request and return its client. An unknown key may have to wait for its turn.

        Raises:
            QueueFullError: too many keys from this address are wrong.
            AuthenticationError: the path needs a key, and the request has no valid one.
            ForbiddenError: the request comes from a web page of a foreign origin, or from a page
                that made its own name resolve to this host.
            UnsupportedMediaTypeError: the request has a body without JSON's content type, or
                without a form's for an upload. On Ollama's paths only browsers need JSON's.
        """
        check_origin(scope, self._origins, "; --cors-origins lets them in")
        caller = await self._identify_caller(scope)
        if caller is None and self._key_required and not is_public(scope):
            raise AuthenticationError(
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
            )
        # We trust a key more than a Host header, because no web page has a key.
        if self._on_loopback and not self._key_required and caller is None:
            check_host(scope, self._names, _HOST_REMEDY)
        # Ollama's documented curl calls declare a form, so on its paths we ask for JSON's type only
        # where a web page may have sent the body.
        is_exempt = is_ollama(scope["path"]) and not is_from_browser(scope)
        if scope["method"] == "POST" and scope["path"] == UPLOAD_PATH:
            check_form(scope)
        elif scope["method"] not in _READING and not is_exempt:
            check_json(scope)
        return caller or Caller()

    def has_owner(self, owner: str) -> bool:
        """Tell whether clients with this :attr:`Caller.owner` may generate."""
        if not owner:
            return not self._key_required
        return any(caller.owner == owner for _, caller in self._callers)

    def check_admin(self, scope: Scope) -> Caller:
        """Return the client of an administrative request.

        Raises ForbiddenError for clients without an admin key. If the proxy has no admin key, only
        programs on this host may administrate.
        """
        caller = get_caller(scope)
        if caller.is_admin:
            return caller
        if self._has_admin_key:
            raise ForbiddenError("this needs an admin key (--admin-api-key of the proxy)")
        check_local(scope, self._names, "; others need an admin key (--admin-api-key of the proxy)")
        return caller

    async def _identify_caller(self, scope: Scope) -> Caller | None:
        scheme, _, given = read_header(scope, b"authorization").partition(" ")
        if scheme.lower() != "bearer":
            # Anthropic's clients send their key in a header of its own.
            given = read_header(scope, b"x-api-key") if takes_anthropic_key(scope["path"]) else ""
        if not given or not self._callers:
            return None
        if self._key_required and is_public(scope):
            return None  # public answers do not depend on keys, so guesses learn nothing here
        digest = hashlib.sha256(given.strip().encode("latin-1")).digest()
        # A header may have set `client`, so we prefer the connection's address.
        connection: GuardedProtocol | None = scope.get("state", {}).get("connection")
        client = scope.get("client") if connection is None else connection.client
        address = client[0] if client else ""
        await self._guesses.wait_turn(address, digest)
        match = None
        # We compare all keys, because otherwise the time would reveal the match.
        for known, caller in self._callers:
            if hmac.compare_digest(digest, known):
                match = caller
        if match is not None:
            self._guesses.mark_right(address, digest)
        return match


def _add_request_id(scope: Scope, send: Send) -> Send:
    """Add ``X-Request-Id`` to responses without one."""

    async def send_named(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            if all(key.lower() != REQUEST_ID for key, _ in headers):
                headers.append((REQUEST_ID, read_request_id(scope).encode()))
                message["headers"] = headers
        await send(message)

    return send_named


class Guard:
    """ASGI middleware that rejects requests without access.

    A request of the proxy itself comes with its caller in ``scope["state"]``, where no client can
    put one.

    It also removes a slash at the end of the path, and gives every response an ``X-Request-Id``.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            state = scope.setdefault("state", {})
            scope["path"] = scope["path"].removesuffix("/") or "/"
            send = _add_request_id(scope, send)
            if "caller" in state:
                await self._app(scope, receive, send)
                return
            try:
                caller = await self._access.check_access(scope)
                connection: GuardedProtocol | None = state.get("connection")
                if connection is not None and not is_public(scope):
                    connection.assign_owner(caller.owner)
            except PDError as error:
                await error_response(error, path=scope["path"])(scope, receive, send)
                return
            state["caller"] = caller
        await self._app(scope, receive, send)
