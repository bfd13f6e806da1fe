"""Moves requests that wait at one node to another where their first token would come much earlier.

Nodes of a request are chosen by what is predicted when it comes. If the queue of its node turns out
longer, the proxy asks the node to give the request back (:class:`pd.core.messages.TakeBack`) and
chooses anew. A node that has begun with the prompt keeps it.
"""

from __future__ import annotations

from itertools import dropwhile, islice, takewhile
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from pd.core.messages import TakeBack
from pd.proxy.attempts import demand_of
from pd.proxy.prediction import might_gain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd.core.messages import TakenBack
    from pd.proxy.attempt import Attempt
    from pd.proxy.attempts import Attempts
    from pd.proxy.load_estimate import LoadEstimate
    from pd.proxy.metrics import Metrics
    from pd.proxy.node_handle import NodeHandle
    from pd.proxy.prediction import Predicted
    from pd.proxy.routing import Router

# Times that a request is moved, at most.
MAX_MOVES = 2
# Requests that a node is asked to give back at a time.
MAX_UNDER_WAY = 4
# Requests for which better nodes are looked for with each report of a node.
MAX_LOOKS = 4


class _Move(NamedTuple):
    """A request that a node was asked to give back.

    Attributes:
        target: load of the node that was better then, with the promise of ``seconds`` of prefill.
    """

    attempt: Attempt
    source: NodeHandle
    target: LoadEstimate
    seconds: float


class Moves:
    """The requests that nodes were asked to give back. Everything runs on the event loop.

    Args:
        place_anew: sends a request that its node gave back to the nodes that are best now.
    """

    def __init__(
        self,
        instance_id: str,
        router: Router,
        attempts: Attempts,
        metrics: Metrics,
        place_anew: Callable[[Attempt], None],
    ) -> None:
        self._instance_id = instance_id
        self._router = router
        self._attempts = attempts
        self._metrics = metrics
        self._place_anew = place_anew
        self._under_way: dict[bytes, _Move] = {}
        # Room of the request of each node for which no better nodes were found last. The next
        # report goes on behind it, lest requests that cannot move hide older ones.
        self._looked_at: WeakKeyDictionary[NodeHandle, bytes] = WeakKeyDictionary()

    def look(self, node: NodeHandle) -> None:
        """A node has told its load: ask it for requests that would begin much earlier elsewhere."""
        self._forget_ended()
        left = MAX_UNDER_WAY - sum(move.source is node for move in self._under_way.values())
        shortest = self._router.shortest_queue(node)
        if shortest is None or left <= 0:
            return
        waiting = takewhile(lambda found: might_gain(found[1].ttft, shortest), self._waiting(node))
        for attempt, present in islice(self._turn(node, waiting), MAX_LOOKS):
            model, history = attempt.generation.spec.model, attempt.history
            better = self._router.better(
                model, demand_of(attempt), present, history.avoided, history.apart
            )
            if better is None:
                self._looked_at[node] = attempt.room
                continue
            self._ask(attempt, present, better)
            left -= 1
            if not left:
                return

    def _turn(
        self, node: NodeHandle, waiting: Iterator[tuple[Attempt, Predicted]]
    ) -> Iterator[tuple[Attempt, Predicted]]:
        """Yield those of the waiting requests whose turn it is: those behind the one that was
        looked at last. If it waits no more there are none, and the next report begins anew."""
        last = self._looked_at.pop(node, None)
        if last is None:
            return waiting
        return islice(dropwhile(lambda found: found[0].room != last, waiting), 1, None)

    def _waiting(self, node: NodeHandle) -> Iterator[tuple[Attempt, Predicted]]:
        """Requests that may wait at a node, the youngest first, and what is predicted of each if it
        stays. The node computes them in about the order in which they came."""
        ttft = node.load.queue_seconds
        for attempt in reversed(list(node.active)):
            predicted = attempt.predicted
            if attempt.first is not node or predicted is None or attempt.progress:
                continue
            if attempt.room in self._under_way:
                continue  # its time is not in the load any more
            before = ttft - predicted.prefill
            if _may_move(attempt):
                yield attempt, predicted._replace(ttft=ttft)
            ttft = before

    def _ask(self, attempt: Attempt, present: Predicted, better: Predicted) -> None:
        node = present.first
        message = TakeBack(to=node.instance_id, sender=self._instance_id, room=attempt.room)
        if not node.send(message):
            return
        node.load.prompt_sent(-present.prefill)
        if attempt.sent_load is not None:
            attempt.sent_load = attempt.sent_load._replace(seconds=0.0)
        better.first.load.promised += better.prefill
        move = _Move(attempt, node, better.first.load, better.prefill)
        self._under_way[attempt.room] = move

    def answered(self, node: NodeHandle, message: TakenBack) -> None:
        """A node has given a request back, or keeps it."""
        move = self._under_way.get(message.room)
        if move is None or move.source is not node:
            return
        if not self._is_current(move):
            self._end(move, "ended")
        elif message.taken:
            self._end(move, "moved")
            self._place_anew(move.attempt)
        else:
            move.attempt.begun = True
            self._end(move, "begun")

    def _forget_ended(self) -> None:
        """Forget requests that ended, or lost their nodes, before the answer came."""
        for move in list(self._under_way.values()):
            if not self._is_current(move):
                self._end(move, "ended")

    def _is_current(self, move: _Move) -> bool:
        return self._attempts.get(move.attempt.room) is move.attempt

    def _end(self, move: _Move, outcome: str) -> None:
        del self._under_way[move.attempt.room]
        move.target.promised -= move.seconds
        self._metrics.moves.labels(outcome).inc()


def _may_move(attempt: Attempt) -> bool:
    """Whether an attempt may be asked back. Its node has not begun with it as far as is known."""
    history = attempt.history
    if attempt.begun or not attempt.is_whole or attempt.generation.job.together:
        return False
    return history.moves < MAX_MOVES and not history.deaths
