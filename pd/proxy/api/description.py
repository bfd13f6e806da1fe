"""The API's description: ``/openapi.json`` for programs and ``/docs`` for people."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from starlette.responses import HTMLResponse, Response

from pd.proxy.api.answer_schemas import ErrorBody
from pd.proxy.api.docs_page import render_page

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fastapi import FastAPI
    from starlette.requests import Request

_REF = "#/components/schemas/{model}"
_ABOUT = (
    "Inference on prefill and decode nodes. Bodies are JSON; `null` counts as absent. Where the "
    "proxy has API keys, requests need `Authorization: Bearer KEY`, except those for `/health`, "
    "`/readiness`, `/ping` and `/metrics`."
)
_STREAM = (
    "The answer. With `stream` server-sent events, each with a JSON object, and `data: [DONE]` at "
    "the end."
)
# The page needs no scripts and no other resources.
_PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


def describe_responses(answer: object, events: object) -> dict[int | str, dict[str, Any]]:
    """Describe an endpoint's responses for FastAPI.

    Args:
        answer: type of the response's JSON; None if the response is not JSON.
        events: type of the events' JSON; None if the endpoint has no streams.
    """
    success: dict[str, Any] = {"description": "The answer."}
    if answer is not None:
        success["model"] = answer
    if events is not None:
        success["description"] = _STREAM
        reference = {"$ref": _REF.format(model=_get_name(events))}
        success["content"] = {"text/event-stream": {"schema": reference}}
    return {
        200: success,
        "4XX": {"description": "The request was refused.", "model": ErrorBody},
        "5XX": {"description": "The request failed.", "model": ErrorBody},
    }


def add_description(app: FastAPI, events: Iterable[Any]) -> None:
    """Serve the description of all routes of the application.

    Args:
        events: the types that :func:`describe_responses` got.
    """
    types = {_get_name(event): event for event in events if event is not None}

    @cache
    def make_document() -> dict[str, Any]:
        described = get_openapi(
            title=app.title, version=app.version, description=_ABOUT, routes=app.routes
        )
        components = described["components"]
        adapters = [(name, "serialization", TypeAdapter(kind)) for name, kind in types.items()]
        _, schemas = TypeAdapter.json_schemas(adapters, ref_template=_REF)  # type: ignore[arg-type]  # the mode is a literal
        components["schemas"] = schemas["$defs"] | components["schemas"]
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"key": []}, {}]
        return described

    @cache
    def encode_document() -> bytes:
        return json.dumps(make_document(), ensure_ascii=False).encode()

    @cache
    def make_page() -> str:
        return render_page(make_document())

    # Starlette calls plain functions on a thread, so the slow first answer does not hold up the
    # loop.
    def get_document(request: Request) -> Response:
        return Response(encode_document(), media_type="application/json")

    def get_page(request: Request) -> Response:
        return HTMLResponse(make_page(), headers=_PAGE_HEADERS)

    handlers: dict[str, Callable[[Request], Response]] = {
        "/openapi.json": get_document,
        "/docs": get_page,
    }
    for path, handler in handlers.items():
        app.add_route(path, handler, include_in_schema=False)


def _get_name(kind: object) -> str:
    """Return a type's name among the components of the document."""
    name = getattr(kind, "__name__", None)
    assert isinstance(name, str)
    return name
