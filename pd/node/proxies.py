"""The proxies served by a node: their leases, and how often their requests were lost."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pd.core.errors import AbortedError
from pd.core.leases import Leases
from pd.core.release import RELEASE, REMEDY, describe_release

if TYPE_CHECKING:
    from pd.scheduling.live_requests import LiveRequests

logger = logging.getLogger(__name__)

# Maximum number of proxies whose losses we remember.
_MAX_LOSSES = 1024


class Proxies:
    """Ends the requests of proxies that are gone or lost track of them.

    The caller holds the node's lock, in an event.
    """

    def __init__(self, requests: LiveRequests) -> None:
        self._requests = requests
        self._leases: Leases[bytes] = Leases()
        self._losses: dict[bytes, int] = {}
        # Requested seconds between tokens, by proxy.
        self._itl: dict[bytes, float] = {}
        # Releases of the proxies that run another one than this node.
        self._releases: dict[bytes, str] = {}

    def renew_lease(self, proxy: bytes) -> None:
        """Renew a proxy's lease after a message of it."""
        self._leases.renew_lease(proxy)

    def note_objective(self, proxy: bytes, itl: float) -> None:
        """Note how many seconds between tokens a proxy wants, 0 for no objective."""
        self._itl.pop(proxy, None)
        if itl > 0 and proxy in self._leases:
            self._itl[proxy] = itl

    def note_release(self, proxy: bytes, release: str) -> None:
        """Note a proxy's release, and log a warning if it differs from ours."""
        if release == RELEASE:
            self._releases.pop(proxy, None)
        elif proxy in self._leases and self._releases.get(proxy) != release:
            self._releases[proxy] = release
            logger.warning(
                "proxy %.64r runs %s, this node %s; its requests are rejected here: %s",
                *(proxy, describe_release(release), describe_release(RELEASE), REMEDY),
            )

    def other_release(self, proxy: bytes) -> str | None:
        """Return the release of a proxy if it differs from ours; empty if the proxy states none."""
        return self._releases.get(proxy)

    @property
    def smallest_itl(self) -> float:
        """Smallest time between tokens that any proxy wants, 0 if none wants one."""
        return min(self._itl.values(), default=0.0)

    def known_proxies(self) -> list[bytes]:
        """List the proxies with a lease."""
        return list(self._leases)

    def count_losses(self, proxy: bytes) -> int:
        """Count how often we ended requests that the proxy may still wait for."""
        return self._losses.get(proxy, 0)

    def on_messages_lost(self, proxy: bytes) -> None:
        """End the requests of a proxy whose messages were lost.

        This counts as a loss, because the proxy may wait for requests we never received.
        """
        self._abort_all(proxy, "messages of its proxy were lost")
        self._count_loss(proxy)

    def on_restart(self, proxy: bytes) -> None:
        """End the requests of a proxy that gave them all up."""
        self._abort_all(proxy, "its proxy gave it up")

    def drop_silent_proxies(self, now: float) -> None:
        """Drop proxies silent for a lease, and end their requests."""
        for proxy in self._leases.find_expired(now):
            self._leases.drop_lease(proxy)
            self._itl.pop(proxy, None)
            self._releases.pop(proxy, None)
            if self._abort_all(proxy, "its proxy is gone"):
                # NOTE: if the proxy only stalled, the answer to its next heartbeat shows it the
                # loss.
                self._count_loss(proxy)

    def _abort_all(self, proxy: bytes, why: str) -> bool:
        """End the requests of a proxy. Return whether there were any."""
        lost = [request for request in self._requests.iter_live() if request.proxy == proxy]
        for request in lost:
            self._requests.fail_request(request, AbortedError(why), tell_proxy=False)
        return bool(lost)

    def _count_loss(self, proxy: bytes) -> None:
        while len(self._losses) >= _MAX_LOSSES:
            del self._losses[next(iter(self._losses))]
        self._losses[proxy] = self._losses.get(proxy, 0) + 1
