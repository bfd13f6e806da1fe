"""State of one hand-off on the node receiving the KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import Future

    import numpy as np
    import numpy.typing as npt

    from pd.core.messages import Commit, ErrorInfo, Reservation
    from pd.scheduling.request import Request
    from pd.transfer.base import Receiver

    IntArray = npt.NDArray[np.int32]


@dataclass(eq=False, slots=True)
class IncomingRoom:
    """State of one request's hand-off, from its arrival until its pages are released.

    Attributes:
        connected: whether the prefill node shook hands.
        awaits_grammar: whether we still wait for the prefill node to compile the request's grammar.
        receiver: accepts the KV; None until pages are reserved.
        reservation: message for the prefill node, sent after ``send_at``; None until pages are
            reserved.
        expected_at: predicted end of the prefill; None until the peer has started it.
        commit_at: when ``commit`` arrived.
        digest: digest of the KV in the pool; None until the KV is complete.
        quarantine: released pages that the peer may still write to; None while the room lives.
        abort_error: cause of the room's end, for the peer.
        num_bytes: KV bytes of the reservation.
        lacking_since: when the request was first refused memory; None if it was not.
    """

    request: Request
    connected: bool = False
    awaits_grammar: bool = False
    receiver: Receiver | None = None
    reservation: Reservation | None = None
    send_at: float = 0.0
    sent: bool = False
    expected_at: float | None = None
    commit: Commit | None = None
    commit_at: float = 0.0
    digest: Future[bytes] | None = None
    committed: bool = False
    quarantine: IntArray | None = None
    abort_sent: float = 0.0
    abort_error: ErrorInfo | None = None
    num_bytes: int = 0
    epoch: int = 0
    lacking_since: float | None = None

    def is_from_peer(self, sender: str, epoch: int) -> bool:
        """Whether a message with this sender and epoch belongs to this hand-off."""
        return self.request.peer == sender and self.epoch == epoch


def incoming_of(request: Request) -> IncomingRoom | None:
    """Return the state of a request's hand-off, or None if this node does not receive its KV."""
    incoming = request.incoming
    assert incoming is None or isinstance(incoming, IncomingRoom)
    return incoming
