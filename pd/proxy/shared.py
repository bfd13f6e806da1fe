"""Parts that a proxy process shares with the others behind the same port (``--workers``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractAsyncContextManager

    from pd.core.connections import ConnectionSource
    from pd.proxy.actions import Everywhere
    from pd.proxy.ledger import Ledger


class RidClaims(Protocol):
    """Rids that clients chose, each of which is in use by one process at a time."""

    def held(self, owner: str, rids: Iterable[str]) -> AbstractAsyncContextManager[None]:
        """A context in which no other process takes a request of these names. Entering it raises
        InvalidRequestError if one has."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Resources that one of several processes is given.

    Attributes:
        connections: those of the common port that this process serves.
        address: IP address and number of that port.
        count: of the processes, which share the limits on memory evenly.
        began: when the first of them started, on the monotonic clock.
    """

    connections: ConnectionSource
    address: tuple[str, int]
    count: int
    began: float
    ledger: Ledger
    everywhere: Everywhere
    claims: RidClaims
