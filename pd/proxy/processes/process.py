"""A child of the parent, as the parent knows it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
from typing import TYPE_CHECKING

from pd.core.children import module_command, signals_held_back
from pd.proxy.processes.connections import HandingSocket, kept_limit
from pd.proxy.processes.link import LinkClosedError, ProcessLink
from pd.proxy.processes.messages import (
    OUTCOME,
    TO_PARENT,
    Perform,
    RequestStop,
    StartChild,
    ToParent,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.proxy.actions import Action, Outcome
    from pd.proxy.metric_families import Family

logger = logging.getLogger(__name__)

_MODULE = "pd.proxy.processes.child"
_REAP_SECONDS, _REAP_POLL_SECONDS = 5.0, 0.01


class ChildProcess:
    """One process, from its start to its end. Everything runs on the event loop.

    Attributes:
        number: of its place, which a successor takes.
        connections: hands it connections.
        instance_id: its name towards the nodes, once it serves.
        serves: it is ready and may be given connections.
        families: its metrics when they were read last.
    """

    def __init__(
        self,
        number: int,
        count: int,
        memory: int,
        on_message: Callable[[ChildProcess, ToParent, Callable[[object], None]], None],
    ) -> None:
        """``memory``: descriptor of the ledger's. The process is started at once; raises OSError
        where the system has no room for it."""
        self.number = number
        self.instance_id = ""
        self.serves = False
        self.families: list[Family] = []
        self._begun = False
        self._ended = asyncio.Event()
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            pairs = [socket.socketpair() for _ in range(2)]
            (link, their_link), (handing, handed) = pairs
            for mine, their in pairs:
                ours.enter_context(mine)
                theirs.enter_context(their)
            descriptors = (their_link.fileno(), handed.fileno(), memory)
            with signals_held_back():
                self._process = subprocess.Popen(
                    module_command(_MODULE, *descriptors, count, number),
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            ours.pop_all()
        self.connections = HandingSocket(handing, kept_limit(count))
        self._link: ProcessLink[ToParent] = ProcessLink(
            link, TO_PARENT, lambda message, reply: on_message(self, message, reply)
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    async def run(self, start: Callable[[], StartChild]) -> int:
        """Have it begin and wait for its end, whatever ends it; returns its exit status. ``start``
        makes the first message, behind which others may follow."""
        try:
            await self._link.open()
            self._link.tell(start())
            self._begun = True
            await self._link.run()
            return await self._reap()
        finally:
            self.serves = False
            self.kill()
            self.connections.close()
            self._ended.set()

    async def perform(self, action: Action, seconds: float) -> Outcome | None:
        """Return the child's outcome of an action; None if it ends or does not answer in time."""
        asked = self._link.ask(Perform(action), OUTCOME)
        try:
            outcome: Outcome = await asyncio.wait_for(asked, seconds)
        except LinkClosedError:
            return None
        except TimeoutError:
            logger.warning("proxy process %d did not answer within %g s", self.number, seconds)
            return None
        return outcome

    def perform_later(self, action: Action) -> bool:
        """Have it perform an action once it can; False if it has not had its first message yet."""
        if self._begun:
            self._link.tell(Perform(action))
        return self._begun

    def request_stop(self) -> None:
        """Have it drain and end, and the second time end at once."""
        self._link.tell(RequestStop())

    async def wait_ended(self, seconds: float) -> bool:
        """Wait for its end; False if that takes longer."""
        try:
            await asyncio.wait_for(self._ended.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def kill(self) -> None:
        """End it by SIGKILL if it has not ended."""
        if self._process.poll() is None:
            self._process.kill()

    async def _reap(self) -> int:
        """The exit status, soon after its end of the link was closed."""
        deadline = asyncio.get_running_loop().time() + _REAP_SECONDS
        while (status := self._process.poll()) is None:
            if asyncio.get_running_loop().time() > deadline:
                self._process.kill()
            await asyncio.sleep(_REAP_POLL_SECONDS)
        return status
