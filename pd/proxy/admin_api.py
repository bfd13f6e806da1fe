"""Everything that generates nothing: health, nodes, models, maintenance."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, cast

from starlette.requests import Request
from starlette.responses import Response

from pd.core.brief import brief
from pd.core.errors import NodeFailedError, NotFoundError, UnavailableError
from pd.core.shared_answer import SharedAnswer
from pd.proxy import metric_families
from pd.proxy.access import caller_of
from pd.proxy.actions import (
    AbortAll,
    AbortRid,
    AddWorker,
    ForgetCaches,
    ListWorkers,
    ReadMetrics,
    RemoveWorker,
    SetRole,
)
from pd.proxy.requests.admin import AbortRequest, RoleRequest, WorkerRequest
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
    from pd.proxy.actions import Action, Everywhere
    from pd.proxy.dispatcher import Dispatcher
    from pd.proxy.pool import NodePool
    from pd.proxy.responses import ModelCard, WorkerEntry
    from pd.proxy.routing import Router
    from pd.proxy.service import Service

logger = logging.getLogger(__name__)

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class AdminAPI:
    """Health, nodes, models and maintenance. What changes the proxy's state is done by all its
    processes, and what is told of it is of all of them."""

    def __init__(
        self,
        service: Service,
        router: Router,
        pool: NodePool,
        dispatcher: Dispatcher,
        everywhere: Everywhere,
        access: Access,
    ) -> None:
        self._service = service
        self._router = router
        self._pool = pool
        self._dispatcher = dispatcher
        self._everywhere = everywhere
        self._access = access
        self._created = int(time.time())
        # Anybody may ask for these.
        self._exposition = SharedAnswer(self._expose)
        self._reasons = SharedAnswer(self._explain)

    async def health(self, request: Request) -> Response:
        """200 while the process answers."""
        return json_response(Status(status="ok"))

    async def readiness(self, request: Request) -> Response:
        """200 when a request could be served, else 503 with the reason."""
        if self._dispatcher.admission.is_closed:
            raise UnavailableError("the proxy is shutting down")
        if not self._router.ready():
            raise UnavailableError(
                "needs a prefill and a decode node that fit together, or a unified or elastic one"
                + await self._reasons.get()
            )
        return json_response(Status(status="ready"))

    async def _explain(self) -> str:
        return self._router.reasons()

    async def metrics(self, request: Request) -> Response:
        """Metrics for Prometheus."""
        return Response(await self._exposition.get(), media_type=METRICS_TYPE)

    async def _expose(self) -> bytes:
        found = [
            metric_families.families_from(value) for value in await self._everywhere(ReadMetrics())
        ]
        return metric_families.render(metric_families.merge(found))

    async def workers(self, request: Request) -> Response:
        """All nodes."""
        found = cast("list[list[WorkerEntry]]", await self._everywhere(ListWorkers()))
        # A node that was removed is known to the processes that still have requests there.
        by_url = {entry["url"]: entry for entries in reversed(found) for entry in entries}
        own = [entry["url"] for entry in found[0]]
        urls = dict.fromkeys([*own, *by_url])
        return json_response(WorkerList(workers=[by_url[url] for url in urls]))

    async def add_worker(self, request: Request, asked: WorkerRequest) -> Response:
        """Begins to use a node, or takes one that was removed back into use."""
        added, *_ = await self._everywhere(AddWorker(asked.role, asked.url))
        return json_response(added)

    async def set_role(self, request: Request, instance_id: str, asked: RoleRequest) -> Response:
        """Has an elastic node prefer another role, or leaves that to the load.

        Streams go on, caches stay.

        The node is named by instance id, `host:port` or URL.
        """
        url = self._pool.find(instance_id).url
        changed, *_ = await self._everywhere(SetRole(url, asked.role))
        return json_response(changed)

    async def remove_worker(self, request: Request, instance_id: str) -> Response:
        """Sends a node nothing new, and forgets it when it has finished what it has.

        The node is named by instance id, `host:port` or URL.
        """
        removed, *_ = await self._everywhere(RemoveWorker(self._pool.find(instance_id).url))
        return json_response(removed)

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
            "root": view.limits.model_path or view.name,
            "max_model_len": view.limits.context_length,
        }

    async def abort_request(self, request: Request, asked: AbortRequest) -> Response:
        """Ends requests by their `rid` or, for administrators, all."""
        rid = asked.rid
        if rid is None or asked.abort_all:
            caller = self._access.check_admin(request.scope)
            logger.info("all requests aborted by %s", caller.name)
            return json_response(AbortResult(aborted=await self._count(AbortAll())))
        caller = caller_of(request.scope)
        count = await self._count(AbortRid(rid, None if caller.is_admin else caller.owner))
        if not count:
            # The message does not tell whether somebody else has a request of this name.
            raise NotFoundError(f"no request under way has the rid {brief(rid)}", param="rid")
        return json_response(AbortResult(aborted=count))

    async def _count(self, action: Action) -> int:
        """Return the sum of all processes' counts."""
        return sum(cast("list[int]", await self._everywhere(action)))

    async def flush_cache(self, request: Request) -> Response:
        """Drops the prefix caches of all nodes that proved their identity; others are not asked."""
        nodes = [node for node in self._pool.nodes if node.info is not None]
        skipped = [node.url for node in self._pool.nodes if node.info is None]
        results = await asyncio.gather(*(self._pool.post(node, "/flush_cache") for node in nodes))
        asked = list(zip(nodes, results, strict=True))
        failed = [f"{node.url}: {problem}" for node, problem in asked if problem is not None]
        flushed = [node.instance_id for node, problem in asked if problem is None]
        urls = [node.url for node, problem in asked if problem is None]
        await self._everywhere(ForgetCaches(urls))
        if failed:
            raise NodeFailedError(f"not all caches were flushed: {'; '.join(failed)}")
        return json_response(FlushResult(flushed=flushed, skipped=skipped))
