"""Sends attempts to nodes, and tracks them until they end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np

from pd.core.errors import NodeFailedError, UnavailableError
from pd.core.messages import Abort, Generate, GenerateTogether
from pd.proxy.dispatch.leased_prompts import LeasedPrompts
from pd.proxy.routing.demand import Demand, Prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy.typing as npt

    from pd.proxy.dispatch.attempt import Attempt
    from pd.proxy.dispatch.proxy_metrics import Metrics
    from pd.proxy.nodes.node_handle import NodeHandle
    from pd.proxy.routing.routing import Route, Router

    IntArray = npt.NDArray[np.int32]

# We send nodes only this much of a key's hash, which is enough to distinguish keys.
_OWNER_CHARACTERS = 16


class Attempts:
    """The attempts on nodes, by room. Runs on the event loop.

    Args:
        on_released: called with each node no longer needed by an attempt.
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
        self._leased_prompts = LeasedPrompts(instance_id)

    def get_attempt(self, room: bytes) -> Attempt | None:
        """Return the attempt in this room, if it is under way."""
        return self._rooms.get(room)

    def place_attempt(
        self,
        attempt: Attempt,
        preferred: NodeHandle | None = None,
        occupied: frozenset[NodeHandle] = frozenset(),
    ) -> bool:
        """Choose nodes for an attempt. The caller sends it.

        Returns False if the only nodes are occupied. Raises UnavailableError without nodes.

        Args:
            preferred: node to prefill if it can.
            occupied: nodes the attempt must not use now.
        """
        demand = make_demand(attempt)
        route = self._choose_route(attempt, demand, preferred, occupied)
        if route.first_node in occupied or route.decode_node in occupied:
            return False
        self._assign_nodes(attempt, route, demand)
        return True

    def place_on_route(self, attempt: Attempt, route: Route) -> None:
        """Assign nodes to an attempt. The caller sends it."""
        self._assign_nodes(attempt, route, make_demand(attempt))

    def _assign_nodes(self, attempt: Attempt, route: Route, demand: Demand) -> None:
        generation = attempt.generation
        attempt.first_node, attempt.decode_node = route.first_node, route.decode_node
        attempt.predicted = route.predicted
        if route.decode_node is not None:
            attempt.hand_off = route.first_node.get_hand_off(route.decode_node)
            if attempt.hand_off is not None:
                attempt.hand_off.begin_attempt(attempt)
        generation.holder = route.decode_node or route.first_node
        generation.begun_on = generation.begun_on or route.first_node.info
        cached = route.first_node.cached_tokens(demand.prompt)
        attempt.uncached_tokens = len(attempt.token_ids) - cached
        route.first_node.pending_tokens += attempt.uncached_tokens
        self._rooms[attempt.room] = attempt
        if not attempt.history.losses and generation.spec.params.prompt_logprobs_start is None:
            generation.predicted_cached = _count_usable(
                route.first_node, cached, len(attempt.token_ids)
            )
        if route.predicted is not None and not attempt.history.losses:
            generation.predicted_ttft = demand.waited + route.predicted.ttft
        attempt.sent_load = route.add_load(demand)
        for node, reason in route.reasons:
            node.active[attempt] = None
            node.breaker.begin_attempt(attempt)
            self._metrics.routing.labels(node.role, reason).inc()
            self._router.policy.note_computed(node, demand.prompt)

    def _choose_route(
        self,
        attempt: Attempt,
        demand: Demand,
        preferred: NodeHandle | None = None,
        occupied: frozenset[NodeHandle] = frozenset(),
    ) -> Route:
        """Choose nodes for an attempt. Raises like
        :meth:`pd.proxy.routing.routing.Router.choose_route`."""
        return self._choose_reachable(
            lambda: self._choose_nodes(attempt, demand, preferred, occupied)
        )

    def _choose_reachable(self, choose: Callable[[], Route]) -> Route:
        """Choose nodes until we are connected to all chosen ones.

        This notices a node that just died before its heartbeats are missed.
        """
        while True:
            route = choose()
            nodes = [node for node in (route.first_node, route.decode_node) if node is not None]
            if all([node.can_be_reached(self._instance_id) for node in nodes]):
                return route

    def _choose_nodes(
        self,
        attempt: Attempt,
        demand: Demand,
        preferred: NodeHandle | None,
        occupied: frozenset[NodeHandle],
    ) -> Route:
        model, history = attempt.generation.spec.model, attempt.history
        avoided, like = history.avoided | occupied, attempt.generation.begun_on
        try:
            return self._router.choose_route(
                model, demand, preferred=preferred, avoided=avoided, apart=history.apart, like=like
            )
        except UnavailableError:
            if not attempt.produced:
                raise
        return self._router.choose_alone(model, demand, avoided, like)

    def has_nodes_for(self, attempt: Attempt) -> bool:
        """Whether there are nodes for an attempt, or for its successors."""
        demand = make_demand(attempt)
        try:
            self._choose_route(attempt, demand)
        except UnavailableError:
            return self._could_resume_alone(attempt, demand)
        return True

    def could_resume_alone(self, attempt: Attempt) -> bool:
        """Whether a decode node could continue alone after the known tokens, because no node of
        another role can."""
        return self._could_resume_alone(attempt, make_demand(attempt))

    def _could_resume_alone(self, attempt: Attempt, demand: Demand) -> bool:
        if not all(choice.output_ids for choice in attempt.choices if choice.finish is None):
            return False
        generation, avoided = attempt.generation, attempt.history.avoided
        model, like = generation.spec.model, generation.begun_on
        try:
            self._choose_reachable(lambda: self._router.choose_alone(model, demand, avoided, like))
        except UnavailableError:
            return False
        return True

    def send_attempt(self, attempt: Attempt) -> NodeHandle | None:
        """Send each node its part. Return the node we could not reach, if any."""
        first, decode = attempt.first_node, attempt.decode_node
        assert first is not None and first.info is not None
        message = self._make_message(attempt, first)
        if decode is None:
            return None if first.send_message(message) else first
        if not first.send_message(msgspec.structs.replace(message, peer=decode.instance_id)):
            return first
        message_to_decode = msgspec.structs.replace(
            message,
            to=decode.instance_id,
            peer=first.instance_id,
            peer_bootstrap=first.info.endpoints.bootstrap or "",
        )
        return None if decode.send_message(message_to_decode) else decode

    def send_batch(self, attempts: Iterable[Attempt]) -> list[tuple[Attempt, NodeHandle]]:
        """Send each node its attempts in one message. There is only one node, unless it began to
        drain.

        Return the unsent attempts, each with its node.
        """
        by_node: dict[NodeHandle, list[Attempt]] = {}
        for attempt in attempts:
            assert attempt.first_node is not None and attempt.decode_node is None
            by_node.setdefault(attempt.first_node, []).append(attempt)
        unsent = []
        for node, node_attempts in by_node.items():
            requests = [self._make_message(attempt, node) for attempt in node_attempts]
            to, sender = node.instance_id, self._instance_id
            if not node.send_message(GenerateTogether(to=to, sender=sender, requests=requests)):
                unsent += [(attempt, node) for attempt in node_attempts]
        return unsent

    def _make_message(self, attempt: Attempt, node: NodeHandle) -> Generate:
        """Make the message for a node, without the fields about its partner."""
        generation, job = attempt.generation, attempt.generation.job
        owner, spec = job.owner[:_OWNER_CHARACTERS], generation.spec
        if spec.prefix_lease:
            self._leased_prompts.note_prompt(owner, spec.rid, job.rid, node, spec.prefix_lease)
        ttft = 0.0
        if not generation.has_output:
            predicted = attempt.predicted
            ttft = self._router.ttft if predicted is None else predicted.objective
        return Generate(
            to=node.instance_id,
            sender=self._instance_id,
            rid=spec.rid,
            room=attempt.room,
            token_ids=_view_bytes(attempt.token_ids),
            params=attempt.params,
            produced=attempt.produced,
            namespace=spec.namespace,
            owner=owner,
            priority=spec.priority,
            prefix_lease=spec.prefix_lease,
            timeout=job.timeout if attempt.history.is_first else job.time_left,
            ttft=ttft,
            waited=time.monotonic() - generation.created if ttft else 0.0,
        )

    def end_prompt(self, attempt: Attempt) -> None:
        """Note the end of the prefill: the queue is shorter, and we may no longer need the first
        node."""
        first = attempt.first_node
        assert first is not None
        self._remove_pending(attempt, first)
        if attempt.sent_load is not None:
            attempt.sent_load = attempt.sent_load.end_prompt()
        if not attempt.needs_first_node:
            first.active.pop(attempt, None)

    @staticmethod
    def _remove_pending(attempt: Attempt, first: NodeHandle) -> None:
        first.pending_tokens = max(0, first.pending_tokens - attempt.uncached_tokens)
        attempt.uncached_tokens = 0

    def abort_attempt(self, attempt: Attempt, reason: str, index: int | None = None) -> None:
        """Tell both nodes to end an attempt or one of its choices."""
        for node in attempt.nodes:
            message = Abort(
                to=node.instance_id,
                sender=self._instance_id,
                room=attempt.room,
                index=index,
                reason=reason,
            )
            node.send_message(message)

    def end_prefix_leases(self, owner: str | None = None, rid: str | None = None) -> int:
        """End the prefix leases of a request, or of all, of one owner or (None) of any.

        Return the number of prompts.
        """
        owner = None if owner is None else owner[:_OWNER_CHARACTERS]
        return self._leased_prompts.end_leases(owner, rid)

    def close_attempt(self, attempt: Attempt) -> None:
        """Forget an attempt. We ignore later messages of its nodes."""
        attempt.generation.attempts.remove(attempt)
        self._rooms.pop(attempt.room, None)
        if attempt.first_node is not None:
            self._remove_pending(attempt, attempt.first_node)
        if attempt.hand_off is not None:
            attempt.hand_off.end_attempt(attempt)
        sent, generating = attempt.sent_load, attempt.decode_node or attempt.first_node
        if sent is not None and generating is not None:
            sent.end_prompt()
            generating.load.add_streams(-sent.streams, -sent.tokens)
            attempt.sent_load = None
        for node in attempt.nodes:
            node.active.pop(attempt, None)
            node.breaker.end_attempt(attempt)
            self._on_released(node)


