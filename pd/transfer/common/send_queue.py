"""The rooms of one link, which take turns."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pd.transfer.common.sender import QueuedSender

if TYPE_CHECKING:
    from pd.core.errors import PDError
    from pd.transfer.ranges import Block

SenderT = TypeVar("SenderT", bound=QueuedSender[Any])


class SendQueue(Generic[SenderT]):
    """Senders of a link, and the order in which they take turns. Hold the link's lock to call it.

    Attributes:
        senders: all that are ACTIVE.
    """

    def __init__(self) -> None:
        self.senders: set[SenderT] = set()
        self._turns: deque[SenderT] = deque()

    def __bool__(self) -> bool:
        """Whether :meth:`take_block` would return a block."""
        return bool(self._turns)

    def add_sender(self, sender: SenderT) -> None:
        self.senders.add(sender)

    def enqueue_sender(self, sender: SenderT) -> bool:
        """Give a sender with queued blocks a turn. Return False if it has one already."""
        if sender in self._turns:
            return False
        self._turns.append(sender)
        return True

    def remove_sender(self, sender: SenderT) -> None:
        self.senders.discard(sender)
        with contextlib.suppress(ValueError):
            self._turns.remove(sender)

    def take_block(self) -> tuple[SenderT, Block] | None:
        """Take a block of the next sender, and move that sender to the end of the line."""
        while self._turns:
            sender = self._turns.popleft()
            block = sender.take_block()
            if block is not None:
                if sender.has_queued:
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
