"""A child process as the parent sees it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
from typing import TYPE_CHECKING

from pd.proxy.workers.connections import HandingSocket, get_kept_limit
from pd.proxy.workers.link import LinkClosedError, ProcessLink
from pd.proxy.workers.messages import (
    OUTCOME,
    TO_PARENT,
    Perform,
    RequestStop,
    StartChild,
    ToParent,
)
from pd.util.children import hold_signals, module_command

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.proxy.workers.actions import Action, Outcome
    from pd.proxy.workers.metric_families import Family

logger = logging.getLogger(__name__)

_MODULE = "pd.proxy.workers.child"
_REAP_SECONDS, _REAP_POLL_SECONDS = 5.0, 0.01


class ChildProcess:
    """One process from its start to its end. Runs on the event loop.

    Attributes:
        number: number of its place, reused by its successor.
        connections: passes connections to it.
        instance_id: its name for nodes, once it serves.
        serves: it is ready for connections.
        families: its metrics when we last read them.
    """

    def __init__(
        self,
        number: int,
        count: int,
        memory: int,
        on_message: Callable[[ChildProcess, ToParent, Callable[[object], None]], None],
    ) -> None:
        """Start the process. Raises OSError if the system cannot.

        Args:
            memory: descriptor of the ledger's memory.
        """
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
            with hold_signals():
                self._process = subprocess.Popen(
                    module_command(_MODULE, *descriptors, count, number),
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            ours.pop_all()
        self.connections = HandingSocket(handing, get_kept_limit(count))
        self._link: ProcessLink[ToParent] = ProcessLink(
            link, TO_PARENT, lambda message, reply: on_message(self, message, reply)
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    async def run(self, start: Callable[[], StartChild]) -> int:
        """Send the process its first message, and wait for its end. Return the exit status.

        Args:
            start: makes the first message. Others may follow it.
        """
        try:
            await self._link.open_streams()
            self._link.send_message(start())
            self._begun = True
            await self._link.handle_messages()
            deadline = asyncio.get_running_loop().time() + _REAP_SECONDS
            while (status := self._process.poll()) is None:
                if asyncio.get_running_loop().time() > deadline:
                    self._process.kill()
                await asyncio.sleep(_REAP_POLL_SECONDS)
            return status
        finally:
            self.serves = False
            self.send_kill()
            self.connections.close()
            self._ended.set()

    async def perform_action(self, action: Action, seconds: float) -> Outcome | None:
        """Return the outcome of an action; None if the child ends or does not answer in time."""
        asked = self._link.send_request(Perform(action), OUTCOME)
        try:
            outcome: Outcome = await asyncio.wait_for(asked, seconds)
        except LinkClosedError:
            return None
        except TimeoutError:
            logger.warning("proxy process %d did not answer within %g s", self.number, seconds)
            return None
        return outcome

    def perform_later(self, action: Action) -> bool:
        """Let the child perform an action when it can. Return False if it has not had its first
        message."""
        if self._begun:
            self._link.send_message(Perform(action))
        return self._begun

    def request_stop(self) -> None:
        """Ask the child to drain and end, the second time to end at once."""
        self._link.send_message(RequestStop())

    async def wait_ended(self, seconds: float) -> bool:
        """Wait for the end. Return False if it takes too long."""
        try:
            await asyncio.wait_for(self._ended.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def send_kill(self) -> None:
        """Send SIGKILL unless the process has ended."""
        if self._process.poll() is None:
            self._process.kill()
