"""Policies for choosing among nodes of one role."""

from __future__ import annotations

import math
import random
from itertools import count
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from pd.core.errors import UsageError
from pd.proxy.nodes.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd.proxy.nodes.node_handle import NodeHandle
    from pd.proxy.routing.demand import Prompt

# How much longer a prefill node's queue may be, in addition to the tokens saved by its prefix.
IMBALANCE_TOKENS = 4096
# How many more requests a decode node may have. Its prefix saves only transfer.
IMBALANCE_REQUESTS = 4
IMBALANCE_SHARE = 1.25


class RouteChoice(NamedTuple):
    """A node and the reason for choosing it, which is a label of metrics."""

    node: NodeHandle
    reason: str


class Policy(Protocol):
    """Chooses among nodes able to serve the request. The list is never empty.

    Attributes:
        ignores_prompts: :meth:`note_computed` does nothing, so callers need not build prompts with
            answers for it.
    """

    ignores_prompts: ClassVar[bool]

    def choose_prefill(self, nodes: Sequence[NodeHandle], prompt: Prompt) -> RouteChoice: ...

    def choose_decode(self, nodes: Sequence[NodeHandle], prompt: Prompt) -> RouteChoice: ...

    def note_computed(self, node: NodeHandle, prompt: Prompt) -> None:
        """Note that the node holds the KV of these tokens, or soon will."""


class _IgnoresPrompt:
    """Base class of policies that ignore the prompt."""

    ignores_prompts: ClassVar[bool] = True
    reason: str

    def choose_prefill(self, nodes: Sequence[NodeHandle], prompt: Prompt) -> RouteChoice:
        return RouteChoice(self._pick_node(nodes, _prefill_load), self.reason)

    def choose_decode(self, nodes: Sequence[NodeHandle], prompt: Prompt) -> RouteChoice:
        return RouteChoice(self._pick_node(nodes, _decode_load), self.reason)

    def note_computed(self, node: NodeHandle, prompt: Prompt) -> None:
        pass

    def _pick_node(
        self, nodes: Sequence[NodeHandle], load: Callable[[NodeHandle], int]
    ) -> NodeHandle:
        raise NotImplementedError


def _prefill_load(node: NodeHandle) -> int:
    return node.prefill_load


def _decode_load(node: NodeHandle) -> int:
    return node.decode_load


class RoundRobin(_IgnoresPrompt):
    """Takes turns. When pairs begin to repeat, decode nodes skip one turn, because every prefill
    node should meet every decode node."""

    reason = "round_robin"

    def __init__(self) -> None:
        self._prefill_turns, self._decode_turns = count(), count()
        self._num_prefill = 1

    def choose_prefill(self, nodes: Sequence[NodeHandle], prompt: Prompt) -> RouteChoice:
        self._num_prefill = len(nodes)
        return RouteChoice(nodes[next(self._prefill_turns) % len(nodes)], self.reason)

    def choose_decode(self, nodes: Sequence[NodeHandle], prompt: Prompt) -> RouteChoice:
        turn = next(self._decode_turns)
        repeats = turn // math.lcm(self._num_prefill, len(nodes))
        return RouteChoice(nodes[(turn + repeats) % len(nodes)], self.reason)


class Random(_IgnoresPrompt):
    """Chooses each node with the same probability."""

    reason = "random"

    def _pick_node(
        self, nodes: Sequence[NodeHandle], load: Callable[[NodeHandle], int]
    ) -> NodeHandle:
        return random.choice(nodes)


class PowerOfTwo(_IgnoresPrompt):
    """Draws two nodes at random and takes the less loaded one (Mitzenmacher, 2001)."""

    reason = "power_of_two"

    def _pick_node(
        self, nodes: Sequence[NodeHandle], load: Callable[[NodeHandle], int]
    ) -> NodeHandle:
        return min(random.sample(nodes, min(2, len(nodes))), key=load)


class CacheAware:
    """Chooses the node with the longest cached prefix, or the least loaded one if loads differ
    much."""

    ignores_prompts: ClassVar[bool] = False

    def choose_prefill(self, nodes: Sequence[NodeHandle], prompt: Prompt) -> RouteChoice:
        longest, least = _find_extremes(nodes, prompt, _prefill_load)
        excess = longest.node.prefill_load - least.node.prefill_load
        saved = longest.matched - least.matched
        if longest.matched and excess <= saved + IMBALANCE_TOKENS:
            return RouteChoice(longest.node, "prefix")
        return RouteChoice(least.node, "load")

    def choose_decode(self, nodes: Sequence[NodeHandle], prompt: Prompt) -> RouteChoice:
        longest, least = _find_extremes(nodes, prompt, _decode_load)
        limit = least.node.decode_load * IMBALANCE_SHARE + IMBALANCE_REQUESTS
        if longest.matched and longest.node.decode_load <= limit:
            return RouteChoice(longest.node, "prefix")
        return RouteChoice(least.node, "load")

    def note_computed(self, node: NodeHandle, prompt: Prompt) -> None:
        if node.tree is None and node.info is not None:
            node.tree = PrefixTree(node.info.page_size, node.info.pool_tokens)
        if node.tree is not None:
            node.tree.add_tokens(prompt.token_ids, prompt.namespace, prompt.data)


class _Matched(NamedTuple):
    """A node and its presumable number of cached leading tokens."""

    node: NodeHandle
    matched: int


def _find_extremes(
    nodes: Sequence[NodeHandle], prompt: Prompt, load: Callable[[NodeHandle], int]
) -> tuple[_Matched, _Matched]:
    """Return the node with the longest match and the one with the least load.

    Among equals, we take the node with the fewest cached tokens, because different prompts should
    use all caches.
    """

    def count_cached(node: NodeHandle) -> int:
        return node.tree.num_tokens if node.tree else 0

    candidates = [_Matched(node, node.cached_tokens(prompt)) for node in nodes]
    longest = max(candidates, key=lambda f: (f.matched, -load(f.node)))
    least = min(candidates, key=lambda f: (load(f.node), -f.matched, count_cached(f.node)))
    return longest, least


_POLICIES: dict[str, type[Policy]] = {
    "cache_aware": CacheAware,
    "round_robin": RoundRobin,
    "random": Random,
    "power_of_two": PowerOfTwo,
}


def make_policy(name: str) -> Policy:
    """Make the policy with this name. Raises UsageError for unknown names."""
    if name not in _POLICIES:
        raise UsageError(f"unknown policy {name!r}; choose one of {', '.join(_POLICIES)}")
    return _POLICIES[name]()
