"""Serves the registry over HTTP. :mod:`pd.bootstrap.client` is the other side."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.routing import Route

from pd.core.errors import (
    AuthenticationError,
    HandshakeError,
    InvalidRequestError,
    PDError,
    UnavailableError,
)
from pd.core.messages import ErrorInfo
from pd.core.node_info import decode_node_info
from pd.net.cluster_key import derive_bootstrap_key
from pd.net.local_requests import check_local
from pd.net.request_body import read_body
from pd.net.signed_requests import (
    EXPECTED_HEADER,
    SIGNATURE_HEADER,
    RequestVerifier,
    read_target,
    sign_reply,
)
from pd.util.warning_limit import WarningLimit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from pd.bootstrap.registry import Registry

    Answer = Callable[[Request, bytes], Awaitable[object]]

logger = logging.getLogger(__name__)

HANDSHAKE_PATH = "/bootstrap/handshake"
MAX_BODY_BYTES = 64 << 10
RETRY_AFTER_SECONDS = 1
_NO_KEY = "; nodes of other hosts need the same --cluster-key-file"

_json = msgspec.json.Encoder()


def make_bootstrap_app(registry: Registry, *, cluster_key: bytes | None = None) -> Starlette:
    """Build the ASGI application of a prefill node's ``--bootstrap-port``.

    ``POST /bootstrap/handshake`` takes a decode node's NodeInfo and answers this node's. Requests
    must be signed with the cluster key. Without a key they must come from a program on this host.
    The body of an error is an ``ErrorInfo``. Its statuses are:

    - 400: the body is not a NodeInfo
    - 401: the request is not signed with the cluster key
    - 403, 415: there is no key, and the request comes from another host or a web page
    - 409: the nodes cannot work together (another release, say), or this is another instance
    - 413: the body exceeds 64 KiB
    - 500: unexpected failure
    - 503: the node is starting or draining
    """
    key = derive_bootstrap_key(cluster_key)
    verifier = None if key is None else RequestVerifier(key)
    refused = WarningLimit(logger)
    own_names = {urlsplit(registry.own.bootstrap).hostname or ""}

    async def handshake(request: Request, body: bytes) -> object:
        expected = request.headers.get(EXPECTED_HEADER, "")
        if expected and expected != registry.own.instance_id:
            raise HandshakeError(
                f"instance differs: {expected} was expected, but {registry.own.instance_id} "
                "answers (the prefill node restarted)"
            )
        try:
            peer = decode_node_info(body, registry.own)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"the body is not a NodeInfo: {error}") from error
        return await run_in_threadpool(registry.handshake, peer)

    async def endpoint(request: Request) -> Response:
        return await _answer_signed(request, handshake, verifier, own_names, refused)

    return Starlette(routes=[Route(HANDSHAKE_PATH, endpoint, methods=["POST"])])


async def _answer_signed(
    request: Request,
    answer: Answer,
    verifier: RequestVerifier | None,
    own_names: set[str],
    refused: WarningLimit,
) -> Response:
    nonce = ""
    try:
        if verifier is None:
            check_local(request.scope, own_names, _NO_KEY)
        body = await read_body(request.stream(), MAX_BODY_BYTES)
        if body is None:
            reason = f"the body exceeds {MAX_BODY_BYTES} bytes"
            return _error_response(413, InvalidRequestError(reason), {})
        if verifier is not None:
            nonce = _check_signature(request, body, verifier)
        content = await _answer_request(request, answer, body)
        response = Response(content, 200, media_type="application/json")
    except UnavailableError as error:
        response = _error_response(503, error, {"Retry-After": str(RETRY_AFTER_SECONDS)})
    except HandshakeError as error:
        logger.warning("refused a handshake: %s", error)
        response = _error_response(409, error, {})
    except PDError as error:
        # NOTE: We log no query, because it may be long. The path matches a route.
        refused.log_warning(f"refused {request.method} {request.scope['path']}: {error}")
        response = _error_response(error.status, error, {})
    if verifier is not None and nonce:
        signature = sign_reply(verifier.key, nonce, response.status_code, bytes(response.body))
        response.headers[SIGNATURE_HEADER] = signature
    return response


async def _answer_request(request: Request, answer: Answer, body: bytes) -> bytes:
    """Answer an authentic request. Raises only PDErrors, because we sign replies to these and the
    peer believes only signed replies."""
    try:
        return _json.encode(await answer(request, body))
    except PDError:
        raise
    except Exception as error:
        # For example, a transfer backend cannot connect to the peer.
        failure = f"{request.method} {request.scope['path']} failed"
        logger.exception(failure)
        raise PDError(f"{failure}: {type(error).__name__}: {error}") from error


def _check_signature(request: Request, body: bytes, verifier: RequestVerifier) -> str:
    nonce, reason = verifier.verify_request(
        request.headers.get("Authorization", ""),
        request.method,
        read_target(request.scope),
        request.headers.get(EXPECTED_HEADER, ""),
        body,
    )
    if reason:
        raise AuthenticationError(reason)
    return nonce


def _error_response(status: int, error: PDError, headers: dict[str, str]) -> Response:
    content = _json.encode(ErrorInfo(error.kind, error.message, error.param))
    return Response(content, status, headers, media_type="application/json")
