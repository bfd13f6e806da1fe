"""Leases: clients ask a node to keep the prefix of a program that will come back soon."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pd.radix import RadixCache, TreeNode

# The pool's pages that the leases of one owner, and of all owners, may hold.
OWNER_SHARE = 0.125
TOTAL_SHARE = 0.5
MAX_LEASES = 4096


class _PrefixLease(NamedTuple):
    """A granted lease.

    Attributes:
        number: the cache's name for it.
        pages: length of its prefix. Leases that share a prefix count it once each.
        ends_at: monotonic time.
    """

    number: int
    pages: int
    ends_at: float


class PrefixLeases:
    """Leases of cached prefixes, by client and request. The caller holds the node's lock.

    A leased prefix is evicted last. It takes no memory away from running requests, because these
    evict it if nothing else is left. So a lease needs no timer: we end expired ones before each
    eviction, and the limits only keep a client from pushing out everybody else's prefixes.
    """

    def __init__(self, radix: RadixCache, num_pages: int) -> None:
        self._radix = radix
        self._owner_limit = int(num_pages * OWNER_SHARE)
        self._total_limit = int(num_pages * TOTAL_SHARE)
        # Oldest first.
        self._leases: dict[tuple[str, str], _PrefixLease] = {}
        self._pages_of: dict[str, int] = {}
        # No lease ends before this time, so most evictions need not look at the leases.
        self._first_end = math.inf
        self.num_granted = 0
        self.num_refused = 0

    def __len__(self) -> int:
        return len(self._leases)

    def add_lease(self, owner: str, rid: str, handle: TreeNode, pages: int, seconds: float) -> bool:
        """Keep a prefix of ``pages`` pages for a while.

        A request has one lease, and a new one replaces it. If an owner has too much, its oldest
        leases end.

        Returns:
            False if the prefix is longer than the limit, or others hold too much.
        """
        self.end_expired()
        self.end_lease(owner, rid)
        if pages > self._owner_limit:
            self.num_refused += 1
            return False
        for other in [key for key in self._leases if key[0] == owner]:
            if self._pages_of.get(owner, 0) + pages <= self._owner_limit:
                break
            self.end_lease(*other)
        total = sum(self._pages_of.values()) + pages
        if total > self._total_limit or len(self._leases) >= MAX_LEASES:
            self.num_refused += 1
            return False
        lease = _PrefixLease(self._radix.lease_prefix(handle), pages, time.monotonic() + seconds)
        self._leases[owner, rid] = lease
        self._first_end = min(self._first_end, lease.ends_at)
        self._pages_of[owner] = self._pages_of.get(owner, 0) + pages
        self.num_granted += 1
        return True

    def end_lease(self, owner: str, rid: str) -> None:
        """End the lease of a request, if it has one."""
        lease = self._leases.pop((owner, rid), None)
        if lease is None:
            return
        self._radix.end_lease(lease.number)
        self._pages_of[owner] -= lease.pages
        if not self._pages_of[owner]:
            del self._pages_of[owner]

    def end_expired(self) -> None:
        now = time.monotonic()
        if now < self._first_end:
            return
        for key in [key for key, lease in self._leases.items() if lease.ends_at <= now]:
            self.end_lease(*key)
        ends = (lease.ends_at for lease in self._leases.values())
        self._first_end = min(ends, default=math.inf)

    def count_leases(self) -> dict[str, int]:
        """Return the counts for ``/server_info``."""
        self.end_expired()
        return {
            "leases": len(self._leases),
            "pages": self._radix.leased_pages,
            "granted": self.num_granted,
            "refused": self.num_refused,
        }
