"""The thread that drives the outgoing links of a manager."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd.core.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.transfer.copier import Copier, CopyTicket
    from pd.transfer.staged.outgoing_link import OutgoingLink
    from pd.transfer.staged.outgoing_writes import StagedBlock

logger = logging.getLogger(__name__)

_UNREADABLE = "cannot read the pool for %s"


@dataclass(slots=True)
class _Gather:
    link: OutgoingLink
    staged: StagedBlock
    ticket: CopyTicket


class LinkThread:
    """Fills staging buffers from the pool, writes them, and calls what other threads post.

    Only this thread touches an :class:`OutgoingLink`. A block is gathered, written and announced by
    it without a change of threads, each of which would cost more than the calls.

    Args:
        name: name of the thread, which starts with the first event.
    """

    def __init__(self, name: str, copier: Copier) -> None:
        self._name, self._copier = name, copier
        self._mailbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._up: deque[OutgoingLink] = deque()
        self._due: dict[OutgoingLink, float] = {}
        self._gathers: deque[_Gather] = deque()

    # ---- any thread

    def post(self, event: Callable[[], object]) -> None:
        """Have the thread call something that does not block. Events keep their order."""
        self._mailbox.put(event)
        if self._thread is None:
            self._start()

    def wake(self) -> None:
        """Have the thread look for something to gather."""
        self.post(_nothing)

    def close(self) -> None:
        """Returns when the thread has ended; links that are not over are driven no more."""

        def end() -> None:
            self._closing = True

        self.post(end)
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    # ---- called by links, on the thread

    def link_up(self, link: OutgoingLink) -> None:
        """Gather blocks for a link from now on, in turns with those of other links."""
        self._up.append(link)

    def link_down(self, link: OutgoingLink) -> None:
        if link in self._up:
            self._up.remove(link)

    def drive_in(self, link: OutgoingLink, seconds: float | None) -> None:
        """Call :meth:`OutgoingLink.drive` after this time; None: only when asked again."""
        if seconds is None:
            self._due.pop(link, None)
        else:
            self._due[link] = time.monotonic() + seconds

    # ---- the thread

    def _run(self) -> None:
        while not self._closing:
            self._deliver()
            began = self._begin()
            gathers = self._gathers
            if gathers:
                first, full = gathers[0], len(gathers) >= self._copier.depth
                if not began or full or first.ticket.done() or not first.link.writing:
                    self._complete(gathers.popleft())
            if self._due:
                self._drive()
        while self._gathers:
            self._complete(self._gathers.popleft())

    def _deliver(self) -> None:
        """Call what was posted; wait for it while there is nothing else to do."""
        mailbox = self._mailbox
        if mailbox.empty() and not self._gathers and not self._can_begin():
            try:
                self._call(mailbox.get(timeout=self._pause()))
            except queue.Empty:
                return
        while not mailbox.empty():
            self._call(mailbox.get())

    def _call(self, event: Callable[[], object]) -> None:
        try:
            event()
        except Exception:
            # The thread serves all links; what a link or its library raises is handled by the link.
            logger.exception("an event of a staged link failed")

    def _pause(self) -> float | None:
        if not self._due:
            return None
        return max(0.0, min(self._due.values()) - time.monotonic())

    def _drive(self) -> None:
        """Drive links whose time has come, once; they ask for the next time themselves."""
        now = time.monotonic()
        for link in [link for link, due in self._due.items() if due <= now]:
            self._due.pop(link, None)
            link.drive()

    def _can_begin(self) -> bool:
        return any(link.can_take for link in self._up)

    def _begin(self) -> bool:
        """Begin the next gather, if there is one. Links take turns, and rooms on each."""
        for _ in range(len(self._up)):
            link = self._up[0]
            self._up.rotate(-1)
            staged = link.take()
            if staged is None:
                continue
            try:
                view = link.view(staged.pair.source)
                ticket = self._copier.gather(staged.sender.table, staged.block, view)
            except Exception as error:
                # For example, a CUDA error: it ends the room only.
                logger.exception(_UNREADABLE, link.name)
                self._failed(link, staged, error)
            else:
                self._gathers.append(_Gather(link, staged, ticket))
            return True
        return False

    def _complete(self, gather: _Gather) -> None:
        try:
            gather.ticket.wait()
        except Exception as error:
            # For example, a CUDA error: it ends the room only.
            logger.exception(_UNREADABLE, gather.link.name)
            self._failed(gather.link, gather.staged, error)
            return
        gather.link.gathered(gather.staged)

    def _failed(self, link: OutgoingLink, staged: StagedBlock, error: Exception) -> None:
        staged.sender.fail(TransferError(f"cannot read the pool: {error}"))
        link.gathered(staged)


def _nothing() -> None:
    pass
