"""A node's administrative HTTP interface; the data plane is ZMQ."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pd.core.brief import short_repr
from pd.core.errors import (
    AuthenticationError,
    InvalidRequestError,
    NotFoundError,
    PDError,
    error_body,
)
from pd.net.cluster_key import derive_admin_key, derive_server_info_key
from pd.net.local_requests import check_host, check_local, check_origin
from pd.net.request_body import read_body
from pd.net.shared_answer import SharedAnswer
from pd.net.signed_requests import (
    EXPECTED_HEADER,
    MAX_NONCE_CHARACTERS,
    NONCE_HEADER,
    SIGNATURE_HEADER,
    RequestVerifier,
    read_target,
    sign_reply,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from pd.node.node import Node

MAX_BODY_BYTES = 64 << 10
_NO_KEY = " on a node without --cluster-key-file"


class AbortBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``POST /abort_request``: one of the two fields is given."""

    rid: str | None = None
    abort_all: bool = False


_abort_decoder = msgspec.json.Decoder(AbortBody)


def make_admin_app(node: Node) -> Starlette:
    """Build the node's HTTP application.

    Endpoints: ``GET /health /metrics /server_info`` and ``POST /flush_cache /drain /undrain
    /abort_request``. ``/drain?migrate=1`` also asks proxies to move the node's requests elsewhere.

    With a cluster key, every POST must be signed with :func:`pd.net.cluster_key.derive_admin_key`
    for this instance (:mod:`pd.net.signed_requests`), and we sign the answer too. ``/server_info``
    is signed if the client sends a nonce. Without a key, every POST must come from a program on
    this host, and web pages can read nothing (:mod:`pd.net.local_requests`).
    """
    gate, endpoints = _Gate(node), _Endpoints(node)

    def make_get(path: str, answer: Callable[[Request], Awaitable[Response]]) -> Route:
        async def check_and_answer(request: Request) -> Response:
            gate.check_reader(request)
            return await answer(request)

        return Route(path, check_and_answer)

    def make_post(path: str, answer: Callable[[Request, bytes], Awaitable[Response]]) -> Route:
        async def check_and_answer(request: Request) -> Response:
            return await gate.admit_request(request, answer)

        return Route(path, check_and_answer, methods=["POST"])

    routes = [
        make_get("/health", endpoints.health),
        make_get("/metrics", endpoints.metrics),
        make_get("/server_info", endpoints.server_info),
        make_post("/flush_cache", endpoints.flush_cache),
        make_post("/drain", endpoints.drain),
        make_post("/undrain", endpoints.undrain),
        make_post("/abort_request", endpoints.abort_request),
    ]
    handlers = {PDError: _error_response, 404: endpoints.reject_path}
    return Starlette(routes=routes, exception_handlers=handlers)


