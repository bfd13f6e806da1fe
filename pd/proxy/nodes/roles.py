"""Moves the roles of elastic nodes to where the demand is.

A role is a preference: it decides where requests go by default. A move therefore takes effect with
the next request. Nothing drains, caches stay, and streams continue where they are.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd.core.node_info import Role
    from pd.proxy.nodes.node_handle import NodeHandle
    from pd.proxy.nodes.role_lease import DecisionLease

logger = logging.getLogger(__name__)

# The reason of a move must last this long, and no other move follows within the pause. A proxy that
# starts to decide also pauses, because the proxy before it may just have moved a node.
_HOLD_SECONDS = 10.0
_PAUSE_SECONDS = 30.0
# We average loads over about this time, because moments between bursts must not count as idle.
_AVERAGE_SECONDS = 3.0
# Queues from the first value on are too long, and below the second nearly empty, in seconds.
_LONG_QUEUE, _SHORT_QUEUE = 1.0, 0.1
# Decode nodes are full above the first share of their pace or memory, and idle below the second.
_FULL, _IDLE = 0.9, 0.5
# A role gives a node away only if the remaining ones stay below this share. Otherwise we would have
# to move it back.
_BUSY_AFTER = 0.8


class _RoleLoads(NamedTuple):
    """Average load of the nodes of each role over the last seconds.

    Attributes:
        queue: seconds for which prompts wait.
        prompts: share of time spent on prompts.
        decode: share of pace or memory used by answers, whichever is larger.
    """

    queue: float
    prompts: float
    decode: float

    def average_with(self, now: _RoleLoads, seconds: float) -> _RoleLoads:
        """Return the average after ``seconds`` with the new loads."""
        weight = math.exp(-seconds / _AVERAGE_SECONDS)
        return _RoleLoads(
            *(weight * old + (1 - weight) * new for old, new in zip(self, now, strict=True))
        )


@dataclass
class _State:
    """The nodes of one model.

    Attributes:
        loads: averages at time ``measured_at``; None if unknown for these roles.
        wanted: role that lacks nodes, if any, since ``since``.
        next: earliest time of the next move.
    """

    loads: _RoleLoads | None = None
    measured_at: float = 0.0
    wanted: Role | None = None
    since: float = 0.0
    next: float = 0.0

    def forget_loads(self) -> None:
        """Forget loads, because they say nothing about the current roles."""
        self.loads = self.wanted = None


class RoleBalancer:
    """Moves one role at a time, with hysteresis, while this proxy decides.

    It leaves alone roles set by an administrator. Runs on the event loop.

    Args:
        move: orders a node to prefer a role.
    """

    def __init__(
        self,
        nodes: Sequence[NodeHandle],
        lease: DecisionLease,
        move: Callable[[NodeHandle, Role], None],
    ) -> None:
        self._nodes, self._lease, self._move = nodes, lease, move
        self._states: dict[str, _State] = {}
        self._decides = False

    def rebalance_roles(self, now: float) -> None:
        """Move a role of each model if there was reason for long enough. ``now``: on the monotonic
        clock."""
        models = dict.fromkeys(node.info.model for node in self._nodes if node.info)
        self._states = {model: self._states.get(model, _State()) for model in models}
        begins = not self._decides
        self._decides = self._lease.is_decider()
        for model, state in self._states.items():
            if not self._decides:
                state.forget_loads()
                continue
            if begins:
                state.next = now + _PAUSE_SECONDS
            self._rebalance_model(model, state, now)

    def _rebalance_model(self, model: str, state: _State, now: float) -> None:
        prefill, decode = self._nodes_of(model, "prefill"), self._nodes_of(model, "decode")
        if not prefill or not decode:
            state.forget_loads()
            return
        loads = _RoleLoads(
            sum(node.load.queue_seconds for node in prefill) / len(prefill),
            sum(_prompt_share(node) for node in prefill) / len(prefill),
            sum(_decode_share(node) for node in decode) / len(decode),
        )
        if state.loads is not None:
            loads = state.loads.average_with(loads, now - state.measured_at)
        state.loads, state.measured_at = loads, now
        wanted = self._find_lacking_role(loads, len(prefill), len(decode))
        if wanted != state.wanted:
            state.wanted, state.since = wanted, now
        if wanted is None or now < max(state.since + _HOLD_SECONDS, state.next):
            return
        others = decode if wanted == "prefill" else prefill
        givers = [w for w in others if self._lease.has_lease(w) and not w.role_is_fixed]
        if not givers:
            return
        # The node with the least work loses least.
        work = [(node.load.decoding.streams, node.load.queue_seconds) for node in givers]
        chosen = givers[work.index(min(work))]
        logger.info(
            "%s node %s is a %s node from now on: prompts wait for %.2f s on average, and decode "
            "nodes are at %.0f %% of their pace or memory",
            *(chosen.role, chosen.url, wanted, loads.queue, 100 * loads.decode),
        )
        self._move(chosen, wanted)
        state.next = now + _PAUSE_SECONDS
        state.forget_loads()

    def _nodes_of(self, model: str, role: Role) -> list[NodeHandle]:
        return [
            node
            for node in self._nodes
            if node.role == role and node.is_ready and node.load.reported is not None
            if node.info is not None and node.info.model == model
        ]

    @staticmethod
    def _find_lacking_role(loads: _RoleLoads, prefill: int, decode: int) -> Role | None:
        """Return the role that lacks nodes while the other role could spare one."""
        if loads.queue > _LONG_QUEUE and loads.decode < _IDLE and decode > 1:
            return "prefill" if loads.decode * decode / (decode - 1) < _BUSY_AFTER else None
        if loads.decode > _FULL and loads.queue < _SHORT_QUEUE and prefill > 1:
            return "decode" if loads.prompts * prefill / (prefill - 1) < _BUSY_AFTER else None
        return None


def _prompt_share(node: NodeHandle) -> float:
    report = node.load.reported
    assert report is not None
    return report.prompt_share


def _decode_share(node: NodeHandle) -> float:
    report = node.load.reported
    assert report is not None and node.info is not None
    pace = report.cost.predict_seconds(node.load.decoding) / report.itl if report.streams else 0.0
    return max(pace, 1 - max(0, node.load.free_tokens) / node.info.pool_tokens)
