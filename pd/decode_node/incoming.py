"""State of one hand-off on the node that receives the KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import Future

    import numpy as np
    import numpy.typing as npt

    from pd.core.messages import Commit, ErrorInfo, Reservation
    from pd.core.request import Request
    from pd.transfer.base import Receiver

    IntArray = npt.NDArray[np.int32]


@dataclass(eq=False, slots=True)
class IncomingRoom:
    """State of the hand-off of one request, from its arrival until its pages are released.

    Attributes:
        connected: whether the prefill node shook hands.
        awaits_grammar: whether the request has a grammar of which the prefill node has not said yet
            that it has compiled it, too.
        receiver: accepts the KV; None until pages are reserved.
        reservation: message to the prefill node, which is sent once ``send_at`` has passed; None
            until pages are reserved.
        expected_at: when the prompt is predicted to be computed; None until the peer has begun.
        commit_at: time at which ``commit`` arrived.
        digest: digest of the KV, computed from the pool; None until the KV is complete.
        quarantine: pages that were given up and may still be written by the peer; None while the
            room lives.
        abort_error: cause of the room's end, as the peer is told.
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
        """Whether a message of this sender and epoch is about this hand-off."""
        return self.request.peer == sender and self.epoch == epoch
