"""Leases that decide which proxy moves roles.

Every elastic node grants a lease to one proxy at a time (:mod:`pd.node.role_lease`) and names that
proxy in its heartbeats. The proxy with the leases of more than half of the elastic nodes decides. A
proxy does not ask for leases if another proxy would still have more, or as many and the smaller
instance id. Scattered leases therefore end up with one proxy, and a proxy of many nodes can decide
even if another one has the leases of a few. A node follows only the holder of its lease, so a proxy
that stalled and still believes in an expired lease decides nothing.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.proxy.nodes.node_handle import NodeHandle

logger = logging.getLogger(__name__)


class DecisionLease:
    """The leases of this proxy at its elastic nodes, as heartbeats report them.

    Runs on the event loop.

    Args:
        own: instance id of this proxy.
    """

    def __init__(self, own: str, nodes: Sequence[NodeHandle]) -> None:
        self._own = own
        self._nodes = nodes
        self._decided = False

    def is_wanted(self) -> bool:
        """Whether to ask nodes for leases.

        We do not if another proxy has more leases than we can get, or as many and the smaller
        instance id.
        """
        held = self._count_leases()
        # NOTE: we count our own leases as available, or we would give them back and start over.
        most = held.pop(self._own, 0) + held.pop("", 0)
        return all(most > count or (most == count and self._own < n) for n, count in held.items())

    def is_decider(self) -> bool:
        """Whether this proxy currently decides on roles."""
        nodes = sum(node.roles is not None for node in self._nodes)
        decides = 2 * self._count_leases()[self._own] > nodes
        if decides != self._decided:
            self._decided = decides
            verb = "decides" if decides else "no longer decides"
            logger.info("this proxy %s on the roles of nodes", verb)
        return decides

    def has_lease(self, node: NodeHandle) -> bool:
        """Whether this proxy has the lease of a node."""
        return node.roles is not None and node.roles.decider == self._own

    def _count_leases(self) -> Counter[str]:
        """Count nodes by the proxy with their lease; the empty string stands for none."""
        states = (node.roles for node in self._nodes)
        return Counter(state.decider for state in states if state is not None)
