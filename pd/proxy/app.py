"""The HTTP application: paths, authentication, errors."""

from __future__ import annotations

import hmac
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from pd.core.errors import AuthenticationError, InvalidRequestError, NotFoundError, PDError
from pd.proxy.chat_api import ChatAPI
from pd.proxy.completions_api import CompletionsAPI
from pd.proxy.generate_api import GenerateAPI
from pd.proxy.tokens_api import TokensAPI
from pd.proxy.web import error_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from pd.proxy.admin_api import AdminAPI
    from pd.proxy.metrics import Metrics
    from pd.proxy.service import Service

    Handler = Callable[[Request], Awaitable[Response]]

log = logging.getLogger(__name__)

OPEN_PATHS = ("/health", "/readiness", "/metrics")


class MethodNotAllowedError(PDError):
    """The path exists, but not for this method."""

    kind, status, type = "method_not_allowed", 405, "invalid_request_error"


class RequireKey:
    """Lets nobody without the API key at anything but health and metrics."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            known = hmac.compare_digest(given.strip(), self._expected)
            if scheme.lower() != b"bearer" or not known:
                error = AuthenticationError(
                    "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
                )
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def make_app(service: Service, admin: AdminAPI, metrics: Metrics, api_key: str | None) -> FastAPI:
    # Without the generated documentation: handlers check bodies themselves, so it would be empty.
    app = FastAPI(openapi_url=None)
    tokens = TokensAPI(service)
    for path, method, handler in (
        ("/v1/completions", "POST", CompletionsAPI(service).handle),
        ("/v1/chat/completions", "POST", ChatAPI(service).handle),
        ("/generate", "POST", GenerateAPI(service).handle),
    ):
        app.add_route(path, _counted(handler, path, metrics), methods=[method])
    for path, method, handler in (
        ("/health", "GET", admin.health),
        ("/readiness", "GET", admin.readiness),
        ("/metrics", "GET", admin.metrics),
        ("/workers", "GET", admin.workers),
        ("/workers", "POST", admin.add_worker),
        ("/workers/{instance_id:path}", "DELETE", admin.remove_worker),
        ("/v1/models", "GET", admin.models),
        ("/v1/models/{model:path}", "GET", admin.model),
        ("/tokenize", "POST", tokens.tokenize),
        ("/detokenize", "POST", tokens.detokenize),
        ("/abort_request", "POST", admin.abort_request),
        ("/flush_cache", "POST", admin.flush_cache),
    ):
        app.add_route(path, handler, methods=[method])
    app.add_exception_handler(PDError, _pd_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _unexpected)
    if api_key is not None:
        app.add_middleware(RequireKey, api_key=api_key)
    return app


def _counted(handler: Handler, endpoint: str, metrics: Metrics) -> Handler:
    """Count requests that are refused before they become a job."""

    async def counted(request: Request) -> Response:
        try:
            return await handler(request)
        except PDError as error:
            metrics.request_refused(endpoint, error.kind)
            raise

    return counted


async def _pd_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PDError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        return error_response(NotFoundError(f"there is no {where}"))
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        response = error_response(MethodNotAllowedError(f"{where} is not possible"))
        response.headers.update(error.headers or {})
        return response
    return error_response(InvalidRequestError(f"{where}: {error.detail}"))


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _unexpected(request: Request, error: Exception) -> Response:
    # Starlette raises the error again after this response, and uvicorn logs its traceback.
    return error_response(PDError("internal error; the proxy's log has the details"))
