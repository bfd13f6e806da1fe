"""Decides whether a request crashes nodes."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from pd.core.messages import LEASE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


# Deaths in a row after which we give a request no other node: if no other request was in all of
# these steps, and if others were. Nodes that die at the same moment look alike, for example because
# somebody kills all nodes of a role: the second one may have got the request just before.
DEATHS_ALONE = 2
DEATHS_IN_COMPANY = 3
AT_ONCE_SECONDS = 0.25
# An answer that advanced no further than this since a death may have caused it.
STEP_TOKENS = 1
# We compare with deaths of other nodes from this long before the first death of a request, because
# they suggest another cause.
WINDOW_SECONDS = 30.0
# If a process ends this soon after a failed step, the step is the cause.
BROKEN_SECONDS = 10.0
_MAX_DEATHS = 256
_MAX_REPORTS = 4096

# Owner and rid, unique among unfinished requests.
Request = tuple[str, str]


class Death(NamedTuple):
    """A node died, hung or failed a step.

    Attributes:
        node: its instance id.
        at: when we noticed, on the monotonic clock.
        requests: requests of this process possibly in the step.
        others: the node had requests of other processes, too.
    """

    node: str
    at: float
    requests: frozenset[Request]
    others: bool = False


class Suspicion:
    """Weighs deaths of nodes with a request in their steps against deaths without it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deaths: deque[Death] = deque(maxlen=_MAX_DEATHS)
        self._explained: set[Death] = set()
        # By instance: the death its next one belongs to, and until when.
        self._under_way: dict[str, tuple[Death, float]] = {}
        # Peers' reports of instances possibly failing requests, oldest first.
        self._reports: deque[tuple[float, str, Request]] = deque(maxlen=_MAX_REPORTS)

    def note_death(self, node: str, requests: Iterable[Request], *, others: bool = False) -> Death:
        """Record the death or hang of a node.

        This is the same death if the node hung before, or just failed a step, and its requests
        moved away. Newer requests on the node make it another death, which also counts for the
        requests of the first one.

        Args:
            node, others: see :class:`Death`.
        """
        since = self._clock() - LEASE_SECONDS
        reported = (request for at, name, request in self._reports if at >= since and name == node)
        present = frozenset(requests).union(reported)
        known, until = self._under_way.get(node, (None, 0.0))
        if known is not None and self._clock() <= until:
            if known.requests >= present:
                self._under_way[node] = known, math.inf
                return known
            present |= known.requests
        return self._add_death(node, present, math.inf, others=others)

    def note_report(self, node: str, request: Request) -> None:
        """Record a peer's report of a node possibly failing a request.

        The request fails over, but may still be in the node's step. It was in that step if the node
        dies before we would have noticed its death.
        """
        self._reports.append((self._clock(), node, request))

    def note_step_failure(
        self, node: str, requests: Iterable[Request], *, others: bool = False
    ) -> Death:
        """Record a failed step of a node. Its process may end in a moment because of it."""
        until = self._clock() + BROKEN_SECONDS
        return self._add_death(node, frozenset(requests), until, others=others)

    def note_recovery(self, node: str) -> None:
        """Record that a node finished its step and takes requests. Its next death is a new one."""
        _, until = self._under_way.get(node, (None, 0.0))
        if until == math.inf:
            del self._under_way[node]

    def _add_death(
        self, node: str, requests: frozenset[Request], until: float, *, others: bool
    ) -> Death:
        death = Death(node, self._clock(), requests, others)
        self._deaths.append(death)
        self._under_way.pop(node, None)
        self._under_way[node] = death, until
        if len(self._under_way) > _MAX_DEATHS:
            del self._under_way[next(iter(self._under_way))]
        return death

    def is_guilty(self, request: Request, deaths: tuple[Death, ...]) -> bool:
        """Whether to give the request no other node.

        The more nodes died without the request, the more must die with it. Deaths already
        attributed to the request do not clear other requests.

        Args:
            deaths: deaths in a row, without progress in between, with the request maybe in the
                step.
        """
        if len(deaths) < DEATHS_ALONE:
            return False
        in_all = frozenset.intersection(*(death.requests for death in deaths))
        at_once = deaths[-1].at - deaths[0].at < AT_ONCE_SECONDS
        in_company = bool(in_all - {request}) or all(death.others for death in deaths)
        needed = DEATHS_IN_COMPANY if at_once or in_company else DEATHS_ALONE
        if len(deaths) < needed + self._deaths_without(request, deaths[0].at):
            return False
        self._explained = self._explained.union(deaths).intersection(self._deaths)
        return True

    def _deaths_without(self, request: Request, since: float) -> int:
        recent = (d for d in self._deaths if d.at >= since - WINDOW_SECONDS)
        return sum(request not in d.requests and d not in self._explained for d in recent)