def _count_usable(node: NodeHandle, cached: int, length: int) -> int:
    """Count the cached tokens a node can use: whole pages, but never the last token."""
    assert node.info is not None
    return min(cached, (length - 1) // node.info.page_size * node.info.page_size)


def _view_bytes(token_ids: IntArray) -> bytes:
    """Return the memory of token ids as a field of a message."""
    # NOTE: this is a view, copied only when the message is encoded. In received messages, the field
    # holds bytes.
    return cast("bytes", np.ascontiguousarray(token_ids, "<i4").data)


def list_active(node: NodeHandle) -> list[Attempt]:
    """List the attempts that need a node. Only :class:`Attempts` adds them, so the node itself does
    not know their type."""
    return cast("list[Attempt]", list(node.active))


def make_connection_error(node: NodeHandle) -> NodeFailedError:
    """Make the error for an attempt we could not send."""
    return NodeFailedError(f"the connection to {node.role} node {node.instance_id} was lost")


def make_demand(attempt: Attempt) -> Demand:
    """Describe an attempt for routing."""
    generation = attempt.generation
    return Demand(
        Prompt(attempt.token_ids, generation.spec.namespace),
        len(attempt.choices),
        attempt.params.max_tokens - attempt.produced,
        time.monotonic() - generation.created,
    )
