"""Everything that generates nothing: health, workers, models, maintenance."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from pd.core.brief import brief
from pd.core.errors import NodeFailedError, NotFoundError, UnavailableError
from pd.proxy.access import caller_of
from pd.proxy.requests import AbortRequest, WorkerRequest
from pd.proxy.responses import (
    AbortResult,
    FlushResult,
    ModelList,
    Status,
    WorkerList,
)
from pd.proxy.web import json_response

if TYPE_CHECKING:
    from pd.proxy.access import Access
    from pd.proxy.dispatcher import Dispatcher
    from pd.proxy.metrics import Metrics
    from pd.proxy.pool import WorkerPool
    from pd.proxy.responses import ModelCard
    from pd.proxy.routing import Router
    from pd.proxy.service import Service

log = logging.getLogger(__name__)

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class AdminAPI:
    """Health, workers, models and maintenance."""

    def __init__(
        self,
        service: Service,
        router: Router,
        pool: WorkerPool,
        dispatcher: Dispatcher,
        metrics: Metrics,
        access: Access,
    ) -> None:
        self._service = service
        self._router = router
        self._pool = pool
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._access = access
        self._created = int(time.time())

    async def health(self, request: Request) -> Response:
        """200 while the process answers."""
        return json_response(Status(status="ok"))

    async def readiness(self, request: Request) -> Response:
        """200 when a request could be served, else 503 with the reason."""
        if self._dispatcher.draining:
            raise UnavailableError("the proxy is shutting down")
        if not self._router.ready():
            raise UnavailableError(
                "needs a prefill and a decode node that fit together, or a unified or elastic one"
                + self._router.reasons()
            )
        return json_response(Status(status="ready"))

    async def metrics(self, request: Request) -> Response:
        """Metrics for Prometheus."""
        return Response(self._metrics.render(self._pool.workers), media_type=METRICS_TYPE)

    async def workers(self, request: Request) -> Response:
        """All nodes."""
        workers = WorkerList(workers=[worker.describe() for worker in self._pool.workers])
        return json_response(workers)

    async def add_worker(self, request: Request, asked: WorkerRequest) -> Response:
        """Begins to use a node, or takes one that was removed back into use."""
        return json_response(self._pool.add(asked.role, asked.url).describe())

    async def remove_worker(self, request: Request, instance_id: str) -> Response:
        """Sends a node nothing new, and forgets it when it has finished what it has.

        The node is named by instance id, `host:port` or URL.
        """
        worker = self._pool.find(instance_id)
        self._pool.drain(worker)
        return json_response(worker.describe())

    async def models(self, request: Request) -> Response:
        """All served models."""
        cards = [await self._model(name) for name in self._service.models()]
        return json_response(ModelList(object="list", data=cards))

    async def model(self, request: Request, model: str) -> Response:
        """One served model."""
        if model not in self._service.models():
            raise NotFoundError(f"there is no model {brief(model)}", param="model")
        return json_response(await self._model(model))

    async def _model(self, name: str) -> ModelCard:
        view = await self._service.model(name)
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "pd",
            "root": view.name,
            "max_model_len": view.limits.context_length,
        }

    async def abort_request(self, request: Request, asked: AbortRequest) -> Response:
        """Ends requests by their `rid` or, for administrators, all."""
        rid = asked.rid
        if rid is None or asked.abort_all:
            caller = self._access.check_admin(request.scope)
            log.info("all requests aborted by %s", caller.name)
            return json_response(AbortResult(aborted=self._dispatcher.abort_all()))
        caller = caller_of(request.scope)
        count = self._dispatcher.abort(rid, None if caller.is_admin else caller.owner)
        if not count:
            # The message does not tell whether somebody else has a request of this name.
            raise NotFoundError(f"no request under way has the rid {brief(rid)}", param="rid")
        return json_response(AbortResult(aborted=count))

    async def flush_cache(self, request: Request) -> Response:
        """Drops the prefix caches of all nodes that proved who they are; others are not asked."""
        workers = [worker for worker in self._pool.workers if worker.info is not None]
        skipped = [worker.url for worker in self._pool.workers if worker.info is None]
        results = await asyncio.gather(
            *(self._pool.post(worker, "/flush_cache") for worker in workers)
        )
        failed = []
        for worker, problem in zip(workers, results, strict=True):
            if problem is None:
                worker.tree = None
            else:
                failed.append(f"{worker.url}: {problem}")
        if failed:
            raise NodeFailedError(f"not all caches were flushed: {'; '.join(failed)}")
        flushed = [worker.instance_id for worker in workers]
        return json_response(FlushResult(flushed=flushed, skipped=skipped))
