"""A node's administrative HTTP interface; the data plane is ZMQ."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pd.core.cluster_key import admin_token
from pd.core.errors import AuthenticationError, InvalidRequestError, NotFoundError, PDError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from pd.node.node import Node

MAX_BODY_BYTES = 64 << 10


class AbortBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``POST /abort_request``: one of the two."""

    rid: str | None = None
    abort_all: bool = False


_abort_decoder = msgspec.json.Decoder(AbortBody)


def make_admin_app(node: Node) -> Starlette:
    """``GET /health /metrics /server_info``, ``POST /flush_cache /drain /abort_request``.

    With a cluster key, every POST needs ``Authorization: Bearer`` with
    :func:`pd.core.cluster_key.admin_token`.
    """
    key = node.config.cluster_key
    token = None if key is None else admin_token(key)

    async def health(request: Request) -> Response:
        return Response(status_code=200 if node.ready else 503)

    async def metrics(request: Request) -> Response:
        text = await run_in_threadpool(node.metrics.expose)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def server_info(request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(node.server_info))

    async def flush_cache(request: Request) -> Response:
        return JSONResponse({"freed_pages": await run_in_threadpool(node.flush_cache)})

    async def drain(request: Request) -> Response:
        node.drain()
        return JSONResponse({"draining": True})

    async def abort_request(request: Request) -> Response:
        body = await _abort_body(request)
        rid = None if body.abort_all else body.rid

        def abort() -> int:
            with node.event():
                return node.abort(rid)

        count = await run_in_threadpool(abort)
        if count == 0 and not body.abort_all:
            raise NotFoundError(f"no request has the rid {body.rid!r}", param="rid")
        return JSONResponse({"aborted": count})

    def post(path: str, answer: Callable[[Request], Awaitable[Response]]) -> Route:
        async def checked(request: Request) -> Response:
            if token is not None:
                given = request.headers.get("authorization", "")
                if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                    raise AuthenticationError(
                        "this node needs 'Authorization: Bearer' with the admin token of its "
                        "cluster key (docs/operations.md says how to get it)"
                    )
            return await answer(request)

        return Route(path, checked, methods=["POST"])

    routes = [
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/server_info", server_info),
        post("/flush_cache", flush_cache),
        post("/drain", drain),
        post("/abort_request", abort_request),
    ]

    async def unknown(request: Request, error: Exception) -> Response:
        where = f"{request.method} {request.url.path}"
        return await _error(
            request,
            NotFoundError(f"a {node.role} node has no {where}; requests for text go to the proxy"),
        )

    return Starlette(routes=routes, exception_handlers={PDError: _error, 404: unknown})


async def _abort_body(request: Request) -> AbortBody:
    content = b""
    async for part in request.stream():
        content += part
        if len(content) > MAX_BODY_BYTES:
            raise InvalidRequestError(f"the body exceeds {MAX_BODY_BYTES} bytes")
    try:
        body = _abort_decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f'the body must be {{"rid": …}}: {error}') from error
    if (body.rid is None) == (not body.abort_all):
        raise InvalidRequestError('give either {"rid": …} or {"abort_all": true}')
    return body


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PDError)
    content = {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.kind,
    }
    return JSONResponse({"error": content}, error.status)
