"""Moves waiting requests to nodes where their first token would come much earlier.

We choose the nodes of a request by prediction when it arrives. If the queue turns out longer, we
ask the node to give the request back (:class:`pd.core.messages.TakeBack`) and choose again. A node
keeps a prompt it has started.
"""

from __future__ import annotations

from itertools import dropwhile, islice, takewhile
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from pd.core.messages import TakeBack
from pd.proxy.dispatch.attempts import list_active, make_demand
from pd.proxy.routing.prediction import might_gain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd.core.messages import TakenBack
    from pd.proxy.dispatch.attempt import Attempt
    from pd.proxy.dispatch.attempts import Attempts
    from pd.proxy.dispatch.proxy_metrics import Metrics
    from pd.proxy.nodes.load_estimate import LoadEstimate
    from pd.proxy.nodes.node_handle import NodeHandle
    from pd.proxy.routing.prediction import Predicted
    from pd.proxy.routing.routing import Router

# How often a request may move.
MAX_MOVES = 2
# Maximum number of requests we ask a node to give back at the same time.
MAX_UNDER_WAY = 4
# Number of requests for which we check for better nodes per report.
MAX_CHECKS = 4


class _Move(NamedTuple):
    """A request we asked a node to give back.

    Attributes:
        target: load of the node that was better then. It includes a promise of ``seconds`` of
            prefill.
    """

    attempt: Attempt
    source: NodeHandle
    target: LoadEstimate
    seconds: float


class Moves:
    """Tracks the requests we asked nodes to give back. Runs on the event loop.

    Args:
        place_again: sends a returned request to the best nodes.
    """

    def __init__(
        self,
        instance_id: str,
        router: Router,
        attempts: Attempts,
        metrics: Metrics,
        place_again: Callable[[Attempt], None],
    ) -> None:
        self._instance_id = instance_id
        self._router = router
        self._attempts = attempts
        self._metrics = metrics
        self._place_again = place_again
        self._under_way: dict[bytes, _Move] = {}
        # Per node: room of the last request without better nodes. The next report continues after
        # it, because requests that cannot move must not hide older ones.
        self._last_checked: WeakKeyDictionary[NodeHandle, bytes] = WeakKeyDictionary()

    def check_queue(self, node: NodeHandle) -> None:
        """Ask a node that reported its load for requests that would start much earlier
        elsewhere."""
        self._forget_ended()
        left = MAX_UNDER_WAY - sum(move.source is node for move in self._under_way.values())
        shortest = self._router.get_shortest_queue(node)
        if shortest is None or left <= 0:
            return
        waiting = takewhile(
            lambda pair: might_gain(pair[1].ttft, shortest), self._iter_waiting(node)
        )
        for attempt, present in islice(self._skip_checked(node, waiting), MAX_CHECKS):
            model, history = attempt.generation.spec.model, attempt.history
            better = self._router.find_better(
                model, make_demand(attempt), present, history.avoided, history.apart
            )
            if better is None:
                self._last_checked[node] = attempt.room
                continue
            self._request_return(attempt, present, better)
            left -= 1
            if not left:
                return

    def _skip_checked(
        self, node: NodeHandle, waiting: Iterator[tuple[Attempt, Predicted]]
    ) -> Iterator[tuple[Attempt, Predicted]]:
        """Yield waiting requests after the one we checked last. If it no longer waits, yield none;
        the next report starts from the beginning."""
        last = self._last_checked.pop(node, None)
        if last is None:
            return waiting
        return islice(dropwhile(lambda pair: pair[0].room != last, waiting), 1, None)

    def _iter_waiting(self, node: NodeHandle) -> Iterator[tuple[Attempt, Predicted]]:
        """Yield requests that may wait at a node, youngest first, with the prediction if they stay.

        A node computes them roughly in order of arrival.
        """
        ttft = node.load.queue_seconds
        for attempt in reversed(list_active(node)):
            predicted = attempt.predicted
            if attempt.first_node is not node or predicted is None or attempt.progress:
                continue
            if attempt.room in self._under_way:
                continue  # the load excludes its time already
            before = ttft - predicted.prefill
            if _may_move(attempt):
                yield attempt, predicted._replace(ttft=ttft)
            ttft = before

    def _request_return(self, attempt: Attempt, present: Predicted, better: Predicted) -> None:
        node = present.first_node
        message = TakeBack(to=node.instance_id, sender=self._instance_id, room=attempt.room)
        if not node.send_message(message):
            return
        node.load.add_prompt(-present.prefill)
        if attempt.sent_load is not None:
            attempt.sent_load = attempt.sent_load._replace(seconds=0.0)
        better.first_node.load.promised += better.prefill
        move = _Move(attempt, node, better.first_node.load, better.prefill)
        self._under_way[attempt.room] = move

    def handle_answer(self, node: NodeHandle, message: TakenBack) -> None:
        """Handle the answer of a node: it gave a request back, or keeps it."""
        move = self._under_way.get(message.room)
        if move is None or move.source is not node:
            return
        if not self._is_current(move):
            self._end_move(move, "ended")
        elif message.taken:
            self._end_move(move, "moved")
            self._place_again(move.attempt)
        else:
            move.attempt.has_begun = True
            self._end_move(move, "begun")

    def _forget_ended(self) -> None:
        """Forget requests that ended or lost their nodes before the answer."""
        for move in list(self._under_way.values()):
            if not self._is_current(move):
                self._end_move(move, "ended")

    def _is_current(self, move: _Move) -> bool:
        return self._attempts.get_attempt(move.attempt.room) is move.attempt

    def _end_move(self, move: _Move, outcome: str) -> None:
        del self._under_way[move.attempt.room]
        move.target.promised -= move.seconds
        self._metrics.moves.labels(outcome).inc()


def _may_move(attempt: Attempt) -> bool:
    """Whether we may ask for an attempt back. As far as we know, its node has not started it."""
    history = attempt.history
    if attempt.has_begun or not attempt.is_whole or attempt.generation.job.is_batch:
        return False
    return history.moves < MAX_MOVES and not history.deaths
