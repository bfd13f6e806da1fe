"""Receiving side of one room, for backends whose writes D cannot see."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.kernels.paging import count_needed_pages
from pd.transfer.base import Receiver, TransferState

if TYPE_CHECKING:
    from pd.core.errors import PDError
    from pd.transfer.kv_buffer import IntArray
    from pd.transfer.pool_shape import MissingTokens


class UnseenReceiver(Receiver):
    """Is DONE when P commits, because P commits after its last write has landed.

    Args:
        expected: KV bytes of the reservation.
        destination: bytes for ``Reservation.destination``.
    """

    def __init__(self, peer: str, expected: int, destination: bytes) -> None:
        self.peer = peer
        self.error: PDError | None = None
        self._expected, self._destination = expected, destination
        self._state = TransferState.ACTIVE
        self._peer_drained = False
        self._lock = threading.Lock()

    @property
    def destination(self) -> bytes:
        return self._destination

    @property
    def bytes_received(self) -> int:
        return 0

    def commit(self, num_bytes: int) -> None:
        if num_bytes == self._expected:
            self._set_outcome(None)
            return
        self.fail(
            TransferError(
                f"{self.peer} committed {num_bytes} KV bytes; {self._expected} were reserved"
            )
        )

    def poll(self) -> TransferState:
        return self._state

    def abort(self) -> None:
        self.fail(TransferError("aborted"))

    def fail(self, error: PDError) -> None:
        """Record the first error."""
        self._set_outcome(error)

    def on_peer_drained(self) -> None:
        self._peer_drained = True

    def _set_outcome(self, error: PDError | None) -> None:
        """Become FAILED with an error, or DONE without one."""
        with self._lock:
            if self._state is TransferState.ACTIVE:
                self.error = error
                self._state = TransferState.DONE if error is None else TransferState.FAILED


def encode_pages(pages: IntArray, tokens: MissingTokens, page_size: int) -> bytes:
    """Encode the page tables up to the last token, one after the other, little-endian int32."""
    return pages[..., : count_needed_pages(tokens.stop, page_size)].astype("<i4").tobytes()
