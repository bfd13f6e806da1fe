"""Everything that generates nothing: health, workers, models, maintenance."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from pd.core.errors import InvalidRequestError, NodeFailedError, NotFoundError, UnavailableError
from pd.proxy.access import caller_of
from pd.proxy.fields import Fields
from pd.proxy.web import json_response, read_object

if TYPE_CHECKING:
    from starlette.requests import Request

    from pd.proxy.access import Access
    from pd.proxy.dispatcher import Dispatcher
    from pd.proxy.metrics import Metrics
    from pd.proxy.pool import WorkerPool
    from pd.proxy.routing import Router
    from pd.proxy.service import Service

log = logging.getLogger(__name__)

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class AdminAPI:
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
        return json_response({"status": "ok"})

    async def readiness(self, request: Request) -> Response:
        if self._dispatcher.draining:
            raise UnavailableError("the proxy is shutting down")
        if not self._router.ready():
            raise UnavailableError(
                "needs a prefill and a decode node that fit together, or a unified one"
                + self._router.reasons()
            )
        return json_response({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(self._pool.workers), media_type=METRICS_TYPE)

    async def workers(self, request: Request) -> Response:
        return json_response({"workers": [w.describe() for w in self._pool.workers]})

    async def add_worker(self, request: Request) -> Response:
        fields = Fields(await read_object(request))
        role, url = fields.string("role"), fields.string("url")
        if role is None or url is None:
            raise InvalidRequestError(
                'a worker is {"role": "prefill", "decode" or "unified", "url": "http://host:port"}'
            )
        worker = self._pool.add(role, url)  # type: ignore[arg-type]  # checked by add
        return json_response(worker.describe())

    async def remove_worker(self, request: Request) -> Response:
        worker = self._pool.find(request.path_params["instance_id"])
        self._pool.drain(worker)
        return json_response(worker.describe())

    async def models(self, request: Request) -> Response:
        names = self._service.models()
        return json_response({"object": "list", "data": [await self._model(n) for n in names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name not in self._service.models():
            raise NotFoundError(f"there is no model {name!r}", param="model")
        return json_response(await self._model(name))

    async def _model(self, name: str) -> dict[str, Any]:
        view = await self._service.model(name)
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "pd",
            "root": view.name,
            "max_model_len": view.limits.context_length,
        }

    async def abort_request(self, request: Request) -> Response:
        fields = Fields(await read_object(request))
        everything, rid = fields.boolean("abort_all"), fields.string("rid")
        if everything == bool(rid):
            raise InvalidRequestError('either {"rid": "…"} or {"abort_all": true} is needed')
        if rid is None or everything:
            caller = self._access.check_admin(request.scope)
            log.info("all requests aborted by %s", caller.name)
            return json_response({"aborted": self._dispatcher.abort_all()})
        caller = caller_of(request.scope)
        count = self._dispatcher.abort(rid, None if caller.is_admin else caller.owner)
        if not count:
            # The same words whether nobody or somebody else has it.
            raise NotFoundError(f"no request under way has the rid {rid!r}", param="rid")
        return json_response({"aborted": count})

    async def flush_cache(self, request: Request) -> Response:
        """Drop the caches of all nodes that ever proved themselves; others are not asked."""
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
        return json_response({"flushed": flushed, "skipped": skipped})
