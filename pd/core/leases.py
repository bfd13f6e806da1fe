"""Tracks which processes are alive."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Generic, TypeVar

from pd.core.messages import HEARTBEAT_INTERVAL, LEASE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

Name = TypeVar("Name", str, bytes)

# Leases are checked ten times a second. After a pause this long, this process has stalled and
# the messages of the others lie unread in our sockets.
_STALL = 2 * HEARTBEAT_INTERVAL
_GRACE = 2 * HEARTBEAT_INTERVAL


class Leases(Generic[Name]):
    """Processes believed to be alive. The caller holds the node's lock."""

    def __init__(self) -> None:
        self._seen: dict[Name, float] = {}
        self._checked = time.monotonic()

    def __contains__(self, name: object) -> bool:
        return name in self._seen

    def __iter__(self) -> Iterator[Name]:
        return iter(list(self._seen))

    def __len__(self) -> int:
        return len(self._seen)

    def renew_lease(self, name: Name) -> None:
        """Record a sign of life, which may be the first."""
        self._seen[name] = time.monotonic()

    def drop_lease(self, name: Name) -> bool:
        """Forget a process. Return whether it was known."""
        return self._seen.pop(name, None) is not None

    def find_expired(self, now: float) -> list[Name]:
        """List processes silent for longer than a lease.

        Call this often. After a long pause between calls we give the others some grace, because
        this process stalled and may have missed their messages.
        """
        if now > self._checked + _STALL:
            earliest = now + _GRACE - LEASE_SECONDS
            self._seen = {name: max(seen, earliest) for name, seen in self._seen.items()}
        self._checked = now
        return [name for name, seen in self._seen.items() if now > seen + LEASE_SECONDS]
