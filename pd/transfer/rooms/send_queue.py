"""The rooms of one link, which take turns."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from pd.transfer.rooms.sender import QueuedSender

if TYPE_CHECKING:
    from pd.core.errors import PDError
    from pd.transfer.ranges import Block

SenderT = TypeVar("SenderT", bound=QueuedSender)


class SendQueue(Generic[SenderT]):
    """Senders of a link, and the order in which those with queued blocks come next. Every method
    is called with the link's lock.

    Attributes:
        senders: all that are ACTIVE.
    """

    def __init__(self) -> None:
        self.senders: set[SenderT] = set()
        self._turns: deque[SenderT] = deque()

    def __bool__(self) -> bool:
        """Whether :meth:`take` would return a block."""
        return bool(self._turns)

    def add(self, sender: SenderT) -> None:
        self.senders.add(sender)

    def enqueue(self, sender: SenderT) -> bool:
        """Give a sender with queued blocks a turn; False if it has one already."""
        if sender in self._turns:
            return False
        self._turns.append(sender)
        return True

    def remove(self, sender: SenderT) -> None:
        self.senders.discard(sender)
        with contextlib.suppress(ValueError):
            self._turns.remove(sender)

    def take(self) -> tuple[SenderT, Block] | None:
        """A block of the sender whose turn it is, which then comes last."""
        while self._turns:
            sender = self._turns.popleft()
            block = sender.take()
            if block is not None:
                if sender.queued:
                    self._turns.append(sender)
                return sender, block
        return None

    def fail_all(self, error: PDError) -> None:
        for sender in list(self.senders):
            sender.fail(error)

    def fail_queued(self, error: PDError) -> None:
        """Fail the senders with queued blocks."""
        for sender in list(self._turns):
            sender.fail(error)
