"""The role that an elastic node prefers, and which proxy may change it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pd.core.messages import LEASE_SECONDS, RoleState

if TYPE_CHECKING:
    from pd.core.messages import PreferRole
    from pd.core.node_info import Role

logger = logging.getLogger(__name__)


class RoleLease:
    """Grants the right to move the node's role to one proxy at a time, and refuses others' orders.

    The first proxy that asks gets the lease and keeps it as long as it asks again in time. When
    another proxy gets it, or the same one after it ended, the lease has a new term, so an order
    from before is recognized whenever it arrives. The caller holds the node's lock. Times are on
    the node's monotonic clock.
    """

    def __init__(self) -> None:
        self._role: Role | None = None
        self._fixed = False
        self._administered = 0
        self._holder = b""
        self._term = 0
        self._until = 0.0

    def asked(self, proxy: bytes, now: float, *, wanted: bool) -> None:
        """A heartbeat of a proxy that wants the lease, or does not."""
        self._end(now)
        if not wanted:
            if proxy == self._holder:
                self._holder = b""
            return
        if not self._holder:
            self._holder = proxy
            self._term += 1
        if proxy == self._holder:
            self._until = now + LEASE_SECONDS

    def state(self, now: float) -> RoleState:
        """Return the role and its lease as heartbeats tell proxies."""
        self._end(now)
        decider = self._holder.decode(errors="replace")
        return RoleState(self._role, self._fixed, decider, self._term, self._administered)

    def ordered(self, proxy: bytes, order: PreferRole, now: float) -> bool:
        """Take an order for a role; returns whether it is followed. An administrator's always is,
        and only administrators' follow it until one of these leaves the role to proxies."""
        self._end(now)
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

    def _end(self, now: float) -> None:
        if now > self._until:
            self._holder = b""
