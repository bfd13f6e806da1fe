"""Routes of FastAPI whose handlers are called with the request's body as a model.

FastAPI describes the API from the signatures of handlers. Bodies are read and validated here and
not by FastAPI, since :class:`pd.proxy.bodies.Bodies` has budgets, and large bodies are validated on
other threads.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

from fastapi.routing import APIRoute
from starlette.routing import Route, request_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from starlette.requests import Request
    from starlette.responses import Response

    from pd.proxy.access import Access
    from pd.proxy.bodies import Bodies

    Handler = Callable[..., Awaitable[Response]]

logger = logging.getLogger(__name__)

BODY_PARAMETER = "asked"


class TypedRoute(APIRoute):
    """A route whose handler takes ``request``, the parameters of the path, and, if it has a body,
    ``asked``, whose annotation is its model.

    The application's ``state`` has ``bodies`` and ``access``.
    """

    for_admins: ClassVar[bool] = False

    def __init__(self, path: str, endpoint: Handler, **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        # Handlers have no dependencies, so FastAPI's stacks of their contexts are not needed.
        self.app = request_response(self.get_route_handler())

    # FastAPI's own ask for included routers at every request, and there are none.
    matches = Route.matches
    handle = Route.handle

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler: Handler = self.endpoint
        model = get_type_hints(handler).get(BODY_PARAMETER)
        for_admins = self.for_admins

        async def handle(request: Request) -> Response:
            if for_admins:
                _check_admin(request)
            arguments = request.path_params
            if model is None:
                return await handler(request=request, **arguments)
            bodies: Bodies = request.app.state.bodies
            async with bodies.open(request, administrative=model.administrative) as body:
                asked = await body.read(model)
                request.scope["state"]["body"] = body
                return await handler(request=request, **arguments, asked=asked)

        return handle


def _check_admin(request: Request) -> None:
    """Raises ForbiddenError for clients that may not administrate. Logs changes by the others."""
    access: Access = request.app.state.access
    caller = access.check_admin(request.scope)
    if request.method != "GET":
        logger.info("%s %s by %s", request.method, request.url.path, caller.name)


class AdminRoute(TypedRoute):
    """A route for clients that may administrate; what they change is logged."""

    for_admins = True
