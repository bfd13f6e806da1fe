"""The HTTP application: paths, who may ask for them, errors."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from pd.core.errors import InvalidRequestError, NotFoundError, PDError
from pd.proxy.access import Guard
from pd.proxy.chat_api import ChatAPI
from pd.proxy.completions_api import CompletionsAPI
from pd.proxy.generate_api import GenerateAPI
from pd.proxy.tokens_api import TokensAPI
from pd.proxy.web import error_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.requests import Request

    from pd.proxy.access import Access
    from pd.proxy.admin_api import AdminAPI
    from pd.proxy.compat_api import CompatAPI
    from pd.proxy.metrics import Metrics
    from pd.proxy.service import Service

    Handler = Callable[[Request], Awaitable[Response]]

log = logging.getLogger(__name__)


class MethodNotAllowedError(PDError):
    """The path exists, but not for this method."""

    kind, status, type = "method_not_allowed", 405, "invalid_request_error"


def make_app(
    service: Service,
    admin: AdminAPI,
    compat: CompatAPI,
    metrics: Metrics,
    access: Access,
    cors_origins: Sequence[str] = (),
) -> FastAPI:
    # Without the generated documentation: handlers check bodies themselves, so it would be empty.
    app = FastAPI(openapi_url=None)
    tokens = TokensAPI(service)
    for path, handler in (
        ("/v1/completions", CompletionsAPI(service).handle),
        ("/v1/chat/completions", ChatAPI(service).handle),
        ("/generate", GenerateAPI(service).handle),
    ):
        app.add_route(path, _counted(handler, path, metrics), methods=["POST"])
    for path, method, handler in (
        ("/health", "GET", admin.health),
        ("/readiness", "GET", admin.readiness),
        ("/metrics", "GET", admin.metrics),
        ("/ping", "GET", compat.ping),
        ("/ping", "POST", compat.ping),
        ("/version", "GET", compat.version),
        ("/get_model_info", "GET", compat.model_info),
        ("/model_info", "GET", compat.model_info),
        ("/health_generate", "GET", compat.health_generate),
        ("/v1/models", "GET", admin.models),
        ("/v1/models/{model:path}", "GET", admin.model),
        ("/tokenize", "POST", tokens.tokenize),
        ("/detokenize", "POST", tokens.detokenize),
        ("/abort_request", "POST", admin.abort_request),
    ):
        app.add_route(path, handler, methods=[method])
    for path, method, handler in (
        ("/workers", "GET", admin.workers),
        ("/workers", "POST", admin.add_worker),
        ("/workers/{instance_id:path}", "DELETE", admin.remove_worker),
        ("/flush_cache", "POST", admin.flush_cache),
    ):
        app.add_route(path, _for_admins(handler, access), methods=[method])
    app.add_exception_handler(PDError, _pd_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(Guard, access=access)
    if cors_origins:
        # Outside of the guard: a browser asks for permission without a key, and its page may read
        # what the guard says.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "X-Request-Id"],
        )
    return app


def _for_admins(handler: Handler, access: Access) -> Handler:
    """Let in clients that may administrate, and log what they change."""

    async def checked(request: Request) -> Response:
        caller = access.check_admin(request.scope)
        if request.method != "GET":
            log.info("%s %s by %s", request.method, request.url.path, caller.name)
        return await handler(request)

    return checked


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
