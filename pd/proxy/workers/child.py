"""One proxy process of several: ``python -m pd.proxy.workers.child``, started by the parent.

Arguments are the descriptors of the link to the parent, of the socket for connections and of the
ledger's memory, the number of children, and the number of this child, from 0.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import mmap
import socket
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from pd.core.brief import short_repr
from pd.core.errors import InvalidRequestError, PDError, UnavailableError, error_from_kind
from pd.proxy.server import Proxy, serve
from pd.proxy.workers.connections import HandedConnections
from pd.proxy.workers.ledger import Ledger
from pd.proxy.workers.link import LinkClosedError, ProcessLink
from pd.proxy.workers.loop import run_loop
from pd.proxy.workers.messages import (
    OUTCOMES,
    TAKEN,
    TO_CHILD,
    ClaimRids,
    Perform,
    PerformEverywhere,
    ReleaseRids,
    RequestStop,
    StartChild,
    Started,
    StartFailed,
    ToChild,
)
from pd.proxy.workers.shared import Shared
from pd.util.children import ignore_ending_signals
from pd.util.exit import exit_now
from pd.util.logs import configure_logging
from pd.util.output import write_without_waiting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from pd.proxy.workers.actions import Action, Outcome

_TURN_SECONDS = 0.1


class Child:
    """The child's end of the link to the parent, and its proxy."""

    def __init__(
        self, link: socket.socket, handed: socket.socket, ledger: Ledger, count: int
    ) -> None:
        self._connections = HandedConnections(handed, ledger)
        self._ledger = ledger
        self._count = count
        self._link: ProcessLink[ToChild] = ProcessLink(link, TO_CHILD, self._handle_message)
        self._start: asyncio.Future[StartChild] = asyncio.get_running_loop().create_future()
        self._proxy: Proxy | None = None
        # The same proxy, once it serves.
        self._serving: Proxy | None = None
        # Actions that arrived before the proxy served.
        self._early: list[tuple[Action, Callable[[object], None]]] = []

    async def run(self) -> int:
        """Serve until the parent requests the end or is gone. Return the exit status."""
        await self._link.open_streams()
        linked = asyncio.create_task(self._link.handle_messages())
        linked.add_done_callback(lambda _: self._end_at_once())
        self._counting = asyncio.create_task(self._keep_ledger())
        start = await self._start
        logging.getLogger().setLevel(start.log_level)
        shared = Shared(
            connections=self._connections,
            address=start.address,
            count=self._count,
            began=start.began,
            ledger=self._ledger,
            everywhere=self._perform_everywhere,
            claims=_Claims(self._link),
        )
        self._proxy = Proxy(start.config, shared)
        try:
            await serve(self._proxy, self._note_ready)
        except PDError as error:
            self._link.send_message(StartFailed(error.message, error.exit_status))
            return error.exit_status
        return 0

    def _note_ready(self, url: str, instance_id: str) -> None:
        assert self._proxy is not None
        self._serving = self._proxy
        for action, reply in self._early:
            reply(self._proxy.performer.get_outcome(action))
        self._link.send_message(Started(instance_id))

    def _end_at_once(self) -> None:
        if self._proxy is None:
            exit_now(1)
        self._proxy.request_stop()
        self._proxy.request_stop()

    def _handle_message(self, message: ToChild, reply: Callable[[object], None]) -> None:
        match message:
            case StartChild():
                self._start.set_result(message)
            case Perform(action):
                if self._serving is None:
                    self._early.append((action, reply))
                else:
                    reply(self._serving.performer.get_outcome(action))
            case RequestStop():
                if self._proxy is None:
                    exit_now(0)
                self._proxy.request_stop()

    async def _perform_everywhere(self, action: Action) -> list[object]:
        """Implement :class:`pd.proxy.workers.actions.Everywhere` through the parent."""
        try:
            asked = self._link.send_request(PerformEverywhere(action), OUTCOMES)
            outcomes: list[Outcome] = await asked
        except LinkClosedError:
            raise UnavailableError("the proxy is shutting down") from None
        if outcomes and (error := outcomes[0].error) is not None:
            raise error_from_kind(error.kind, error.message, error.param)
        return [outcome.value for outcome in outcomes if outcome.error is None]

    async def _keep_ledger(self) -> None:
        """Update the ledger's count of closed connections, and show that this loop turns."""
        while True:
            # The proxy gets no connections before it serves.
            still_open = 0 if self._serving is None else self._serving.connections
            self._ledger.note_turn(self._connections.count - still_open)
            await asyncio.sleep(_TURN_SECONDS)


class _Claims:
    """Implements :class:`pd.proxy.workers.shared.RidClaims`. The parent keeps the rids."""

    def __init__(self, link: ProcessLink[ToChild]) -> None:
        self._link = link

    @asynccontextmanager
    async def hold_rids(self, owner: str, rids: Iterable[str]) -> AsyncIterator[None]:
        names = list(rids)
        try:
            taken = await self._link.send_request(ClaimRids(owner, names), TAKEN)
        except LinkClosedError:
            raise UnavailableError("the proxy is shutting down") from None
        if taken is not None:
            raise InvalidRequestError(
                f"the rid {short_repr(taken)} is in use by a request that has not ended",
                param="rid",
            )
        try:
            yield
        finally:
            self._link.send_message(ReleaseRids(owner, names))


async def _run_child(link: int, handed: int, memory: mmap.mmap, count: int, number: int) -> int:
    ledger = Ledger(memoryview(memory), number)
    child = Child(socket.socket(fileno=link), socket.socket(fileno=handed), ledger, count)
    return await child.run()


def main() -> None:
    """Serve until the parent requests the end.

    Only the parent handles signals, because a terminal or a service manager sends them to all
    processes at once.
    """
    ignore_ending_signals()
    faulthandler.enable()
    write_without_waiting("stderr")
    link, handed, memory, count, number = map(int, sys.argv[1:])
    configure_logging(logging.INFO, str(number))
    table = mmap.mmap(memory, Ledger.get_size(count))
    exit_now(run_loop(_run_child(link, handed, table, count, number)))


if __name__ == "__main__":
    main()
