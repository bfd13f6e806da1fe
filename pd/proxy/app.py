"""The HTTP application: paths, access, errors."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route

from pd import __version__
from pd.core.brief import shorten_text
from pd.core.errors import InvalidRequestError, NotFoundError, PDError
from pd.proxy.api.answer_schemas import (
    AbortResult,
    AnthropicEvent,
    AnthropicMessage,
    BatchList,
    BatchObject,
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    DeletedObject,
    DetokenizeResult,
    FileList,
    FileObject,
    FlushResult,
    InvocationAnswer,
    InvocationEvent,
    ModelCard,
    ModelInfo,
    ModelList,
    NativeAnswer,
    NativeResult,
    ResponseEvent,
    ResponseObject,
    Scores,
    ServerFacts,
    ServerLoad,
    Status,
    TokenCount,
    TokenizeResult,
    TokenizerFacts,
    Version,
    WorkerEntry,
    WorkerList,
)
from pd.proxy.api.anthropic_api import AnthropicAPI
from pd.proxy.api.chat_api import ChatAPI
from pd.proxy.api.completions_api import CompletionsAPI
from pd.proxy.api.description import add_description, describe_responses
from pd.proxy.api.files_api import UPLOAD_FORM
from pd.proxy.api.generate_api import GenerateAPI
from pd.proxy.api.invocations_api import InvocationsAPI
from pd.proxy.api.ollama_api import OllamaAPI
from pd.proxy.api.ollama_models import REFUSED, OllamaModelsAPI
from pd.proxy.api.ollama_schemas import OllamaAnswer, OllamaFacts, OllamaModels
from pd.proxy.api.score_api import ScoreAPI
from pd.proxy.api.tokens_api import TokensAPI
from pd.proxy.http.access import Guard
from pd.proxy.http.json_responses import error_response, read_request_id
from pd.proxy.http.typed_routes import AdminRoute, TypedRoute

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

    from pd.proxy.api.admin_api import AdminAPI
    from pd.proxy.api.batches_api import BatchesAPI
    from pd.proxy.api.compat_api import CompatAPI
    from pd.proxy.api.files_api import FilesAPI
    from pd.proxy.api.responses_api import ResponsesAPI
    from pd.proxy.api.service import Service
    from pd.proxy.dispatch.proxy_metrics import Metrics
    from pd.proxy.http.access import Access
    from pd.proxy.http.typed_routes import Handler
    from pd.proxy.routing.routing import Router


# FastAPI's own telemetry (from 0.165 on; earlier versions ignore this) would look for its providers
# at each request, and an environment variable could make it send requests' data to a collector.
_NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
# Errors quote at most this many characters of a path.
_MAX_PATH_CHARACTERS = 100


class MethodNotAllowedError(PDError):
    """The path exists, but not for this method."""

    kind, status, type = "method_not_allowed", 405, "invalid_request_error"


def make_app(
    service: Service,
    router: Router,
    admin: AdminAPI,
    compat: CompatAPI,
    responses: ResponsesAPI,
    files: FilesAPI,
    batches: BatchesAPI,
    metrics: Metrics,
    access: Access,
    cors_origins: Sequence[str] = (),
) -> FastAPI:
    app = FastAPI(title="pd", version=__version__, openapi_url=None, telemetry=_NO_TELEMETRY)
    app.state.bodies, app.state.access = service.bodies, access
    endpoints = _list_endpoints(service, router, admin, compat, responses, files, batches)
    for endpoint in endpoints:
        _add_endpoint(app, endpoint)
    add_description(app, [endpoint.events for endpoint in endpoints])
    counted = {endpoint.path for endpoint in endpoints if endpoint.events is not None}

    async def refuse(request: Request, error: Exception) -> Response:
        """Answer requests rejected before they became jobs, and count them like jobs."""
        assert isinstance(error, PDError)
        if request.url.path in counted:
            metrics.count_refusal(request.url.path, error.kind)
        return error_response(error, path=request.url.path)

    app.add_exception_handler(PDError, refuse)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(ClientDisconnect, _answer_disconnect)
    app.add_exception_handler(Exception, _answer_unexpected)
    app.add_middleware(Guard, access=access)
    if cors_origins:
        # This goes around the guard, because a browser asks for permission without a key, and its
        # page must be able to read the guard's errors.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "X-Request-Id"],
        )
    return app


class _Endpoint(NamedTuple):
    """A path and its handler.

    Attributes:
        answer: type of the answer's JSON; None without JSON.
        events: type of the events' JSON, if an answer may be streamed.
        is_for_admins: only administrators have access.
        form: description of a body that is a form.
    """

    method: str
    path: str
    handler: Handler
    answer: object = None
    events: object = None
    is_for_admins: bool = False
    form: dict[str, Any] | None = None


def _list_endpoints(
    service: Service,
    router: Router,
    admin: AdminAPI,
    compat: CompatAPI,
    responses: ResponsesAPI,
    files: FilesAPI,
    batches: BatchesAPI,
) -> list[_Endpoint]:
    tokens, endpoint = TokensAPI(service), _Endpoint
    completions, chat = CompletionsAPI(service), ChatAPI(service)
    anthropic = AnthropicAPI(service)
    ollama, ollama_models = OllamaAPI(service), OllamaModelsAPI(service, router)
    native, invocations = GenerateAPI(service), InvocationsAPI(chat, completions)
    # The busiest routes come first, because routes are tried one after the other.
    return [
        endpoint("POST", "/v1/chat/completions", chat.handle, ChatCompletion, ChatChunk),
        endpoint("POST", "/v1/completions", completions.handle, Completion, CompletionChunk),
        endpoint("POST", "/v1/messages", anthropic.handle, AnthropicMessage, AnthropicEvent),
        endpoint("POST", "/v1/messages/count_tokens", anthropic.count_tokens, TokenCount),
        endpoint("POST", "/v1/score", ScoreAPI(service).handle, Scores),
        endpoint("POST", "/api/chat", ollama.chat, OllamaAnswer, OllamaAnswer),
        endpoint("POST", "/api/generate", ollama.generate, OllamaAnswer, OllamaAnswer),
        endpoint("POST", "/v1/responses", responses.create, ResponseObject, ResponseEvent),
        endpoint("POST", "/invocations", invocations.handle, InvocationAnswer, InvocationEvent),
        endpoint("POST", "/generate", native.handle, NativeAnswer, NativeResult),
        endpoint("GET", "/v1/responses/{response_id}", responses.get_response, ResponseObject),
        endpoint("DELETE", "/v1/responses/{response_id}", responses.delete_response, DeletedObject),
        endpoint("POST", "/v1/files", files.upload_file, FileObject, form=UPLOAD_FORM),
        endpoint("GET", "/v1/files", files.list_files, FileList),
        endpoint("GET", "/v1/files/{file_id}", files.get_file, FileObject),
        endpoint("DELETE", "/v1/files/{file_id}", files.delete_file, DeletedObject),
        endpoint("GET", "/v1/files/{file_id}/content", files.get_content),
        endpoint("POST", "/v1/batches", batches.create_batch, BatchObject),
        endpoint("GET", "/v1/batches", batches.list_batches, BatchList),
        endpoint("GET", "/v1/batches/{batch_id}", batches.get_batch, BatchObject),
        endpoint("POST", "/v1/batches/{batch_id}/cancel", batches.cancel_batch, BatchObject),
        endpoint("POST", "/v1/embeddings", compat.refuse_embeddings),
        endpoint("GET", "/v1/models", admin.list_models, ModelList),
        endpoint("GET", "/v1/models/{model:path}", admin.get_model, ModelCard),
        endpoint("POST", "/tokenize", tokens.tokenize, TokenizeResult),
        endpoint("POST", "/detokenize", tokens.detokenize, DetokenizeResult),
        endpoint("POST", "/v1/tokenize", tokens.tokenize, TokenizeResult),
        endpoint("POST", "/v1/detokenize", tokens.detokenize, DetokenizeResult),
        endpoint("GET", "/tokenizer_info", tokens.describe_tokenizer, TokenizerFacts),
        endpoint("POST", "/abort_request", admin.abort_request, AbortResult),
        endpoint("GET", "/health", admin.check_health, Status),
        endpoint("GET", "/readiness", admin.check_readiness, Status),
        endpoint("GET", "/metrics", admin.export_metrics),
        endpoint("GET", "/ping", compat.answer_ping),
        endpoint("POST", "/ping", compat.answer_ping),
        endpoint("GET", "/version", compat.get_version, Version),
        endpoint("GET", "/get_model_info", compat.describe_model, ModelInfo),
        endpoint("GET", "/model_info", compat.describe_model, ModelInfo),
        endpoint("GET", "/server_info", compat.describe_server, ServerFacts),
        endpoint("GET", "/get_server_info", compat.describe_server, ServerFacts),
        endpoint("GET", "/", ollama_models.greet),
        endpoint("GET", "/api/version", ollama_models.get_version, Version),
        endpoint("GET", "/api/tags", ollama_models.list_models, OllamaModels),
        endpoint("GET", "/api/ps", ollama_models.list_running, OllamaModels),
        endpoint("POST", "/api/show", ollama_models.show_model, OllamaFacts),
        *(endpoint(*place, ollama_models.refuse) for place in REFUSED),
        endpoint("GET", "/load", compat.report_load, ServerLoad),
        endpoint("GET", "/health_generate", compat.check_generation),
        endpoint("GET", "/workers", admin.list_workers, WorkerList, is_for_admins=True),
        endpoint("POST", "/workers", admin.add_worker, WorkerEntry, is_for_admins=True),
        endpoint(
            "POST",
            "/workers/{instance_id:path}",
            admin.set_role,
            WorkerEntry,
            is_for_admins=True,
        ),
        endpoint(
            "DELETE",
            "/workers/{instance_id:path}",
            admin.remove_worker,
            WorkerEntry,
            is_for_admins=True,
        ),
        endpoint("POST", "/flush_cache", admin.flush_cache, FlushResult, is_for_admins=True),
        endpoint("POST", "/reset_prefix_cache", admin.flush_cache, FlushResult, is_for_admins=True),
    ]


def _add_endpoint(app: FastAPI, endpoint: _Endpoint) -> None:
    route_class = AdminRoute if endpoint.is_for_admins else TypedRoute
    app.router.add_api_route(
        endpoint.path,
        endpoint.handler,
        methods=[endpoint.method],
        response_model=None,
        response_class=Response if endpoint.answer is None else JSONResponse,
        responses=describe_responses(endpoint.answer, endpoint.events),
        openapi_extra=endpoint.form,
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


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Answer Starlette's own errors, which are about unknown paths and methods."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {shorten_text(request.url.path, _MAX_PATH_CHARACTERS)}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        return error_response(NotFoundError(f"there is no {where}"), path=request.url.path)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        response = error_response(
            MethodNotAllowedError(f"{where} is not possible"), path=request.url.path
        )
        response.headers["Allow"] = ", ".join(sorted(_list_methods(request)))
        return response
    return error_response(InvalidRequestError(f"{where}: {error.detail}"), path=request.url.path)


def _list_methods(request: Request) -> set[str]:
    """List all methods of a path.

    Starlette's error names only those of the first matching route, and each of our methods has its
    own route.
    """
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    here = (route for route in routes if route.matches(request.scope)[0] != Match.NONE)
    return set().union(*(route.methods or () for route in here))


async def _answer_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _answer_unexpected(request: Request, error: Exception) -> Response:
    # Starlette re-raises the error after this response, and uvicorn logs its traceback.
    error = PDError("internal error; the proxy's log has the details")
    return error_response(
        error, {"X-Request-Id": read_request_id(request.scope)}, path=request.url.path
    )
