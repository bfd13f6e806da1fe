"""One proxy process of several: ``python -m pd.proxy.processes.child``, started by the parent.

Arguments are descriptors of the link to the parent, of the socket with connections and of the
ledger's memory; how many children there are, and which of them this is, from 0.
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

from pd.core.brief import brief
from pd.core.children import ignore_ending_signals
from pd.core.errors import InvalidRequestError, PDError, UnavailableError, error_from_kind
from pd.core.exit import leave
from pd.core.logs import configure_logging
from pd.proxy.ledger import Ledger
from pd.proxy.loop import run_loop
from pd.proxy.processes.connections import HandedConnections
from pd.proxy.processes.link import LinkClosedError, ProcessLink
from pd.proxy.processes.messages import (
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
from pd.proxy.server import Proxy, serve
from pd.proxy.shared import Shared

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from pd.proxy.actions import Action, Outcome

_TURN_SECONDS = 0.1


class Child:
    """Child's end of the link to the parent, and the proxy that the child serves."""

    def __init__(
        self, link: socket.socket, handed: socket.socket, ledger: Ledger, count: int
    ) -> None:
        self._connections = HandedConnections(handed, ledger)
        self._ledger = ledger
        self._count = count
        self._link: ProcessLink[ToChild] = ProcessLink(link, TO_CHILD, self._handle)
        self._start: asyncio.Future[StartChild] = asyncio.get_running_loop().create_future()
        self._proxy: Proxy | None = None
        # The same, once it serves.
        self._serving: Proxy | None = None
        # Actions that came before the proxy served.
        self._early: list[tuple[Action, Callable[[object], None]]] = []

    async def run(self) -> int:
        """Serve until the parent requests the end or is gone; returns the exit status."""
        await self._link.open()
        linked = asyncio.create_task(self._link.run())
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
            everywhere=self._everywhere,
            claims=_Claims(self._link),
        )
        self._proxy = Proxy(start.config, shared)
        try:
            await serve(self._proxy, self._ready)
        except PDError as error:
            self._link.tell(StartFailed(error.message, error.exit_status))
            return error.exit_status
        return 0

    def _ready(self, url: str, instance_id: str) -> None:
        assert self._proxy is not None
        self._serving = self._proxy
        for action, reply in self._early:
            reply(self._proxy.performer.outcome(action))
        self._link.tell(Started(instance_id))

    def _end_at_once(self) -> None:
        if self._proxy is None:
            leave(1)
        self._proxy.request_stop()
        self._proxy.request_stop()

    def _handle(self, message: ToChild, reply: Callable[[object], None]) -> None:
        match message:
            case StartChild():
                self._start.set_result(message)
            case Perform(action):
                if self._serving is None:
                    self._early.append((action, reply))
                else:
                    reply(self._serving.performer.outcome(action))
            case RequestStop():
                if self._proxy is None:
                    leave(0)
                self._proxy.request_stop()

    async def _everywhere(self, action: Action) -> list[object]:
        """:class:`pd.proxy.actions.Everywhere`, by way of the parent."""
        try:
            asked = self._link.ask(PerformEverywhere(action), OUTCOMES)
            outcomes: list[Outcome] = await asked
        except LinkClosedError:
            raise UnavailableError("the proxy is shutting down") from None
        if outcomes and (error := outcomes[0].error) is not None:
            raise error_from_kind(error.kind, error.message, error.param)
        return [outcome.value for outcome in outcomes if outcome.error is None]

    async def _keep_ledger(self) -> None:
        """Keep the ledger's count of closed connections, and show that this loop turns."""
        while True:
            # Before it serves it is given no connections.
            still_open = 0 if self._serving is None else self._serving.connections
            self._ledger.turn(self._connections.count - still_open)
            await asyncio.sleep(_TURN_SECONDS)


class _Claims:
    """:class:`pd.proxy.shared.RidClaims` that the parent keeps."""

    def __init__(self, link: ProcessLink[ToChild]) -> None:
        self._link = link

    @asynccontextmanager
    async def held(self, owner: str, rids: Iterable[str]) -> AsyncIterator[None]:
        names = list(rids)
        try:
            taken = await self._link.ask(ClaimRids(owner, names), TAKEN)
        except LinkClosedError:
            raise UnavailableError("the proxy is shutting down") from None
        if taken is not None:
            raise InvalidRequestError(
                f"the rid {brief(taken)} is in use by a request that has not ended", param="rid"
            )
        try:
            yield
        finally:
            self._link.tell(ReleaseRids(owner, names))


async def _run(link: int, handed: int, memory: mmap.mmap, count: int, number: int) -> int:
    ledger = Ledger(memoryview(memory), number)
    child = Child(socket.socket(fileno=link), socket.socket(fileno=handed), ledger, count)
    return await child.run()


def main() -> None:
    """Serve until the parent says so. It alone decides about signals, which a terminal or a
    service manager sends to all processes at once."""
    ignore_ending_signals()
    faulthandler.enable()
    link, handed, memory, count, number = map(int, sys.argv[1:])
    configure_logging(logging.INFO, str(number))
    table = mmap.mmap(memory, Ledger.size(count))
    leave(run_loop(_run(link, handed, table, count, number)))


if __name__ == "__main__":
    main()
