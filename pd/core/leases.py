"""Processes of which a message came lately."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Generic, TypeVar

from pd.core.messages import HEARTBEAT_INTERVAL, LEASE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

Name = TypeVar("Name", str, bytes)

# Leases are looked at ten times a second. After a pause this long it was this process that stood
# still, and the others' messages lie unread in the sockets.
_STALL = 2 * HEARTBEAT_INTERVAL
_GRACE = 2 * HEARTBEAT_INTERVAL


class Leases(Generic[Name]):
    """Processes that are believed to live. The caller holds the node's lock."""

    def __init__(self) -> None:
        self._seen: dict[Name, float] = {}
        self._looked = time.monotonic()

    def __contains__(self, name: object) -> bool:
        return name in self._seen

    def __iter__(self) -> Iterator[Name]:
        return iter(list(self._seen))

    def __len__(self) -> int:
        return len(self._seen)

    def renew(self, name: Name) -> None:
        """Note a sign of life, perhaps the first."""
        self._seen[name] = time.monotonic()

    def drop(self, name: Name) -> bool:
        """Forget a process; False if it was not known."""
        return self._seen.pop(name, None) is not None

    def expired(self, now: float) -> list[Name]:
        """Processes that were silent for longer than a lease. Call it often: after a
        long pause, in which this process stood still itself, the others get grace."""
        if now > self._looked + _STALL:
            earliest = now + _GRACE - LEASE_SECONDS
            self._seen = {name: max(seen, earliest) for name, seen in self._seen.items()}
        self._looked = now
        return [name for name, seen in self._seen.items() if now > seen + LEASE_SECONDS]
