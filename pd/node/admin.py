"""A node's administrative HTTP interface; the data plane is ZMQ."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pd.core.brief import brief
from pd.core.cluster_key import admin_key, server_info_key
from pd.core.errors import (
    AuthenticationError,
    InvalidRequestError,
    NotFoundError,
    PDError,
    error_body,
)
from pd.core.local_requests import check_host, check_local, check_origin
from pd.core.request_body import read_body
from pd.core.shared_answer import SharedAnswer
from pd.core.signed_requests import (
    EXPECTED_HEADER,
    MAX_NONCE_CHARACTERS,
    NONCE_HEADER,
    SIGNATURE_HEADER,
    RequestVerifier,
    request_target,
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
    """``GET /health /metrics /server_info``, ``POST /flush_cache /drain /undrain /abort_request``;
    ``/drain?migrate=1`` also has proxies move the requests that are here.

    With a cluster key every POST must be signed with :func:`pd.core.cluster_key.admin_key` for this
    instance (:mod:`pd.core.signed_requests`), and its answer is signed too; ``/server_info`` is
    signed for a client that asks with a nonce. Without a key every POST must come from a program on
    this host, and web pages read nothing (:mod:`pd.core.local_requests`).
    """
    gate, endpoints = _Gate(node), _Endpoints(node)

    def get(path: str, answer: Callable[[Request], Awaitable[Response]]) -> Route:
        async def checked(request: Request) -> Response:
            gate.check_reader(request)
            return await answer(request)

        return Route(path, checked)

    def post(path: str, answer: Callable[[Request, bytes], Awaitable[Response]]) -> Route:
        async def checked(request: Request) -> Response:
            return await gate.let_in(request, answer)

        return Route(path, checked, methods=["POST"])

    routes = [
        get("/health", endpoints.health),
        get("/metrics", endpoints.metrics),
        get("/server_info", endpoints.server_info),
        post("/flush_cache", endpoints.flush_cache),
        post("/drain", endpoints.drain),
        post("/undrain", endpoints.undrain),
        post("/abort_request", endpoints.abort_request),
    ]
    handlers = {PDError: _error, 404: endpoints.unknown}
    return Starlette(routes=routes, exception_handlers=handlers)


class _Endpoints:
    """Answers of the administrative interface; the node is called in threads of a pool, since its
    lock may be held."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._info_key = server_info_key(node.core.config.cluster_key)
        # Anybody may ask for these, and both take the node's lock.
        self._metrics = SharedAnswer(partial(run_in_threadpool, node.core.metrics.expose))
        self._info = SharedAnswer(partial(run_in_threadpool, node.server_info))

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self._node.ready else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(await self._metrics.get(), media_type="text/plain; version=0.0.4")

    async def server_info(self, request: Request) -> Response:
        response = JSONResponse(await self._info.get())
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
            raise InvalidRequestError(f"migrate must be 0 or 1, not {brief(migrate)}")
        await run_in_threadpool(self._node.drain, migrate=migrate == "1")
        return JSONResponse({"draining": True})

    async def undrain(self, request: Request, body: bytes) -> Response:
        await run_in_threadpool(self._node.undrain)
        return JSONResponse({"draining": False})

    async def abort_request(self, request: Request, body: bytes) -> Response:
        asked = _abort_body(body)
        rid = None if asked.abort_all else asked.rid
        count = await run_in_threadpool(self._node.abort, rid)
        if count == 0 and not asked.abort_all:
            raise NotFoundError(f"no request has the rid {asked.rid!r}", param="rid")
        return JSONResponse({"aborted": count})

    async def unknown(self, request: Request, error: Exception) -> Response:
        where = f"{request.method} {request.url.path}"
        text = f"a {self._node.role} node has no {where}; requests for text go to the proxy"
        return await _error(request, NotFoundError(text))


class _Gate:
    """Lets requests in that hold the cluster key or, where there is none, come from this host."""

    def __init__(self, node: Node) -> None:
        key = admin_key(node.core.config.cluster_key)
        self._verifier = None if key is None else RequestVerifier(key)
        self._instance_id, config = node.instance_id, node.core.config
        self._names = {config.host.lower(), config.public_host.lower()}

    def check_reader(self, request: Request) -> None:
        """Without a key raise ForbiddenError for web pages, which could otherwise read answers
        under a name that was made to resolve to loopback."""
        if self._verifier is None:
            check_host(request.scope, self._names, _NO_KEY)
            check_origin(request.scope, (), _NO_KEY)

    async def let_in(
        self, request: Request, answer: Callable[[Request, bytes], Awaitable[Response]]
    ) -> Response:
        """The answer, signed if the request was. Raises AuthenticationError, ForbiddenError or
        UnsupportedMediaTypeError for requests that are not let in."""
        if self._verifier is None:
            check_local(request.scope, self._names, _NO_KEY)
            return await answer(request, await _read(request))
        body = await _read(request)
        nonce = self._verify(self._verifier, request, body)
        try:
            response = await answer(request, body)
        except PDError as error:
            response = await _error(request, error)
        content = bytes(response.body)
        signature = sign_reply(self._verifier.key, nonce, response.status_code, content)
        response.headers[SIGNATURE_HEADER] = signature
        return response

    def _verify(self, verifier: RequestVerifier, request: Request, body: bytes) -> str:
        """The nonce of a request that was signed for this instance."""
        nonce, reason = verifier.verify(
            request.headers.get("Authorization", ""),
            request.method,
            request_target(request.scope),
            self._instance_id,
            body,
        )
        if not reason:
            return nonce
        expected = request.headers.get(EXPECTED_HEADER, "")
        if expected and expected != self._instance_id:
            reason = f"the request is for instance {expected[:64]!r}, this is {self._instance_id}"
        raise AuthenticationError(f"{reason}; `pd-launch admin` signs requests by hand")


async def _read(request: Request) -> bytes:
    body = await read_body(request.stream(), MAX_BODY_BYTES)
    if body is None:
        raise InvalidRequestError(f"the body exceeds {MAX_BODY_BYTES} bytes")
    return body


def _abort_body(content: bytes) -> AbortBody:
    try:
        body = _abort_decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f'the body must be {{"rid": …}}: {error}') from error
    if (body.rid is None) == (not body.abort_all):
        raise InvalidRequestError('give either {"rid": …} or {"abort_all": true}')
    return body


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PDError)
    return JSONResponse(error_body(error), error.status)
