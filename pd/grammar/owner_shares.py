"""Owners' shares of the limits on grammars. Each grammar that exceeds a limit halves the share."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

_MAX_HALVINGS = 5
# Seconds after which we forgive one halving.
_FORGIVEN_SECONDS = 60.0
# Owners with a remembered share.
_MAX_OWNERS = 4096


class OwnerShares:
    """Keeps each owner's share of the limits. Any thread may use it.

    We lower the share of the owner instead of refusing the grammar's text, because one more letter
    makes a new text.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Halvings by owner, and the time of the last halving or forgiveness.
        self._halvings: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def get_share(self, owner: str) -> float:
        """Return an owner's share of the limits, from 0 to 1."""
        with self._lock:
            return float(0.5 ** self._count_halvings(owner))

    def halve_share(self, owner: str) -> None:
        """Halve an owner's share, because one of its grammars exceeded a limit."""
        with self._lock:
            count = min(self._count_halvings(owner) + 1, _MAX_HALVINGS)
            self._halvings[owner] = count, time.monotonic()
            self._halvings.move_to_end(owner)
            if len(self._halvings) > _MAX_OWNERS:
                self._halvings.popitem(last=False)

    def _count_halvings(self, owner: str) -> int:
        known = self._halvings.get(owner)
        if known is None:
            return 0
        count, since = known
        forgiven = int((time.monotonic() - since) / _FORGIVEN_SECONDS)
        if forgiven:
            count = max(0, count - forgiven)
            self._halvings[owner] = count, since + forgiven * _FORGIVEN_SECONDS
        if not count:
            del self._halvings[owner]
        return count
