"""D's side of one room over a staged link."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.transfer.rooms.receiver import CountedReceiver

if TYPE_CHECKING:
    from pd.transfer.base import IntArray
    from pd.transfer.pool_shape import MissingTokens
    from pd.transfer.staged.incoming_links import IncomingLinks


class StagedReceiver(CountedReceiver):
    """Receiver whose pages only the hub's thread begins to write.

    Attributes:
        table: the pages in the form that the copier wants.
    """

    def __init__(
        self,
        incoming: IncomingLinks,
        peer: str,
        room: bytes,
        epoch: int,
        pages: IntArray,
        tokens: MissingTokens,
    ) -> None:
        super().__init__(incoming.copier.shape, incoming.patience, peer, room, epoch, pages, tokens)
        self.table = incoming.copier.table(pages, tokens.stop)
        self._incoming = incoming

    def lost(self, reason: str) -> None:
        """The link is over, and what has not arrived will not."""
        if self._received < self._expected:
            self.fail(TransferError(f"the link from {self.peer} was lost: {reason}"))

    def _remove(self) -> None:
        self._incoming.remove(self)
