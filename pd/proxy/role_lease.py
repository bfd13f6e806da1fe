"""Leases by which one of several proxies decides on roles.

Every elastic node grants a lease to one proxy at a time (:mod:`pd.node.role_lease`) and says in its
heartbeats to which. The proxy with the leases of more than half of the elastic nodes decides. A
proxy asks for none if, even with all leases that nobody has, another had more, or as many and the
smaller instance id. So leases that were dealt out to several end up with one, and a proxy of many
nodes decides though another one has the leases of a few. A node follows only the holder of its own
lease, so a proxy that stood still, and believes to have a lease that ended, decides nothing.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.proxy.node_handle import NodeHandle

logger = logging.getLogger(__name__)


class DecisionLease:
    """The leases of one proxy at its elastic nodes, as their heartbeats tell. Everything runs on
    the event loop.

    Args:
        own: instance id of this proxy.
    """

    def __init__(self, own: str, nodes: Sequence[NodeHandle]) -> None:
        self._own = own
        self._nodes = nodes
        self._decided = False

    def wanted(self) -> bool:
        """Whether to ask nodes for their leases: unless another proxy has more than this one can
        get, or as many and the smaller instance id."""
        held = self._held()
        # NOTE: one that gives its leases back can get as many as before, so it does not begin anew.
        most = held.pop(self._own, 0) + held.pop("", 0)
        return all(most > count or (most == count and self._own < n) for n, count in held.items())

    def decides(self) -> bool:
        """Whether this proxy decides on roles at present."""
        nodes = sum(node.roles is not None for node in self._nodes)
        decides = 2 * self._held()[self._own] > nodes
        if decides != self._decided:
            self._decided = decides
            verb = "decides" if decides else "no longer decides"
            logger.info("this proxy %s on the roles of nodes", verb)
        return decides

    def has(self, node: NodeHandle) -> bool:
        """Whether this proxy has the lease of one node."""
        return node.roles is not None and node.roles.decider == self._own

    def _held(self) -> Counter[str]:
        """Nodes by the proxy that has their lease; by the empty string if none has."""
        states = (node.roles for node in self._nodes)
        return Counter(state.decider for state in states if state is not None)
