"""D's side of one room over a staged link."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.transfer.common.receiver import CountedReceiver

if TYPE_CHECKING:
    from pd.transfer.common.receiver import ReceiverOwner
    from pd.transfer.copier import Copier
    from pd.transfer.kv_buffer import IntArray
    from pd.transfer.pool_shape import MissingTokens


class StagedReceiver(CountedReceiver):
    """Receiver whose pages only the hub's thread begins to write.

    Attributes:
        table: the pages as converted for the copier.
    """

    def __init__(
        self,
        owner: ReceiverOwner,
        copier: Copier,
        peer: str,
        room: bytes,
        epoch: int,
        pages: IntArray,
        tokens: MissingTokens,
    ) -> None:
        super().__init__(owner, copier.shape, peer, room, epoch, tokens)
        self.table = copier.make_table(pages, tokens.stop)

    def on_link_lost(self, reason: str) -> None:
        """Fail the room if it lacks bytes, because its link is over."""
        if self._received < self._expected:
            self.fail(TransferError(f"the link from {self.peer} was lost: {reason}"))
