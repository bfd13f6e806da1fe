"""Actions on the state of a proxy, which every process of it performs on its own part."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Protocol, cast

import msgspec

from pd.core.errors import PDError
from pd.core.messages import ErrorInfo
from pd.proxy.dispatcher import INTERNAL

if TYPE_CHECKING:
    from pd.core.node_info import Role
    from pd.proxy.dispatcher import Dispatcher
    from pd.proxy.metrics import Metrics
    from pd.proxy.pool import NodePool

logger = logging.getLogger(__name__)


class AddWorker(msgspec.Struct, tag=True):
    """Begin to use a node; gives its entry of ``GET /workers``."""

    role: str
    url: str


class RemoveWorker(msgspec.Struct, tag=True):
    """Drain a node that is known by this URL; gives its entry, or None where it is not known."""

    url: str


class SetRole(msgspec.Struct, tag=True):
    """Have the elastic node of this URL prefer a role, or leave it to proxies (``auto``); gives its
    entry, or None where it is not known."""

    url: str
    role: str


class ListWorkers(msgspec.Struct, tag=True):
    """Gives the entries of all nodes."""


class ForgetCaches(msgspec.Struct, tag=True):
    """Note that the prefix caches of the nodes with these URLs were flushed."""

    urls: list[str]


class AbortRid(msgspec.Struct, tag=True):
    """End the prompts that go by a rid, of one owner or (None) whoever's; gives how many."""

    rid: str
    owner: str | None


class AbortAll(msgspec.Struct, tag=True):
    """End all requests; gives how many prompts that were."""


class ReadMetrics(msgspec.Struct, tag=True):
    """Gives the metrics as a list of :class:`pd.proxy.metrics.Family`."""


class ReadLoad(msgspec.Struct, tag=True):
    """Gives the process id, the number of requests under way and that of tokens generated since the
    start."""


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
    """Has an action performed by every process of the proxy."""

    async def __call__(self, action: Action) -> list[object]:
        """The values of all processes that answered, this one's first. Raises the PDError of this
        process."""


class Performer:
    """Performs actions in this process. Everything runs on the event loop."""

    def __init__(self, pool: NodePool, dispatcher: Dispatcher, metrics: Metrics) -> None:
        self._pool = pool
        self._dispatcher = dispatcher
        self._metrics = metrics

    def perform(self, action: Action) -> object:
        """The action's value. Raises PDError."""
        match action:
            case AddWorker(role, url):
                # The pool refuses what is no role.
                return self._pool.add(cast("Role", role), url).describe()
            case RemoveWorker(url):
                return self._remove_worker(url)
            case SetRole(url, role):
                return self._set_role(url, role)
            case ListWorkers():
                return [node.describe() for node in self._pool.nodes]
            case ForgetCaches(urls):
                for node in self._pool.nodes:
                    if node.url in urls:
                        node.tree = None
                return None
            case AbortRid(rid, owner):
                return self._dispatcher.abort(rid, owner)
            case AbortAll():
                return self._dispatcher.abort_all()
            case ReadMetrics():
                return self._metrics.families(self._pool.nodes)
            case ReadLoad():
                return [os.getpid(), len(self._dispatcher.jobs), self._metrics.output_tokens.value]

    def outcome(self, action: Action) -> Outcome:
        """The value or the error of an action."""
        try:
            return Outcome(self.perform(action))
        except PDError as error:
            return Outcome(error=ErrorInfo(error.kind, error.message, error.param))
        except Exception:  # would end this process with all of its streams
            logger.exception("cannot perform %s", type(action).__name__)
            return Outcome(error=ErrorInfo(PDError.kind, INTERNAL))

    async def alone(self, action: Action) -> list[object]:
        """:class:`Everywhere` of a proxy that has one process."""
        return [self.perform(action)]

    def _set_role(self, url: str, role: str) -> object:
        for node in self._pool.nodes:
            if node.url == url:
                # The pool refuses what is no role.
                self._pool.set_role(node, cast("Role", role))
                return node.describe()
        return None

    def _remove_worker(self, url: str) -> object:
        for node in self._pool.nodes:
            if node.url == url:
                self._pool.drain(node)
                return node.describe()
        return None
