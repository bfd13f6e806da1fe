"""What a decode node knows of one room's hand-off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import Future

    import numpy as np
    import numpy.typing as npt

    from pd.core.messages import Commit, ErrorInfo, Reservation
    from pd.transfer.base import Receiver

    IntArray = npt.NDArray[np.int32]


@dataclass(eq=False, slots=True)
class Incoming:
    """State of the hand-off, on ``Request.hand_off``.

    Attributes:
        connected: the prefill node shook hands.
        reservation: made, and sent once ``send_at`` has passed.
        commit_at: when ``commit`` came.
        digest: being computed since all of the KV is here.
        quarantine: pages given up that P may still write; None while the room lives.
    """

    connected: bool = False
    receiver: Receiver | None = None
    reservation: Reservation | None = None
    send_at: float = 0.0
    sent: bool = False
    commit: Commit | None = None
    commit_at: float = 0.0
    digest: Future[bytes] | None = None
    committed: bool = False
    quarantine: IntArray | None = None
    abort_sent: float = 0.0
    abort_error: ErrorInfo | None = None
    num_bytes: int = 0
    epoch: int = 0
