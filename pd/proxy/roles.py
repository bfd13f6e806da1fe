"""Moves the roles of elastic nodes to where the demand is.

A role is a preference: it decides where requests go as long as nothing speaks against it. So a move
takes effect with the next request; nothing drains, caches stay, and streams go on where they are.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd.core.node_info import Role
    from pd.proxy.node_handle import NodeHandle
    from pd.proxy.role_lease import DecisionLease

logger = logging.getLogger(__name__)

# A move needs its reason to last so long, and none follows within the pause. Another proxy that
# decided before may have moved a node just now, so a proxy that begins to decide pauses, too.
_HOLD_SECONDS = 10.0
_PAUSE_SECONDS = 30.0
# Loads are averaged over about so long, lest the moments between bursts count as no demand.
_AVERAGE_SECONDS = 3.0
# Prompts wait too long from the first value on, and hardly below the second, in seconds.
_LONG_QUEUE, _SHORT_QUEUE = 1.0, 0.1
# Decode nodes are full from the first share of their pace or memory on, and idle below the second.
_FULL, _IDLE = 0.9, 0.5
# Nodes that keep a role would not be as busy as this without one of them, or it would be called
# back.
_BUSY_AFTER = 0.8


class _RoleLoads(NamedTuple):
    """Load of the nodes of each role, on average over the nodes and the last seconds.

    Attributes:
        queue: seconds for which prompts wait.
        prompts: share of their time that prompts take.
        decode: share of their pace or memory, whichever is more, that answers take.
    """

    queue: float
    prompts: float
    decode: float

    def followed_by(self, now: _RoleLoads, seconds: float) -> _RoleLoads:
        """The average when, so many seconds later, the loads are these."""
        weight = math.exp(-seconds / _AVERAGE_SECONDS)
        return _RoleLoads(
            *(weight * old + (1 - weight) * new for old, new in zip(self, now, strict=True))
        )


@dataclass
class _State:
    """The nodes of one model.

    Attributes:
        loads: as they were at the time ``looked``; None where that is not known for these roles.
        wanted: role that the nodes lack, if any, and that ``since``.
        next: nothing moves before.
    """

    loads: _RoleLoads | None = None
    looked: float = 0.0
    wanted: Role | None = None
    since: float = 0.0
    next: float = 0.0

    def forget(self) -> None:
        """Forget loads, which say nothing of the roles that nodes have now."""
        self.loads = self.wanted = None


class RoleBalancer:
    """Looks at the reports of nodes and moves one role at a time, with hysteresis, while this proxy
    is the one that decides. A role that an administrator set is left alone. Everything runs on the
    event loop.

    Args:
        move: sends a node the order to prefer a role.
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

    def look(self, now: float) -> None:
        """Move a role of each model if that was called for long enough. ``now``: on the monotonic
        clock."""
        models = dict.fromkeys(node.info.model for node in self._nodes if node.info)
        self._states = {model: self._states.get(model, _State()) for model in models}
        begins = not self._decides
        self._decides = self._lease.decides()
        for model, state in self._states.items():
            if not self._decides:
                state.forget()
                continue
            if begins:
                state.next = now + _PAUSE_SECONDS
            self._look(model, state, now)

    def _look(self, model: str, state: _State, now: float) -> None:
        prefill, decode = self._nodes_of(model, "prefill"), self._nodes_of(model, "decode")
        if not prefill or not decode:
            state.forget()
            return
        loads = _RoleLoads(
            sum(node.load.queue_seconds for node in prefill) / len(prefill),
            sum(_prompt_share(node) for node in prefill) / len(prefill),
            sum(_decode_share(node) for node in decode) / len(decode),
        )
        if state.loads is not None:
            loads = state.loads.followed_by(loads, now - state.looked)
        state.loads, state.looked = loads, now
        wanted = self._lacking(loads, len(prefill), len(decode))
        if wanted != state.wanted:
            state.wanted, state.since = wanted, now
        if wanted is None or now < max(state.since + _HOLD_SECONDS, state.next):
            return
        others = decode if wanted == "prefill" else prefill
        givers = [w for w in others if self._lease.has(w) and not w.role_is_fixed]
        if not givers:
            return
        chosen = min(givers, key=_effort)
        logger.info(
            "%s node %s is a %s node from now on: prompts wait for %.2f s on average, and decode "
            "nodes are at %.0f %% of their pace or memory",
            *(chosen.role, chosen.url, wanted, loads.queue, 100 * loads.decode),
        )
        self._move(chosen, wanted)
        state.next = now + _PAUSE_SECONDS
        state.forget()

    def _nodes_of(self, model: str, role: Role) -> list[NodeHandle]:
        return [
            node
            for node in self._nodes
            if node.role == role and node.ready and node.load.reported is not None
            if node.info is not None and node.info.model == model
        ]

    @staticmethod
    def _lacking(loads: _RoleLoads, prefill: int, decode: int) -> Role | None:
        """The role that lacks nodes while one of the other's is not needed there. There are so many
        nodes of each."""
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
    pace = report.cost.seconds(node.load.decoding) / report.itl if report.streams else 0.0
    return max(pace, 1 - max(0, node.load.free_tokens) / node.info.pool_tokens)


def _effort(node: NodeHandle) -> tuple[int, float]:
    """Return a node's present work in the role that it would lose: streams, seconds of prompts."""
    return node.load.decoding.streams, node.load.queue_seconds