class _Endpoints:
    """Handlers of the administrative endpoints.

    They call the node in threads of a pool, because another thread may hold its lock.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._info_key = derive_server_info_key(node.core.config.cluster_key)
        # Anyone may request these and both take the node's lock, so concurrent readers share one
        # answer.
        self._metrics = SharedAnswer(partial(run_in_threadpool, node.core.metrics.render_text))
        self._info = SharedAnswer(partial(run_in_threadpool, node.server_info))

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self._node.ready else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(await self._metrics.get_answer(), media_type="text/plain; version=0.0.4")

    async def server_info(self, request: Request) -> Response:
        response = JSONResponse(await self._info.get_answer())
        nonce = request.headers.get(NONCE_HEADER, "")
        if self._info_key is not None and 0 < len(nonce) <= MAX_NONCE_CHARACTERS:
            body = bytes(response.body)
            signature = sign_reply(self._info_key, nonce, response.status_code, body)
            response.headers[SIGNATURE_HEADER] = signature
        return response

    async def flush_cache(self, request: Request, body: bytes) -> Response:
        return JSONResponse({"freed_pages": await run_in_threadpool(self._node.flush_cache)})

    async def drain(self, request: Request, body: bytes) -> Response:
        migrate = request.query_params.get("migrate", "0")
        if migrate not in ("0", "1"):
            raise InvalidRequestError(f"migrate must be 0 or 1, not {short_repr(migrate)}")
        await run_in_threadpool(self._node.drain, migrate=migrate == "1")
        return JSONResponse({"draining": True})

    async def undrain(self, request: Request, body: bytes) -> Response:
        await run_in_threadpool(self._node.undrain)
        return JSONResponse({"draining": False})

    async def abort_request(self, request: Request, content: bytes) -> Response:
        try:
            body = _abort_decoder.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f'invalid body: {error}; send {{"rid": …}}') from error
        if (body.rid is None) == (not body.abort_all):
            raise InvalidRequestError('give either {"rid": …} or {"abort_all": true}')
        rid = None if body.abort_all else body.rid
        count = await run_in_threadpool(self._node.abort_rid, rid)
        if count == 0 and not body.abort_all:
            raise NotFoundError(f"no request has the rid {body.rid!r}", param="rid")
        return JSONResponse({"aborted": count})

    async def reject_path(self, request: Request, error: Exception) -> Response:
        where = f"{request.method} {request.url.path}"
        text = f"a {self._node.role} node has no {where}; requests for text go to the proxy"
        return await _error_response(request, NotFoundError(text))


class _Gate:
    """Admits requests signed with the cluster key or, without a key, requests from this host."""

    def __init__(self, node: Node) -> None:
        key = derive_admin_key(node.core.config.cluster_key)
        self._verifier = None if key is None else RequestVerifier(key)
        self._instance_id, config = node.instance_id, node.core.config
        self._names = {config.host.lower(), config.public_host.lower()}

    def check_reader(self, request: Request) -> None:
        """Raise ForbiddenError for web pages on a node without a key.

        A page could otherwise read answers under a host name that resolves to loopback.
        """
        if self._verifier is None:
            check_host(request.scope, self._names, _NO_KEY)
            check_origin(request.scope, (), _NO_KEY)

    async def admit_request(
        self, request: Request, answer: Callable[[Request, bytes], Awaitable[Response]]
    ) -> Response:
        """Check a request and return its answer, signed if the request was signed.

        Raises AuthenticationError, ForbiddenError or UnsupportedMediaTypeError if it may not enter.
        """
        if self._verifier is None:
            check_local(request.scope, self._names, _NO_KEY)
            return await answer(request, await _read_body(request))
        body = await _read_body(request)
        nonce = self._check_signature(self._verifier, request, body)
        try:
            response = await answer(request, body)
        except PDError as error:
            response = await _error_response(request, error)
        content = bytes(response.body)
        signature = sign_reply(self._verifier.key, nonce, response.status_code, content)
        response.headers[SIGNATURE_HEADER] = signature
        return response

    def _check_signature(self, verifier: RequestVerifier, request: Request, body: bytes) -> str:
        """Return the nonce of a request signed for this instance, or raise AuthenticationError."""
        nonce, reason = verifier.verify_request(
            request.headers.get("Authorization", ""),
            request.method,
            read_target(request.scope),
            self._instance_id,
            body,
        )
        if not reason:
            return nonce
        expected = request.headers.get(EXPECTED_HEADER, "")
        if expected and expected != self._instance_id:
            reason = f"the request is for instance {expected[:64]!r}, this is {self._instance_id}"
        raise AuthenticationError(f"{reason}; `pd-launch admin` signs requests by hand")


async def _read_body(request: Request) -> bytes:
    body = await read_body(request.stream(), MAX_BODY_BYTES)
    if body is None:
        raise InvalidRequestError(f"the body is too large: at most {MAX_BODY_BYTES} bytes")
    return body


async def _error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, PDError)
    return JSONResponse(error_body(error), error.status)
