"""The thread that drives a manager's outgoing links."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pd.core.errors import TransferError
from pd.util.call_thread import CallThread

if TYPE_CHECKING:
    from pd.transfer.copier import Copier, CopyTicket
    from pd.transfer.staged.outgoing_writes import StagedBlock

logger = logging.getLogger(__name__)

_UNREADABLE = "cannot read the pool for %s"


class GatherLink(Protocol):
    """An outgoing link as its thread sees it. For its methods, see
    :class:`pd.transfer.staged.outgoing_link.OutgoingLink`."""

    @property
    def name(self) -> str: ...
    @property
    def can_take(self) -> bool: ...
    @property
    def is_writing(self) -> bool: ...

    def take_block(self) -> StagedBlock | None: ...
    def view_buffer(self, source: int) -> Any: ...
    def on_gathered(self, staged: StagedBlock) -> None: ...
    def drive(self) -> None: ...


@dataclass(slots=True)
class _Gather:
    link: GatherLink
    staged: StagedBlock
    ticket: CopyTicket


class LinkThread:
    """Fills staging buffers from the pool, writes them, and calls posted events.

    Only this thread touches an :class:`OutgoingLink`. It gathers, writes and announces a block
    itself, because each change of threads would cost more than the calls.

    Args:
        name: name of the thread, which starts with the first event.

    Attributes:
        post_event: has the thread call a function that does not block. Events keep their order.
        wake: has the thread look for blocks to gather.
    """

    def __init__(self, name: str, copier: Copier) -> None:
        self._copier = copier
        self._thread = CallThread(name, self._work)
        self.post_event, self.wake = self._thread.post, self._thread.wake
        self._closing = False
        self._up: deque[GatherLink] = deque()
        self._due: dict[GatherLink, float] = {}
        self._gathers: deque[_Gather] = deque()

    def close(self) -> None:
        """Wait until the thread has ended. It does not drive the remaining links any more."""
        self.post_event(self._end_gathers)
        self._thread.close()

    # ---- called by links, on the thread

    def add_link(self, link: GatherLink) -> None:
        """From now on gather blocks for a link. Links take turns."""
        self._up.append(link)

    def remove_link(self, link: GatherLink) -> None:
        if link in self._up:
            self._up.remove(link)

    def drive_after(self, link: GatherLink, seconds: float | None) -> None:
        """Call :meth:`OutgoingLink.drive` after this time; with None, only when asked again."""
        if seconds is None:
            self._due.pop(link, None)
        else:
            self._due[link] = time.monotonic() + seconds

    # ---- the thread

    def _work(self) -> float | None:
        """Gather and drive. Return how long the thread may wait for events; with None, for ever."""
        if self._closing:
            return None
        began = self._begin_gather()
        gathers = self._gathers
        if gathers:
            first, full = gathers[0], len(gathers) >= self._copier.depth
            if not began or full or first.ticket.is_done() or not first.link.is_writing:
                self._complete_gather(gathers.popleft())
        if self._due:
            self._drive_due()
        if gathers or any(link.can_take for link in self._up):
            return 0.0
        due = min(self._due.values(), default=None)
        return None if due is None else max(0.0, due - time.monotonic())

    def _end_gathers(self) -> None:
        self._closing = True
        while self._gathers:
            self._complete_gather(self._gathers.popleft())

    def _drive_due(self) -> None:
        """Drive each due link once. It asks for the next time itself."""
        now = time.monotonic()
        for link in [link for link, due in self._due.items() if due <= now]:
            self._due.pop(link, None)
            link.drive()

    def _begin_gather(self) -> bool:
        """Begin the next gather, and return whether there was one. Links take turns, and so do the
        rooms on each."""
        for _ in range(len(self._up)):
            link = self._up[0]
            self._up.rotate(-1)
            staged = link.take_block()
            if staged is None:
                continue
            try:
                view = link.view_buffer(staged.pair.source)
                ticket = self._copier.gather_block(staged.sender.table, staged.block, view)
            except Exception as error:
                # For example, a CUDA error. It ends only the room.
                logger.exception(_UNREADABLE, link.name)
                self._fail_block(link, staged, error)
            else:
                self._gathers.append(_Gather(link, staged, ticket))
            return True
        return False

    def _complete_gather(self, gather: _Gather) -> None:
        try:
            gather.ticket.wait()
        except Exception as error:
            # For example, a CUDA error: it ends the room only.
            logger.exception(_UNREADABLE, gather.link.name)
            self._fail_block(gather.link, gather.staged, error)
            return
        gather.link.on_gathered(gather.staged)

    def _fail_block(self, link: GatherLink, staged: StagedBlock, error: Exception) -> None:
        staged.sender.fail(TransferError(f"cannot read the pool: {error}"))
        link.on_gathered(staged)
