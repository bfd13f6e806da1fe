"""The preferred role of an elastic node, and the proxy allowed to change it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pd.core.messages import LEASE_SECONDS, RoleState

if TYPE_CHECKING:
    from pd.core.messages import PreferRole
    from pd.core.node_info import Role

logger = logging.getLogger(__name__)


class RoleLease:
    """Lets one proxy at a time change the node's role, and rejects orders of others.

    The first proxy that asks gets the lease and keeps it by asking again in time. Each new grant
    has a new term, even for the same proxy, so we recognize orders of an earlier lease whenever
    they arrive. The caller holds the node's lock. Times are on the node's monotonic clock.
    """

    def __init__(self) -> None:
        self._role: Role | None = None
        self._fixed = False
        self._administered = 0
        self._holder = b""
        self._term = 0
        self._until = 0.0

    def note_request(self, proxy: bytes, now: float, *, wanted: bool) -> None:
        """Handle a heartbeat of a proxy. ``wanted``: it asks for the lease."""
        self._end_lease(now)
        if not wanted:
            if proxy == self._holder:
                self._holder = b""
            return
        if not self._holder:
            self._holder = proxy
            self._term += 1
        if proxy == self._holder:
            self._until = now + LEASE_SECONDS

    def describe_state(self, now: float) -> RoleState:
        """Describe the role and its lease for heartbeats."""
        self._end_lease(now)
        decider = self._holder.decode(errors="replace")
        return RoleState(self._role, self._fixed, decider, self._term, self._administered)

    def follow_order(self, proxy: bytes, order: PreferRole, now: float) -> bool:
        """Follow an order for a role, if the sender may give it. Return whether it was followed.

        Administrators always may. After an administrator's order, only administrators may, until
        one of them lets proxies choose again.
        """
        self._end_lease(now)
        is_holder = proxy == self._holder and order.term == self._term
        if not order.fixed and (self._fixed or not is_holder or order.role is None):
            logger.info(
                "proxy %.64r may not order a role (%s) in term %d: %s",
                proxy,
                order.role,
                order.term,
                "an administrator set the role" if self._fixed else f"the term is {self._term}",
            )
            return False
        self._administered += order.fixed
        self._fixed = order.fixed and order.role is not None
        self._role = order.role or self._role
        return True

    def _end_lease(self, now: float) -> None:
        if now > self._until:
            self._holder = b""
