"""Parts shared by the processes of one port (``--workers``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractAsyncContextManager

    from pd.net.connections import ConnectionSource
    from pd.proxy.workers.actions import Everywhere
    from pd.proxy.workers.ledger import Ledger


class RidClaims(Protocol):
    """Rids chosen by clients. One process at a time may use each."""

    def hold_rids(self, owner: str, rids: Iterable[str]) -> AbstractAsyncContextManager[None]:
        """Return a context during which no other process accepts these rids.

        Entering it raises InvalidRequestError if a process already has a request with one of them.
        """


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Resources of one of several processes.

    Attributes:
        connections: connections of the common port for this process.
        address: IP address and number of that port.
        count: number of processes. They share memory limits evenly.
        began: when the first process started, on the monotonic clock.
    """

    connections: ConnectionSource
    address: tuple[str, int]
    count: int
    began: float
    ledger: Ledger
    everywhere: Everywhere
    claims: RidClaims
