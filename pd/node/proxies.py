"""The proxies whose requests a node serves: their leases, and how often their requests ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.core.errors import AbortedError
from pd.core.leases import Leases

if TYPE_CHECKING:
    from pd.scheduling.rooms import Rooms

# Proxies to remember.
_MAX_LOSSES = 1024


class Proxies:
    """Ends the requests of proxies that are gone, or that do not know their requests any more. The
    caller holds the node's lock, in an event."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._leases: Leases[bytes] = Leases()
        self._losses: dict[bytes, int] = {}
        # Seconds between tokens that proxies asked for.
        self._itl: dict[bytes, float] = {}

    def renew(self, proxy: bytes) -> None:
        """Renew the lease of a proxy of which a message came."""
        self._leases.renew(proxy)

    def note_objective(self, proxy: bytes, itl: float) -> None:
        """Note how many seconds between tokens a proxy wants; 0 if it does not say."""
        self._itl.pop(proxy, None)
        if itl > 0 and proxy in self._leases:
            self._itl[proxy] = itl

    @property
    def itl(self) -> float:
        """The least that any proxy asked for; 0 if none did."""
        return min(self._itl.values(), default=0.0)

    def known(self) -> list[bytes]:
        """The proxies whose leases stand."""
        return list(self._leases)

    def losses(self, proxy: bytes) -> int:
        """Number of times that requests were ended for which the proxy may still wait."""
        return self._losses.get(proxy, 0)

    def messages_lost(self, proxy: bytes) -> None:
        """End the requests of a proxy of which messages were lost, and count that it may wait for
        requests that it does not know of."""
        self._abort_all(proxy, "messages of its proxy were lost")
        self._count_loss(proxy)

    def began_anew(self, proxy: bytes) -> None:
        """End the requests of a proxy that dropped all that it had here."""
        self._abort_all(proxy, "its proxy gave it up")

    def sweep(self, now: float) -> None:
        """Drop proxies that were silent for a lease, and end their requests."""
        for proxy in self._leases.expired(now):
            self._leases.drop(proxy)
            self._itl.pop(proxy, None)
            if self._abort_all(proxy, "its proxy is gone"):
                # NOTE: if the proxy only stood still, its next heartbeat is told so.
                self._count_loss(proxy)

    def _abort_all(self, proxy: bytes, why: str) -> bool:
        """End the requests of a proxy. Returns whether there were any."""
        found = [request for request in self._rooms.live() if request.proxy == proxy]
        for request in found:
            self._rooms.fail(request, AbortedError(why), tell_proxy=False)
        return bool(found)

    def _count_loss(self, proxy: bytes) -> None:
        while len(self._losses) >= _MAX_LOSSES:
            del self._losses[next(iter(self._losses))]
        self._losses[proxy] = self._losses.get(proxy, 0) + 1
