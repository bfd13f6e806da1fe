"""Endpoints for health, metrics, nodes, models and maintenance."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from starlette.responses import Response

from pd.core.brief import short_repr
from pd.core.errors import NodeFailedError, NotFoundError, UnavailableError
from pd.net.shared_answer import SharedAnswer
from pd.proxy.api.answer_schemas import (
    AbortResult,
    FlushResult,
    ModelList,
    Status,
    WorkerList,
)
from pd.proxy.http.json_responses import json_response
from pd.proxy.http.typed_routes import ClientRequest
from pd.proxy.requests.admin import AbortRequest, RoleRequest, WorkerRequest
from pd.proxy.workers import metric_families
from pd.proxy.workers.actions import (
    AbortAll,
    AbortRid,
    AddWorker,
    ForgetCaches,
    ListWorkers,
    ReadMetrics,
    RemoveWorker,
    SetRole,
)

if TYPE_CHECKING:
    from pd.proxy.api.answer_schemas import ModelCard, WorkerEntry
    from pd.proxy.api.service import Service
    from pd.proxy.dispatch.dispatcher import Dispatcher
    from pd.proxy.http.access import Access
    from pd.proxy.nodes.pool import NodePool
    from pd.proxy.routing.routing import Router
    from pd.proxy.workers.actions import Action, Everywhere

logger = logging.getLogger(__name__)

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Anthropic's clients send this header with every request.
_ANTHROPIC_VERSION = "anthropic-version"


def _make_anthropic_card(card: ModelCard) -> dict[str, Any]:
    created = datetime.fromtimestamp(card["created"], UTC).isoformat().replace("+00:00", "Z")
    name = card["id"]
    return {"type": "model", "id": name, "display_name": name, "created_at": created}


class AdminAPI:
    """Endpoints for health, metrics, nodes, models and maintenance.

    All processes of the proxy perform an action, and answers cover all of them.
    """

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
        # Clients need no key for these, so requests at the same time share an answer.
        self._exposition = SharedAnswer(self._render_metrics)
        self._reasons = SharedAnswer(self._explain_unready)

    async def check_health(self, request: ClientRequest) -> Response:
        """200 while the process answers."""
        return json_response(Status(status="ok"))

    async def check_readiness(self, request: ClientRequest) -> Response:
        """200 when a request could be served, else 503 with the reason."""
        if self._dispatcher.admission.is_closed:
            raise UnavailableError("the proxy is shutting down")
        if not self._router.can_serve():
            raise UnavailableError(
                "needs a prefill and a decode node that fit together, or a unified or elastic one"
                + await self._reasons.get_answer()
            )
        return json_response(Status(status="ready"))

    async def _explain_unready(self) -> str:
        return self._router.describe_problems()

    async def export_metrics(self, request: ClientRequest) -> Response:
        """Metrics for Prometheus."""
        return Response(await self._exposition.get_answer(), media_type=METRICS_TYPE)

    async def _render_metrics(self) -> bytes:
        families = [
            metric_families.decode_families(value)
            for value in await self._everywhere(ReadMetrics())
        ]
        return metric_families.render_families(metric_families.merge_families(families))

    async def list_workers(self, request: ClientRequest) -> Response:
        """All nodes."""
        entries_of_all = cast("list[list[WorkerEntry]]", await self._everywhere(ListWorkers()))
        # Processes with requests on a removed node keep it. Our own entries win.
        by_url = {entry["url"]: entry for entries in reversed(entries_of_all) for entry in entries}
        own = [entry["url"] for entry in entries_of_all[0]]
        urls = dict.fromkeys([*own, *by_url])
        return json_response(WorkerList(workers=[by_url[url] for url in urls]))

    async def add_worker(self, request: ClientRequest, body: WorkerRequest) -> Response:
        """Adds a node, or takes a removed one back into use."""
        added, *_ = await self._everywhere(AddWorker(body.role, body.url))
        return json_response(added)

    async def set_role(
        self, request: ClientRequest, instance_id: str, body: RoleRequest
    ) -> Response:
        """Sets the preferred role of an elastic node. With `auto` the load decides.

        Running streams continue, and the cache stays.

        The node is named by instance id, `host:port` or URL.
        """
        url = self._pool.find_node(instance_id).url
        changed, *_ = await self._everywhere(SetRole(url, body.role))
        return json_response(changed)

    async def remove_worker(self, request: ClientRequest, instance_id: str) -> Response:
        """Drains a node: it gets no new requests, and is removed when it has finished its own.

        The node is named by instance id, `host:port` or URL.
        """
        removed, *_ = await self._everywhere(RemoveWorker(self._pool.find_node(instance_id).url))
        return json_response(removed)

    async def list_models(self, request: ClientRequest) -> Response:
        """All served models, in Anthropic's shape for its clients."""
        cards = [await self._make_card(name) for name in self._service.list_models()]
        if _ANTHROPIC_VERSION in request.headers:
            models = [_make_anthropic_card(card) for card in cards]
            ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]} if cards else {}
            return json_response({"data": models, "has_more": False} | ends)
        return json_response(ModelList(object="list", data=cards))

    async def get_model(self, request: ClientRequest, model: str) -> Response:
        """One served model."""
        card = await self._make_card(self._service.resolve_name(model))
        is_for_anthropic = _ANTHROPIC_VERSION in request.headers
        return json_response(_make_anthropic_card(card) if is_for_anthropic else card)

    async def _make_card(self, name: str) -> ModelCard:
        view = await self._service.find_model(name)
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "pd",
            "root": view.limits.model_path or view.name,
            "max_model_len": view.limits.context_length,
        }

    async def abort_request(self, request: ClientRequest, body: AbortRequest) -> Response:
        """Ends requests by their `rid` or, for administrators, all."""
        rid = body.rid
        if rid is None or body.abort_all:
            caller = self._access.check_admin(request.scope)
            logger.info("all requests aborted by %s", caller.name)
            return json_response(AbortResult(aborted=await self._sum_counts(AbortAll())))
        caller = request.caller
        count = await self._sum_counts(AbortRid(rid, None if caller.is_admin else caller.owner))
        if not count:
            # The message must not reveal whether another client has a request of this name.
            raise NotFoundError(f"no request under way has the rid {short_repr(rid)}", param="rid")
        return json_response(AbortResult(aborted=count))

    async def _sum_counts(self, action: Action) -> int:
        """Perform an action in all processes, and add up their counts."""
        return sum(cast("list[int]", await self._everywhere(action)))

    async def flush_cache(self, request: ClientRequest) -> Response:
        """Drops the prefix caches of all nodes whose identity is known, and skips the others."""
        nodes = [node for node in self._pool.nodes if node.info is not None]
        skipped = [node.url for node in self._pool.nodes if node.info is None]
        results = await asyncio.gather(
            *(self._pool.post_to_node(node, "/flush_cache") for node in nodes)
        )
        outcomes = list(zip(nodes, results, strict=True))
        failed = [f"{node.url}: {problem}" for node, problem in outcomes if problem is not None]
        flushed = [node.instance_id for node, problem in outcomes if problem is None]
        urls = [node.url for node, problem in outcomes if problem is None]
        await self._everywhere(ForgetCaches(urls))
        if failed:
            raise NodeFailedError(f"not all caches were flushed: {'; '.join(failed)}")
        return json_response(FlushResult(flushed=flushed, skipped=skipped))
