"""Takes a node out that lives but fails its requests, and lets it back in when it works."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# Requests that fail one after the other, with no success of the node in between. Those that were in
# one step fail together and count once. So do those that fail with one partner so soon after each
# other: one reset of a connection ends all transfers on it.
FAILURES = 5
RESET_SECONDS = 0.25
# How long a node is out before the proxy probes it; doubled each time that the probe fails.
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0
STUCK = "its step takes far longer than steps take"


class Breaker:
    """Decides whether new requests may go to one node.

    After :data:`FAILURES` in a row the node is out. After a pause the proxy may probe it with a
    request of its own: its success lets the node back in, a failure starts a longer pause.

    Attributes:
        stuck: the node says that its step does not end; it is out until it does.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.stuck = False
        self._clock = clock
        # By the partner that may be at fault as well; None where it is this node alone.
        self._failures = Counter[object]()
        # When the last of them was counted with each partner.
        self._counted_at: dict[object, float] = {}
        self._last_failure = ""
        self._pause = FIRST_PAUSE
        # When the next request may probe the node; None while it is in.
        self._out_until: float | None = None
        self._probe: object | None = None

    @property
    def lets_in(self) -> bool:
        """Whether a new request may go to the node."""
        return self._out_until is None and not self.stuck

    @property
    def awaits_probe(self) -> bool:
        """Whether the node is out, its pause is over, and nothing probes it."""
        if self._out_until is None or self.stuck:
            return False
        return self._probe is None and self._clock() >= self._out_until

    @property
    def problem(self) -> str:
        """Reason why the node is out, for people; empty while it is in."""
        if self.stuck:
            return STUCK
        if self._out_until is None:
            return ""
        count = self._failures.total()
        return f"taken out after {count} failures in a row, the last: {self._last_failure}"

    def began(self, attempt: object) -> None:
        """A request was sent to the node."""
        if self._out_until is not None:
            self._probe = attempt

    def is_probed_by(self, attempt: object) -> bool:
        """Whether a request decides if the node is let in."""
        return self._probe is attempt

    def ended(self, attempt: object) -> None:
        """A request does not need the node any more."""
        if self._probe is attempt:
            self._probe = None

    def failed(
        self, attempts: Iterable[object], reason: str, partner: object | None = None
    ) -> None:
        """Requests failed together, by the node's fault.

        Args:
            partner: the other node of their pair, if the fault may be that one's.
        """
        now = self._clock()
        if partner is None or now - self._counted_at.get(partner, -math.inf) >= RESET_SECONDS:
            self._failures[partner] += 1
            self._counted_at[partner] = now
        self._last_failure = reason
        if self._out_until is not None:
            if self._probe is None or self._probe not in attempts:
                return
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        elif self._failures.total() < FAILURES:
            return
        self._out_until = now + self._pause

    def succeeded(self, attempt: object) -> None:
        """The node has done its part of a request."""
        if self._failures and (self._out_until is None or attempt is self._probe):
            self._failures.clear()
            self._counted_at.clear()
            self._let_in()

    def partner_lost(self, partner: object) -> None:
        """Another node has ended, or was restarted: failures with it say nothing of the next
        instance."""
        self._counted_at.pop(partner, None)
        if self._failures.pop(partner, 0) and self._failures.total() < FAILURES:
            self._let_in()

    def _let_in(self) -> None:
        self._pause = FIRST_PAUSE
        self._out_until = self._probe = None
