"""The HTTP application: paths, who may ask for them, errors."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route

from pd import __version__
from pd.core.brief import shorten
from pd.core.errors import InvalidRequestError, NotFoundError, PDError
from pd.proxy.access import Guard
from pd.proxy.chat_api import ChatAPI
from pd.proxy.completions_api import CompletionsAPI
from pd.proxy.description import add_description, answers
from pd.proxy.generate_api import GenerateAPI
from pd.proxy.invocations_api import InvocationsAPI
from pd.proxy.responses import (
    AbortResult,
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    DetokenizeResult,
    FlushResult,
    InvocationAnswer,
    InvocationEvent,
    ModelCard,
    ModelInfo,
    ModelList,
    NativeAnswer,
    NativeResult,
    ServerFacts,
    ServerLoad,
    Status,
    TokenizeResult,
    TokenizerFacts,
    Version,
    WorkerEntry,
    WorkerList,
)
from pd.proxy.tokens_api import TokensAPI
from pd.proxy.typed_routes import AdminRoute, TypedRoute
from pd.proxy.web import error_response

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

    from pd.proxy.access import Access
    from pd.proxy.admin_api import AdminAPI
    from pd.proxy.compat_api import CompatAPI
    from pd.proxy.metrics import Metrics
    from pd.proxy.service import Service
    from pd.proxy.typed_routes import Handler


# Characters of a path that an error quotes.
_MAX_PATH_CHARACTERS = 100


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
    app = FastAPI(title="pd", version=__version__, openapi_url=None)
    app.state.bodies, app.state.access = service.bodies, access
    endpoints = _endpoints(service, admin, compat)
    for endpoint in endpoints:
        _add(app, endpoint)
    add_description(app, [endpoint.events for endpoint in endpoints])
    counted = {endpoint.path for endpoint in endpoints if endpoint.events is not None}

    async def refuse(request: Request, error: Exception) -> Response:
        """Answer what is refused before it becomes a job, and count it where jobs are counted."""
        assert isinstance(error, PDError)
        if request.url.path in counted:
            metrics.request_refused(request.url.path, error.kind)
        return error_response(error)

    app.add_exception_handler(PDError, refuse)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(Guard, access=access)
    if cors_origins:
        # Outside of the guard: a browser asks for permission without a key, and its page may read
        # the guard's errors.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "X-Request-Id"],
        )
    return app


class _Endpoint(NamedTuple):
    """A path and what answers there.

    Attributes:
        answer: type of the answer's JSON; None where there is no JSON.
        events: type of the events' JSON, where an answer may be streamed.
        for_admins: only clients that may administrate are let in.
    """

    method: str
    path: str
    handler: Handler
    answer: object = None
    events: object = None
    for_admins: bool = False


def _endpoints(service: Service, admin: AdminAPI, compat: CompatAPI) -> list[_Endpoint]:
    tokens, endpoint = TokensAPI(service), _Endpoint
    completions, chat = CompletionsAPI(service), ChatAPI(service)
    native, invocations = GenerateAPI(service), InvocationsAPI(chat, completions)
    # The routes that are asked for most come first, since they are tried one after the other.
    return [
        endpoint("POST", "/v1/chat/completions", chat.handle, ChatCompletion, ChatChunk),
        endpoint("POST", "/v1/completions", completions.handle, Completion, CompletionChunk),
        endpoint("POST", "/invocations", invocations.handle, InvocationAnswer, InvocationEvent),
        endpoint("POST", "/generate", native.handle, NativeAnswer, NativeResult),
        endpoint("GET", "/v1/models", admin.models, ModelList),
        endpoint("GET", "/v1/models/{model:path}", admin.model, ModelCard),
        endpoint("POST", "/tokenize", tokens.tokenize, TokenizeResult),
        endpoint("POST", "/detokenize", tokens.detokenize, DetokenizeResult),
        endpoint("POST", "/v1/tokenize", tokens.tokenize, TokenizeResult),
        endpoint("POST", "/v1/detokenize", tokens.detokenize, DetokenizeResult),
        endpoint("GET", "/tokenizer_info", tokens.info, TokenizerFacts),
        endpoint("POST", "/abort_request", admin.abort_request, AbortResult),
        endpoint("GET", "/health", admin.health, Status),
        endpoint("GET", "/readiness", admin.readiness, Status),
        endpoint("GET", "/metrics", admin.metrics),
        endpoint("GET", "/ping", compat.ping),
        endpoint("POST", "/ping", compat.ping),
        endpoint("GET", "/version", compat.version, Version),
        endpoint("GET", "/get_model_info", compat.model_info, ModelInfo),
        endpoint("GET", "/model_info", compat.model_info, ModelInfo),
        endpoint("GET", "/server_info", compat.server_info, ServerFacts),
        endpoint("GET", "/get_server_info", compat.server_info, ServerFacts),
        endpoint("GET", "/load", compat.load, ServerLoad),
        endpoint("GET", "/health_generate", compat.health_generate),
        endpoint("GET", "/workers", admin.workers, WorkerList, for_admins=True),
        endpoint("POST", "/workers", admin.add_worker, WorkerEntry, for_admins=True),
        endpoint(
            "POST",
            "/workers/{instance_id:path}",
            admin.set_role,
            WorkerEntry,
            for_admins=True,
        ),
        endpoint(
            "DELETE",
            "/workers/{instance_id:path}",
            admin.remove_worker,
            WorkerEntry,
            for_admins=True,
        ),
        endpoint("POST", "/flush_cache", admin.flush_cache, FlushResult, for_admins=True),
        endpoint("POST", "/reset_prefix_cache", admin.flush_cache, FlushResult, for_admins=True),
    ]


def _add(app: FastAPI, endpoint: _Endpoint) -> None:
    route_class = AdminRoute if endpoint.for_admins else TypedRoute
    app.router.add_api_route(
        endpoint.path,
        endpoint.handler,
        methods=[endpoint.method],
        response_model=None,
        response_class=Response if endpoint.answer is None else JSONResponse,
        responses=answers(endpoint.answer, endpoint.events),
        route_class_override=route_class,
    )
    if endpoint.method == "GET":
        app.router.add_api_route(
            endpoint.path,
            endpoint.handler,
            methods=["HEAD"],
            response_model=None,
            include_in_schema=False,
            route_class_override=route_class,
        )


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {shorten(request.url.path, _MAX_PATH_CHARACTERS)}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        return error_response(NotFoundError(f"there is no {where}"))
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        response = error_response(MethodNotAllowedError(f"{where} is not possible"))
        response.headers["Allow"] = ", ".join(sorted(_methods_of(request)))
        return response
    return error_response(InvalidRequestError(f"{where}: {error.detail}"))


def _methods_of(request: Request) -> set[str]:
    """All methods of a path: each has a route of its own, of which Starlette names the first's."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    here = (route for route in routes if route.matches(request.scope)[0] != Match.NONE)
    return set().union(*(route.methods or () for route in here))


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _unexpected(request: Request, error: Exception) -> Response:
    # Starlette raises the error again after this response, and uvicorn logs its traceback.
    return error_response(PDError("internal error; the proxy's log has the details"))
