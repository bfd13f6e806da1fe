"""Sends attempts to nodes, and knows which are under way."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

import numpy as np

from pd.core.errors import NodeFailedError, UnavailableError
from pd.core.messages import Abort, Generate, GenerateTogether
from pd.proxy.policies import Prompt
from pd.proxy.prediction import Demand

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy.typing as npt

    from pd.proxy.attempt import Attempt
    from pd.proxy.metrics import Metrics
    from pd.proxy.node_handle import NodeHandle
    from pd.proxy.routing import Route, Router

    IntArray = npt.NDArray[np.int32]

# Nodes are told so much of the hash of a key, enough to tell keys apart.
_OWNER_CHARACTERS = 16


class Attempts:
    """The attempts that nodes work on, by room. Everything runs on the event loop.

    Args:
        on_released: called with each node that an attempt does not need any more.
    """

    def __init__(
        self,
        instance_id: str,
        router: Router,
        metrics: Metrics,
        on_released: Callable[[NodeHandle], None],
    ) -> None:
        self._instance_id = instance_id
        self._router = router
        self._metrics = metrics
        self._on_released = on_released
        self._rooms: dict[bytes, Attempt] = {}

    def get(self, room: bytes) -> Attempt | None:
        """The attempt with this room, if it is under way."""
        return self._rooms.get(room)

    def open(
        self,
        attempt: Attempt,
        preferred: NodeHandle | None = None,
        occupied: frozenset[NodeHandle] = frozenset(),
    ) -> bool:
        """Choose nodes for an attempt, which is then to be sent. False if the only ones are
        occupied. Raises UnavailableError without any.

        Args:
            preferred: the node that computes the prompt, if it can.
            occupied: nodes to which the attempt must not go now.
        """
        demand = demand_of(attempt)
        route = self._route(attempt, demand, preferred, occupied)
        if route.first in occupied or route.decode in occupied:
            return False
        self._take(attempt, route, demand)
        return True

    def open_on(self, attempt: Attempt, route: Route) -> None:
        """Have an attempt, which is then to be sent, take these nodes."""
        self._take(attempt, route, demand_of(attempt))

    def _take(self, attempt: Attempt, route: Route, demand: Demand) -> None:
        generation, asked = attempt.generation, attempt.asked
        attempt.first, attempt.decode = route.first, route.decode
        attempt.predicted = route.predicted
        if route.decode is not None:
            attempt.hand_off = route.first.hand_off_to(route.decode)
            if attempt.hand_off is not None:
                attempt.hand_off.began(attempt)
        generation.holder = route.decode or route.first
        cached = route.first.cached_tokens(demand.prompt)
        attempt.uncached_tokens = len(asked.token_ids) - cached
        route.first.pending_tokens += attempt.uncached_tokens
        self._rooms[attempt.room] = attempt
        if not attempt.history.losses and generation.spec.params.prompt_logprobs_start is None:
            generation.predicted_cached = _usable(route.first, cached, len(asked.token_ids))
        if route.predicted is not None and not attempt.history.losses:
            generation.predicted_ttft = demand.waited + route.predicted.ttft
        attempt.sent_load = route.sent(demand)
        for node, reason in route.reasons:
            node.active[attempt] = None
            node.breaker.began(attempt)
            self._metrics.routing.labels(node.role, reason).inc()
            self._router.policy.computed(node, demand.prompt)

    def _route(
        self,
        attempt: Attempt,
        demand: Demand,
        preferred: NodeHandle | None = None,
        occupied: frozenset[NodeHandle] = frozenset(),
    ) -> Route:
        """Choose nodes for an attempt. Raises as :meth:`pd.proxy.routing.Router.route` does."""
        return self._reached(lambda: self._choose(attempt, demand, preferred, occupied))

    def _reached(self, choose: Callable[[], Route]) -> Route:
        """Choose until the connections of the nodes stand. A node that died a moment ago is found
        out here, before its heartbeats are missed."""
        while True:
            route = choose()
            nodes = [node for node in (route.first, route.decode) if node is not None]
            if all([node.can_be_reached(self._instance_id) for node in nodes]):
                return route

    def _choose(
        self,
        attempt: Attempt,
        demand: Demand,
        preferred: NodeHandle | None,
        occupied: frozenset[NodeHandle],
    ) -> Route:
        model, history = attempt.generation.spec.model, attempt.history
        avoided = history.avoided | occupied
        try:
            return self._router.route(
                model, demand, preferred=preferred, avoided=avoided, apart=history.apart
            )
        except UnavailableError:
            if not attempt.asked.produced:
                raise
        return self._router.route_alone(model, demand, avoided)

    def have_nodes(self, attempt: Attempt) -> bool:
        """Whether there are nodes that could take an attempt, or those that follow it."""
        demand = demand_of(attempt)
        try:
            self._route(attempt, demand)
        except UnavailableError:
            return self._could_go_on_alone(attempt, demand)
        return True

    def could_go_on_alone(self, attempt: Attempt) -> bool:
        """Whether a decode node could go on behind the tokens that the client has, where no node
        of another role can."""
        return self._could_go_on_alone(attempt, demand_of(attempt))

    def _could_go_on_alone(self, attempt: Attempt, demand: Demand) -> bool:
        if not all(choice.output_ids for choice in attempt.choices if choice.finish is None):
            return False
        model, avoided = attempt.generation.spec.model, attempt.history.avoided
        try:
            self._reached(lambda: self._router.route_alone(model, demand, avoided))
        except UnavailableError:
            return False
        return True

    def send(self, attempt: Attempt) -> NodeHandle | None:
        """Send both nodes their part. Returns the node that could not be reached, if any."""
        first, decode = attempt.first, attempt.decode
        assert first is not None and first.info is not None
        message = self._message(attempt, first)
        message.peer = decode.instance_id if decode else ""
        if not first.send(message):
            return first
        if decode is None:
            return None
        message.to, message.peer = decode.instance_id, first.instance_id
        message.peer_bootstrap = first.info.endpoints.bootstrap or ""
        return None if decode.send(message) else decode

    def send_together(self, attempts: Iterable[Attempt]) -> list[tuple[Attempt, NodeHandle]]:
        """Send each node its attempts in one message. That is one node, unless it began to drain.
        Returns those that could not be sent, each with its node."""
        by_node: dict[NodeHandle, list[Attempt]] = {}
        for attempt in attempts:
            assert attempt.first is not None and attempt.decode is None
            by_node.setdefault(attempt.first, []).append(attempt)
        unsent = []
        for node, found in by_node.items():
            requests = [self._message(attempt, node) for attempt in found]
            to, sender = node.instance_id, self._instance_id
            if not node.send(GenerateTogether(to=to, sender=sender, requests=requests)):
                unsent += [(attempt, node) for attempt in found]
        return unsent

    def _message(self, attempt: Attempt, node: NodeHandle) -> Generate:
        """The part of a node that needs no other."""
        generation, asked, job = attempt.generation, attempt.asked, attempt.generation.job
        ttft = 0.0
        if not generation.has_output:
            predicted = attempt.predicted
            ttft = self._router.ttft if predicted is None else predicted.objective
        return Generate(
            to=node.instance_id,
            sender=self._instance_id,
            rid=generation.spec.rid,
            room=attempt.room,
            token_ids=_memory(asked.token_ids),
            params=asked.params,
            produced=asked.produced,
            namespace=generation.spec.namespace,
            owner=job.owner[:_OWNER_CHARACTERS],
            priority=generation.spec.priority,
            timeout=job.timeout if attempt.history.is_first else job.time_left,
            ttft=ttft,
            waited=time.monotonic() - generation.created if ttft else 0.0,
        )

    def prompt_done(self, attempt: Attempt) -> None:
        """The first node has done its part: its queue is shorter, its death maybe no matter."""
        first = attempt.first
        assert first is not None
        self._uncount(attempt, first)
        if attempt.sent_load is not None:
            attempt.sent_load = attempt.sent_load.prompt_over()
        if not attempt.needs_first:
            first.active.pop(attempt, None)

    @staticmethod
    def _uncount(attempt: Attempt, first: NodeHandle) -> None:
        first.pending_tokens = max(0, first.pending_tokens - attempt.uncached_tokens)
        attempt.uncached_tokens = 0

    def abort(self, attempt: Attempt, reason: str, index: int | None = None) -> None:
        """Tell both nodes to end an attempt, or one of its choices."""
        for node in attempt.nodes:
            message = Abort(
                to=node.instance_id,
                sender=self._instance_id,
                room=attempt.room,
                index=index,
                reason=reason,
            )
            node.send(message)

    def close(self, attempt: Attempt) -> None:
        """Forget an attempt: what its nodes still send is ignored."""
        attempt.generation.attempts.remove(attempt)
        self._rooms.pop(attempt.room, None)
        if attempt.first is not None:
            self._uncount(attempt, attempt.first)
        if attempt.hand_off is not None:
            attempt.hand_off.ended(attempt)
        sent, generating = attempt.sent_load, attempt.decode or attempt.first
        if sent is not None and generating is not None:
            sent.prompt_over()
            generating.load.stream_sent(-sent.streams, -sent.tokens)
            attempt.sent_load = None
        for node in attempt.nodes:
            node.active.pop(attempt, None)
            node.breaker.ended(attempt)
            self._on_released(node)


def _usable(node: NodeHandle, cached: int, length: int) -> int:
    """Tokens that a node takes from its cache: whole pages, and never the last of the prompt."""
    assert node.info is not None
    return min(cached, (length - 1) // node.info.page_size * node.info.page_size)


def _memory(token_ids: IntArray) -> bytes:
    """The memory of token ids as a field of a message."""
    # NOTE: this is a view, which is copied only as the message is written. Fields of messages that
    # were read are bytes.
    return cast("bytes", np.ascontiguousarray(token_ids, "<i4").data)


def connection_lost(node: NodeHandle) -> NodeFailedError:
    """The error of an attempt that could not be sent."""
    return NodeFailedError(f"the connection to {node.role} node {node.instance_id} was lost")


def demand_of(attempt: Attempt) -> Demand:
    """The properties of an attempt by which its outcome is predicted."""
    generation, asked = attempt.generation, attempt.asked
    return Demand(
        Prompt(asked.token_ids, generation.spec.namespace),
        len(attempt.choices),
        asked.params.max_tokens - asked.produced,
        time.monotonic() - generation.created,
    )
