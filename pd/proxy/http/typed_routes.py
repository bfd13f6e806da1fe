"""FastAPI routes whose handlers get the request's body as a validated model.

FastAPI describes the API from the handlers' signatures. We read and validate bodies ourselves,
because :class:`pd.proxy.http.bodies.Bodies` limits how many bytes are held, and large bodies are
validated on other threads.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.routing import Route

from pd.proxy.http.access import Caller, get_caller

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

    from pd.proxy.http.access import Access
    from pd.proxy.http.bodies import RawBody

    Handler = Callable[..., Awaitable[Response | None]]

logger = logging.getLogger(__name__)

BODY_PARAMETER = "body"


class ClientRequest(Request):
    """A request that passed the guard.

    Attributes:
        raw_body: the body's bytes; only for handlers that take a body.
    """

    raw_body: RawBody

    @property
    def caller(self) -> Caller:
        return get_caller(self.scope)

    async def send_response(self, response: Response) -> None:
        """Send a whole response."""
        await response(self.scope, self.receive, self._send)

    async def start_response(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the head of a response. Waits while the client does not read."""
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send_part(self, data: bytes, *, is_last: bool) -> None:
        """Send the next part of a response. Waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})


class TypedRoute(APIRoute):
    """A route whose handler takes ``request`` and the path's parameters.

    A handler that needs a body also takes ``body``, and its annotation is the body's model. A
    handler returns a response, or None if it has sent one.

    The application's ``state`` has ``bodies`` and ``access``.
    """

    is_for_admins: ClassVar[bool] = False

    def __init__(self, path: str, endpoint: Handler, **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self._model = get_type_hints(endpoint).get(BODY_PARAMETER)
        # Handlers have no dependencies, so they do not need the context stacks that FastAPI opens.
        self.app = self._serve_scope

    # FastAPI's own methods look for included routers at every request, and we have none.
    matches = Route.matches
    handle = Route.handle

    async def _serve_scope(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = ClientRequest(scope, receive, send)
        if self.is_for_admins:
            access: Access = request.app.state.access
            caller = access.check_admin(request.scope)
            if request.method != "GET":
                logger.info("%s %s by %s", request.method, request.url.path, caller.name)
        handler: Handler = self.endpoint
        if self._model is None:
            response = await handler(request=request, **request.path_params)
        else:
            is_small = self._model.administrative
            async with request.app.state.bodies.open_body(request, is_small=is_small) as raw_body:
                request.raw_body = raw_body
                # No variable of ours keeps the body, because an answer may take hours.
                response = await handler(
                    request=request, **request.path_params, body=await raw_body.parse(self._model)
                )
        if response is not None:
            await request.send_response(response)


class AdminRoute(TypedRoute):
    """A route for administrators. We log who changes something."""

    is_for_admins = True
