"""Asks nodes for their state again, for a request without a ready node.

We poll nodes once a second, and they report their state twice a second. A node whose ``/health``
just turned 200 may therefore look unready to us for a while. A request without nodes does not fail
because of this: it waits until we have asked every unready node again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from pd.core.errors import NotFoundError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence
    from typing import TypeVar

    from pd.proxy.nodes.node_handle import NodeHandle

    T = TypeVar("T")

logger = logging.getLogger(__name__)

# Time for a node that answers HTTP to answer a message, too.
_ANSWER_SECONDS = 2.0
_ANSWER_TRY_SECONDS = 0.005
# Pause between two rounds, and per node, because clients could cause rounds without end.
_PAUSE_SECONDS, _PAUSE_OF_NODE = 0.1, 0.002


class NodeRefresh:
    """Asks unready nodes for their state. Requests arriving before a round begins share it.

    Runs on the event loop.

    Args:
        sender: instance id of this proxy.
        poll: fetches a node's description over HTTP, and opens a channel to a new instance.
    """

    def __init__(
        self,
        nodes: Sequence[NodeHandle],
        sender: str,
        poll: Callable[[NodeHandle], Awaitable[None]],
    ) -> None:
        self._nodes, self._sender, self._poll = nodes, sender, poll
        self._next: asyncio.Task[None] | None = None
        self._began = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    async def retry_until_served(self, choose: Callable[[], T]) -> T:
        """Call ``choose`` until it raises neither UnavailableError nor NotFoundError. Raise its
        error if no node became ready since the last call."""
        while True:
            before = self._ready_nodes()
            try:
                return choose()
            except NotFoundError:
                # We do not know the models of nodes we never reached.
                if all(node.info is not None for node in self._nodes):
                    raise
                await self._run_round()
                if self._ready_nodes() <= before:
                    raise
            except UnavailableError:
                await self._run_round()
                if self._ready_nodes() <= before:
                    raise

    def _ready_nodes(self) -> set[NodeHandle]:
        return {node for node in self._nodes if node.is_ready}

    async def _run_round(self) -> None:
        """Ask all unready nodes, until one becomes ready or all have answered."""
        if self._next is None:
            self._next = self._start_task(self._ask_unready())
        await asyncio.shield(self._next)

    async def close(self) -> None:
        """Cancel unfinished rounds."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start_task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _ask_unready(self) -> None:
        pause = max(_PAUSE_SECONDS, _PAUSE_OF_NODE * len(self._nodes))
        await asyncio.sleep(self._began + pause - time.monotonic())
        # Requests arriving from here on wait for the next round.
        self._next, self._began = None, time.monotonic()
        asked = {
            self._start_task(self._ask_node(node))
            for node in self._nodes
            if _may_become_ready(node)
        }
        before = self._ready_nodes()
        while asked and self._ready_nodes() <= before:
            _, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)

    async def _ask_node(self, node: NodeHandle) -> None:
        """Ask a node, and wait for its heartbeat."""
        try:
            if node.is_alive and node.send_heartbeat(self._sender):
                number = node.load.last_beat
                await _wait_until(lambda: node.has_answered(number))
            if not node.is_alive or not node.is_connected:
                await self._poll(node)
                await _wait_until(lambda: not node.awaits_heartbeat)
        except Exception:  # whatever a node answers, we go on with the others
            logger.exception("cannot check %s", node.url)


def _may_become_ready(node: NodeHandle) -> bool:
    """Whether asking may help, because the node's own last report keeps requests away."""
    serves = node.is_alive and node.is_accepting and node.is_connected
    return not (node.is_draining or serves)


async def _wait_until(is_over: Callable[[], bool]) -> None:
    """Wait for a node's heartbeat, for a limited time."""
    deadline = time.monotonic() + _ANSWER_SECONDS
    while not is_over() and time.monotonic() < deadline:
        await asyncio.sleep(_ANSWER_TRY_SECONDS)
