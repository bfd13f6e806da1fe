"""Receiving side of one room over nvlink."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import msgspec

from pd.core.errors import PDError, TransferError
from pd.kernels.paging import page_count
from pd.transfer.base import Receiver, TransferState
from pd.transfer.nvlink.messages import NvlinkDestination
from pd.transfer.ranges import check_pages

if TYPE_CHECKING:
    from pd.transfer.base import IntArray
    from pd.transfer.nvlink.sessions import NvlinkSession
    from pd.transfer.pool_shape import MissingTokens, PoolShape


class NvlinkReceiver(Receiver):
    """Cannot see what lands. It is DONE when P commits, which P does after its last store."""

    def __init__(
        self,
        session: NvlinkSession,
        pages: IntArray,
        tokens: MissingTokens,
        shape: PoolShape,
    ) -> None:
        check_pages(pages, shape.page_size, shape.num_slots, tokens.start, tokens.stop)
        self.error: PDError | None = None
        self._session = session
        self._expected = shape.missing_bytes(tokens)
        self._state = TransferState.ACTIVE
        self._peer_drained = False
        self._lock = threading.Lock()
        page_size = shape.page_size
        covering = pages[: page_count(tokens.stop, page_size)].astype("<i4")
        self._destination = msgspec.msgpack.encode(
            NvlinkDestination(
                session.number, page_size, tokens.start, tokens.stop, covering.tobytes()
            )
        )
        session.add(self)

    @property
    def destination(self) -> bytes:
        return self._destination

    @property
    def bytes_received(self) -> int:
        return 0

    def commit(self, num_bytes: int) -> None:
        if num_bytes == self._expected:
            self._end(None)
            return
        peer = self._session.peer
        self.fail(
            TransferError(f"{peer} committed {num_bytes} KV bytes; {self._expected} were reserved")
        )

    def poll(self) -> TransferState:
        return self._state

    def abort(self) -> None:
        self.fail(TransferError("aborted"))

    def fail(self, error: PDError) -> None:
        """Record the first error."""
        self._end(error)

    def drained(self) -> bool:
        if self._state is TransferState.FAILED:
            return self._peer_drained or self._session.quiet()
        # A commit follows the last store.
        return self._state is TransferState.DONE

    def peer_drained(self) -> None:
        self._peer_drained = True

    def _end(self, error: PDError | None) -> None:
        with self._lock:
            if self._state is TransferState.ACTIVE:
                self.error = error
                self._state = TransferState.DONE if error is None else TransferState.FAILED
        self._session.discard(self)
