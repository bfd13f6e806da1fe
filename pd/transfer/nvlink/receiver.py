"""Receiving side of one room over nvlink."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pd.transfer.base import TransferState
from pd.transfer.common.unseen_receiver import UnseenReceiver, encode_pages
from pd.transfer.nvlink.messages import NvlinkDestination

if TYPE_CHECKING:
    from pd.core.errors import PDError
    from pd.transfer.kv_buffer import IntArray
    from pd.transfer.nvlink.sessions import NvlinkSession
    from pd.transfer.pool_shape import MissingTokens, PoolShape


class NvlinkReceiver(UnseenReceiver):
    """A room of one session. Its pages are safe when P has drained or the session is quiet."""

    def __init__(
        self, session: NvlinkSession, pages: IntArray, tokens: MissingTokens, shape: PoolShape
    ) -> None:
        destination = NvlinkDestination(
            session.number,
            shape.page_size,
            tokens.start,
            tokens.stop,
            encode_pages(pages, tokens, shape.page_size),
        )
        expected = shape.missing_bytes(tokens)
        super().__init__(session.peer, expected, msgspec.msgpack.encode(destination))
        self._session = session
        session.add_receiver(self)

    def drained(self) -> bool:
        if self._state is TransferState.FAILED:
            return self._peer_drained or self._session.is_quiet()
        # A commit follows the last store.
        return self._state is TransferState.DONE

    def _set_outcome(self, error: PDError | None) -> None:
        super()._set_outcome(error)
        self._session.discard_receiver(self)
