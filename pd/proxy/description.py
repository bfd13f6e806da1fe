"""The description of the API: ``/openapi.json``, and ``/docs`` as a page for people."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from starlette.responses import HTMLResponse, Response

from pd.proxy.docs_page import render_page
from pd.proxy.responses import ErrorBody

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
# The page needs neither scripts nor anything from elsewhere.
_PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


def answers(answer: object, events: object) -> dict[int | str, dict[str, Any]]:
    """FastAPI's description of an endpoint's responses.

    Args:
        answer: type of the JSON, or None where there is none.
        events: type of the events' JSON, or None where nothing is streamed.
    """
    good: dict[str, Any] = {"description": "The answer."}
    if answer is not None:
        good["model"] = answer
    if events is not None:
        good["description"] = _STREAM
        reference = {"$ref": _REF.format(model=_name(events))}
        good["content"] = {"text/event-stream": {"schema": reference}}
    return {200: good, "4XX": _error("The request was refused."), "5XX": _error("It failed.")}


def add_description(app: FastAPI, events: Iterable[Any]) -> None:
    """Serve the description of all routes that the application has.

    Args:
        events: types that ``answers`` was given.
    """
    types = {_name(event): event for event in events if event is not None}

    @cache
    def document() -> dict[str, Any]:
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
    def openapi() -> bytes:
        return json.dumps(document(), ensure_ascii=False).encode()

    @cache
    def page() -> str:
        return render_page(document())

    # Starlette calls what is no coroutine on a thread: the first answer takes some time.
    def get_document(request: Request) -> Response:
        return Response(openapi(), media_type="application/json")

    def get_page(request: Request) -> Response:
        return HTMLResponse(page(), headers=_PAGE_HEADERS)

    handlers: dict[str, Callable[[Request], Response]] = {
        "/openapi.json": get_document,
        "/docs": get_page,
    }
    for path, handler in handlers.items():
        app.add_route(path, handler, include_in_schema=False)


def _error(description: str) -> dict[str, Any]:
    return {"description": description, "model": ErrorBody}


def _name(kind: object) -> str:
    """A type's name among the components."""
    name = getattr(kind, "__name__", None)
    assert isinstance(name, str)
    return name
