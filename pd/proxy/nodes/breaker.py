"""Disables a node that is alive but fails its requests, and enables it again when it works."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# Number of failures in a row after which we disable a node. Requests in the same step fail together
# and count once. So do failures with one partner within RESET_SECONDS, because one reset of a
# connection ends all of its transfers.
FAILURES = 5
RESET_SECONDS = 0.25
# Seconds from disabling a node to the first probe. Each failed probe doubles the pause.
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0
STUCK = "its step takes far longer than steps take"


class Breaker:
    """Decides whether new requests may go to a node.

    After :data:`FAILURES` in a row the node is disabled. After a pause the proxy may probe it with
    its own request: a success enables the node, a failure starts a longer pause.

    Attributes:
        is_stuck: the node reports a step without end. It is disabled until the step ends.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_stuck = False
        self._clock = clock
        # Failures by the partner possibly at fault; None if only this node can be.
        self._failures = Counter[object]()
        # When we last counted a failure with each partner.
        self._counted_at: dict[object, float] = {}
        self._last_failure = ""
        self._pause = FIRST_PAUSE
        # When we may probe the node; None while it is enabled.
        self._out_until: float | None = None
        self._probe: object | None = None

    @property
    def allows_requests(self) -> bool:
        """Whether new requests may go to the node."""
        return self._out_until is None and not self.is_stuck

    @property
    def awaits_probe(self) -> bool:
        """Whether the node is disabled, its pause is over, and no probe is under way."""
        if self._out_until is None or self.is_stuck:
            return False
        return self._probe is None and self._clock() >= self._out_until

    @property
    def problem(self) -> str:
        """Why the node is disabled, for people; empty while it is enabled."""
        if self.is_stuck:
            return STUCK
        if self._out_until is None:
            return ""
        count = self._failures.total()
        return f"taken out after {count} failures in a row, the last: {self._last_failure}"

    def begin_attempt(self, attempt: object) -> None:
        """Note that a request was sent to the node."""
        if self._out_until is not None:
            self._probe = attempt

    def is_probed_by(self, attempt: object) -> bool:
        """Whether this request is the probe of the node."""
        return self._probe is attempt

    def end_attempt(self, attempt: object) -> None:
        """Note that a request no longer needs the node."""
        if self._probe is attempt:
            self._probe = None

    def note_failure(
        self, attempts: Iterable[object], reason: str, partner: object | None = None
    ) -> None:
        """Count requests that failed together through the node's fault.

        Args:
            partner: the other node of the pair, if it may be at fault.
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

    def note_success(self, attempt: object) -> None:
        """Note that the node has done its part of a request."""
        if self._failures and (self._out_until is None or attempt is self._probe):
            self._failures.clear()
            self._counted_at.clear()
            self._enable_node()

    def forget_partner(self, partner: object) -> None:
        """Forget failures with a node that ended or restarted, because its next instance may
        work."""
        self._counted_at.pop(partner, None)
        if self._failures.pop(partner, 0) and self._failures.total() < FAILURES:
            self._enable_node()

    def _enable_node(self) -> None:
        self._pause = FIRST_PAUSE
        self._out_until = self._probe = None
