"""Sends the requests of batches through the proxy's own application, next to those of clients."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from pd.batch import attempts
from pd.batch.attempts import BatchAttempt, make_attempt, make_failure
from pd.proxy.http.access import Caller
from pd.proxy.http.exchange import Exchange, make_scope
from pd.proxy.http.json_responses import REQUEST_ID

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from pd.batch.requests import BatchRequest
    from pd.core.errors import PDError
    from pd.proxy.dispatch.admission import Admission
    from pd.proxy.routing.routing import Router

logger = logging.getLogger(__name__)

# Requests of clients have priority 0 unless they say otherwise.
BATCH_PRIORITY = -1
# How soon we look again whether there is room for a request of a batch.
_BUSY_SECONDS = 0.1


class BatchSender:
    """Sends one attempt at a request, and waits for the whole answer. Runs on the event loop.

    Args:
        app: the proxy's application.
        router: tells whether there are nodes.
        admission: tells how full the proxy is.
    """

    def __init__(self, app: ASGIApp, router: Router, admission: Admission) -> None:
        self._app = app
        self._router = router
        self._admission = admission
        # Nothing ends all requests of a proxy at once.
        self._failure: asyncio.Future[PDError] = asyncio.get_running_loop().create_future()

    async def send_request(self, owner: str, request: BatchRequest, name: str) -> BatchAttempt:
        """Send a request for the key ``owner``, with ``name`` as its X-Request-Id.

        We wait while the proxy has no nodes. We also wait while it is half full, so that batches
        take no room from clients.
        """
        admission = self._admission
        while not admission.is_closed and (admission.is_half_full or not self._router.can_serve()):
            await asyncio.sleep(_BUSY_SECONDS)
        scope = make_scope("POST", request.url, request.content)
        scope["headers"].append((REQUEST_ID, name.encode()))
        scope["state"] = {"caller": Caller(owner, name="a batch", max_priority=BATCH_PRIORITY)}
        exchange = Exchange(self._app, scope, request.content, self._failure)
        body = bytearray()
        try:
            async with contextlib.aclosing(exchange.iter_parts()) as parts:
                async for part in parts:
                    body += part
                    if len(body) > attempts.MAX_ANSWER_BYTES:
                        limit = f"an answer has at most {attempts.MAX_ANSWER_BYTES >> 20} MiB"
                        return make_failure("answer_too_long", limit)
        except Exception:  # a defect of ours, which the application has answered with 500
            logger.exception("a request of a batch failed")
        if not exchange.status:
            return make_failure("internal", "the proxy gave no answer")
        return make_attempt(exchange.status, exchange.headers, bytes(body), name)
