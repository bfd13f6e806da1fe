"""The registry over HTTP. ``pd.bootstrap.client`` speaks it from the other side."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.routing import Route

from pd.core.cluster_key import bootstrap_key
from pd.core.errors import (
    AuthenticationError,
    HandshakeError,
    InvalidRequestError,
    PDError,
    UnavailableError,
)
from pd.core.local_requests import check_local
from pd.core.messages import ErrorInfo
from pd.core.node_info import NodeInfo
from pd.core.request_body import read_body
from pd.core.seldom import Seldom
from pd.core.signed_requests import (
    EXPECTED_HEADER,
    SIGNATURE_HEADER,
    RequestVerifier,
    request_target,
    sign_reply,
)

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
_node_decoder = msgspec.json.Decoder(NodeInfo)


def make_bootstrap_app(registry: Registry, *, cluster_key: bytes | None = None) -> Starlette:
    """The ASGI application that a prefill node serves on ``--bootstrap-port``.

    ``POST /bootstrap/handshake`` takes a decode node's NodeInfo and answers this node's. Requests
    are signed with the cluster key; without one they must come from a program on this host. Errors
    are an ``ErrorInfo``: 400 for a body that is no NodeInfo, 401 without the cluster key, 403 or
    415 for another host or a web page where there is none, 409 for nodes that cannot work together
    or another instance than was asked, 413 for a body over 64 KiB, 500 for whatever goes wrong
    unexpectedly, 503 until ready and while draining.
    """
    key = bootstrap_key(cluster_key)
    verifier = None if key is None else RequestVerifier(key)
    refused = Seldom(logger)
    own_names = {urlsplit(registry.own.bootstrap).hostname or ""}

    async def handshake(request: Request, body: bytes) -> object:
        expected = request.headers.get(EXPECTED_HEADER, "")
        if expected and expected != registry.own.instance_id:
            raise HandshakeError(
                f"instance differs: {expected} was expected, but {registry.own.instance_id} "
                "answers (the prefill node restarted)"
            )
        try:
            peer = _node_decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"the body is not a NodeInfo: {error}") from error
        return await run_in_threadpool(registry.handshake, peer)

    async def endpoint(request: Request) -> Response:
        return await _respond(request, handshake, verifier, own_names, refused)

    return Starlette(routes=[Route(HANDSHAKE_PATH, endpoint, methods=["POST"])])


async def _respond(
    request: Request,
    answer: Answer,
    verifier: RequestVerifier | None,
    own_names: set[str],
    refused: Seldom,
) -> Response:
    nonce = ""
    try:
        if verifier is None:
            check_local(request.scope, own_names, _NO_KEY)
        body = await read_body(request.stream(), MAX_BODY_BYTES)
        if body is None:
            reason = f"the body exceeds {MAX_BODY_BYTES} bytes"
            return _error(413, InvalidRequestError(reason), {})
        if verifier is not None:
            nonce = _authenticate(request, body, verifier)
        content = await _answered(request, answer, body)
        response = Response(content, 200, media_type="application/json")
    except UnavailableError as error:
        response = _error(503, error, {"Retry-After": str(RETRY_AFTER_SECONDS)})
    except HandshakeError as error:
        logger.warning("refused a handshake: %s", error)
        response = _error(409, error, {})
    except PDError as error:
        # NOTE: without its query, which may be long. The path is that of a route.
        refused.warn(f"refused {request.method} {request.scope['path']}: {error}")
        response = _error(error.status, error, {})
    if verifier is not None and nonce:
        signature = sign_reply(verifier.key, nonce, response.status_code, bytes(response.body))
        response.headers[SIGNATURE_HEADER] = signature
    return response


async def _answered(request: Request, answer: Answer, body: bytes) -> bytes:
    """The answer to a request that is authentic. Raises PDError only, for the reply to be signed:
    the peer could not believe another."""
    try:
        return _json.encode(await answer(request, body))
    except PDError:
        raise
    except Exception as error:
        # Such as of a transfer backend that cannot connect to the peer.
        what = f"{request.method} {request.scope['path']} failed"
        logger.exception(what)
        raise PDError(f"{what}: {type(error).__name__}: {error}") from error


def _authenticate(request: Request, body: bytes, verifier: RequestVerifier) -> str:
    nonce, reason = verifier.verify(
        request.headers.get("Authorization", ""),
        request.method,
        request_target(request.scope),
        request.headers.get(EXPECTED_HEADER, ""),
        body,
    )
    if reason:
        raise AuthenticationError(reason)
    return nonce


def _error(status: int, error: PDError, headers: dict[str, str]) -> Response:
    content = _json.encode(ErrorInfo(error.kind, error.message, error.param))
    return Response(content, status, headers, media_type="application/json")
