"""Decides whether a request is what nodes die of, and which requests are tried by themselves."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from pd.core.messages import LEASE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pd.proxy.attempt import Attempt
    from pd.proxy.node_handle import NodeHandle

# Deaths in a row after which a request is not given another node: if no other request was in all
# of these steps, and if others were. Nodes that die at once, as when somebody kills all of a role,
# seem to die of that: the second was given the request when it was about to end, maybe.
DEATHS_ALONE = 2
DEATHS_IN_COMPANY = 3
AT_ONCE_SECONDS = 0.25
# An answer that got no further than this since a death may be what the node died of.
STEP_TOKENS = 1
# Deaths of other nodes for so long before a request's first one, and all after it, say that nodes
# die of something else.
WINDOW_SECONDS = 30.0
# A process that ends so soon after a step failed ends of that.
BROKEN_SECONDS = 10.0
_MAX_DEATHS = 256
_MAX_REPORTS = 4096

# Owner and rid, which no two requests under way have in common.
Request = tuple[str, str]


class Death(NamedTuple):
    """A node died, hung or failed a step.

    Attributes:
        node: its instance id.
        at: when that was noticed, on the monotonic clock.
        requests: those of this process which may have been in its step.
        others: whether the node had requests of other processes, too.
    """

    node: str
    at: float
    requests: frozenset[Request]
    others: bool = False


class Suspicion:
    """Weighs deaths of nodes with a request in their steps against those without it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deaths: deque[Death] = deque(maxlen=_MAX_DEATHS)
        self._explained: set[Death] = set()
        # By instance, what its next death is a part of, and until when.
        self._under_way: dict[str, tuple[Death, float]] = {}
        # When peers said that instances may have failed which requests, oldest first.
        self._reports: deque[tuple[float, str, Request]] = deque(maxlen=_MAX_REPORTS)

    def note(self, node: str, requests: Iterable[Request], *, others: bool = False) -> Death:
        """Note that a node died or hangs. If it hung before, or has just failed a step, and its
        requests went elsewhere, that is one death. Requests that it got since make it another one,
        in which those of the first one count as well.

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
        return self._add(node, present, math.inf, others=others)

    def reported(self, node: str, request: Request) -> None:
        """Note that a peer says a node may have failed a request, which may be in its step and goes
        elsewhere. If the node dies within the time in which its own death is noticed, the request
        was in that step."""
        self._reports.append((self._clock(), node, request))

    def note_step(self, node: str, requests: Iterable[Request], *, others: bool = False) -> Death:
        """Note that a node failed a step, of which its process may end in a moment."""
        until = self._clock() + BROKEN_SECONDS
        return self._add(node, frozenset(requests), until, others=others)

    def works(self, node: str) -> None:
        """Note that a node's step ended and that it takes requests: the next death is another."""
        _, until = self._under_way.get(node, (None, 0.0))
        if until == math.inf:
            del self._under_way[node]

    def _add(self, node: str, requests: frozenset[Request], until: float, *, others: bool) -> Death:
        death = Death(node, self._clock(), requests, others)
        self._deaths.append(death)
        self._under_way.pop(node, None)
        self._under_way[node] = death, until
        if len(self._under_way) > _MAX_DEATHS:
            del self._under_way[next(iter(self._under_way))]
        return death

    def convicts(self, request: Request, deaths: tuple[Death, ...]) -> bool:
        """Whether to give a request no other node.

        The more nodes died without the request, the more have to die with it. Deaths of which it
        is convicted say nothing in favour of other requests.

        Args:
            deaths: those in a row, without progress in between, in whose steps it may have been.
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


class Trials:
    """Suspected attempts under way, at most one on a node: if the node dies, others that were
    suspected with this one are not in its step."""

    def __init__(self) -> None:
        self._attempts: dict[Attempt, None] = {}

    def begin(self, attempt: Attempt) -> None:
        """An attempt that is suspected was sent to its nodes."""
        self._attempts[attempt] = None

    def occupied(self, attempt: Attempt) -> frozenset[NodeHandle]:
        """Nodes on which others than this attempt's request are tried."""
        for other in [other for other in self._attempts if not _is_tried(other)]:
            del self._attempts[other]
        job = attempt.generation.job
        others = (other for other in self._attempts if other.generation.job is not job)
        return frozenset(node for other in others for node in other.nodes)


def is_suspected(attempt: Attempt) -> bool:
    """Whether two nodes or more died with an attempt in their steps, and it has not got on."""
    return len(attempt.history.deaths) > 1 and not attempt.has_got_on


def _is_tried(attempt: Attempt) -> bool:
    return attempt in attempt.generation.attempts and is_suspected(attempt)
