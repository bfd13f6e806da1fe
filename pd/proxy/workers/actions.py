"""Actions on the state of a proxy. Every process performs them on its own part."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Protocol, cast

import msgspec

from pd.core.errors import PDError
from pd.core.messages import ErrorInfo
from pd.proxy.dispatch.delivery import INTERNAL

if TYPE_CHECKING:
    from pd.core.node_info import Role
    from pd.proxy.dispatch.dispatcher import Dispatcher
    from pd.proxy.dispatch.proxy_metrics import Metrics
    from pd.proxy.nodes.pool import NodePool

logger = logging.getLogger(__name__)


class AddWorker(msgspec.Struct, tag=True):
    """Start to use a node. Returns its entry of ``GET /workers``."""

    role: str
    url: str


class RemoveWorker(msgspec.Struct, tag=True):
    """Drain the node with this URL. Returns its entry, or None if we do not know it."""

    url: str


class SetRole(msgspec.Struct, tag=True):
    """Make the elastic node of this URL prefer a role, or leave the role to proxies (``auto``).

    Returns its entry, or None if we do not know it.
    """

    url: str
    role: str


class ListWorkers(msgspec.Struct, tag=True):
    """Return the entries of all nodes."""


class ForgetCaches(msgspec.Struct, tag=True):
    """Note that the prefix caches of the nodes with these URLs were flushed."""

    urls: list[str]


class AbortRid(msgspec.Struct, tag=True):
    """Abort the prompts with a rid, of one owner or (None) of any. Returns their number."""

    rid: str
    owner: str | None


class AbortAll(msgspec.Struct, tag=True):
    """Abort all requests. Returns the number of their prompts."""


class ReadMetrics(msgspec.Struct, tag=True):
    """Return the metrics as a list of :class:`pd.proxy.workers.metric_families.Family`."""


class ReadLoad(msgspec.Struct, tag=True):
    """Return the process id, the number of running requests and of tokens since the start."""


Action = (
    AddWorker
    | RemoveWorker
    | SetRole
    | ListWorkers
    | ForgetCaches
    | AbortRid
    | AbortAll
    | ReadMetrics
    | ReadLoad
)


class Outcome(msgspec.Struct, omit_defaults=True):
    """Result of an action in one process: a value that can be JSON, or an error."""

    value: object = None
    error: ErrorInfo | None = None


class Everywhere(Protocol):
    """Lets every process of the proxy perform an action."""

    async def __call__(self, action: Action) -> list[object]:
        """Return the values of all answering processes, ours first. Raises our own PDError."""


class Performer:
    """Performs actions in this process. Runs on the event loop."""

    def __init__(self, pool: NodePool, dispatcher: Dispatcher, metrics: Metrics) -> None:
        self._pool = pool
        self._dispatcher = dispatcher
        self._metrics = metrics

    def perform_action(self, action: Action) -> object:
        """Return the value of the action. Raises PDError."""
        match action:
            case AddWorker(role, url):
                # The pool refuses invalid roles.
                return self._pool.add_node(cast("Role", role), url).to_json()
            case RemoveWorker(url):
                return self._remove_worker(url)
            case SetRole(url, role):
                return self._set_role(url, role)
            case ListWorkers():
                return [node.to_json() for node in self._pool.nodes]
            case ForgetCaches(urls):
                for node in self._pool.nodes:
                    if node.url in urls:
                        node.tree = None
                return None
            case AbortRid(rid, owner):
                return self._dispatcher.abort_rid(rid, owner)
            case AbortAll():
                return self._dispatcher.abort_all()
            case ReadMetrics():
                return self._metrics.collect_families(self._pool.nodes)
            case ReadLoad():
                return [os.getpid(), len(self._dispatcher.jobs), self._metrics.output_tokens.value]

    def get_outcome(self, action: Action) -> Outcome:
        """Return the value or the error of an action."""
        try:
            return Outcome(self.perform_action(action))
        except PDError as error:
            return Outcome(error=ErrorInfo(error.kind, error.message, error.param))
        except Exception:  # it would end this process with all of its streams
            logger.exception("cannot perform %s", type(action).__name__)
            return Outcome(error=ErrorInfo(PDError.kind, INTERNAL))

    async def perform_alone(self, action: Action) -> list[object]:
        """Implement :class:`Everywhere` for a proxy of one process."""
        return [self.perform_action(action)]

    def _set_role(self, url: str, role: str) -> object:
        for node in self._pool.nodes:
            if node.url == url:
                # The pool refuses invalid roles.
                self._pool.set_role(node, cast("Role", role))
                return node.to_json()
        return None

    def _remove_worker(self, url: str) -> object:
        for node in self._pool.nodes:
            if node.url == url:
                self._pool.drain_node(node)
                return node.to_json()
        return None
