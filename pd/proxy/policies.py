"""Policies that pick among nodes of one role, and the properties of a prompt by which they do."""

from __future__ import annotations

import math
import random
from itertools import count
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import numpy as np

from pd.core.errors import UsageError
from pd.proxy.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from pd.proxy.node_handle import NodeHandle

    IntArray = npt.NDArray[np.int32]

# How much longer a prefill node's queue may be, beyond what its cached prefix saves, before the
# prefix is given up for a shorter queue.
IMBALANCE_TOKENS = 4096
# How many more requests a decode node may have before its cached prefix, which saves only transfer,
# is given up.
IMBALANCE_REQUESTS = 4
IMBALANCE_SHARE = 1.25


class Prompt:
    """The properties of a prompt by which routing chooses.

    Attributes:
        token_ids: int32 ``[n]``, which nobody changes any more.
        namespace: separates cached prefixes.
    """

    __slots__ = ("_data", "namespace", "token_ids")

    def __init__(self, token_ids: IntArray, namespace: str) -> None:
        self.token_ids = token_ids
        self.namespace = namespace
        self._data: bytes | None = None

    @property
    def data(self) -> bytes:
        """Memory of the token ids, in which the prefixes of every node are looked for.

        A long prompt has some hundred kilobytes. They are copied when a node's prefixes are asked
        for the first time, and not at all where no node has any.
        """
        if self._data is None:
            self._data = self.token_ids.tobytes()
        return self._data

    def followed_by(self, output_ids: Sequence[int]) -> Prompt:
        """The prompt with tokens of output behind it. The prompt is copied once."""
        output = np.array(output_ids, dtype=np.int32)
        data = b"".join([np.ascontiguousarray(self.token_ids).data, output.data])
        extended = Prompt(np.frombuffer(data, np.int32), self.namespace)
        extended._data = data
        return extended


class RouteChoice(NamedTuple):
    """A node and why it was chosen (a label of the metrics)."""

    node: NodeHandle
    reason: str


class Policy(Protocol):
    """Picks among nodes that can all serve the request (never an empty list).

    Attributes:
        ignores_prompts: whether :meth:`computed` does nothing, so that no prompt with its answer
            has to be put together for it.
    """

    ignores_prompts: ClassVar[bool]

    def prefill(self, nodes: Sequence[NodeHandle], prompt: Prompt) -> RouteChoice: ...

    def decode(self, nodes: Sequence[NodeHandle], prompt: Prompt) -> RouteChoice: ...

    def computed(self, node: NodeHandle, prompt: Prompt) -> None:
        """The node holds (or is about to hold) the KV of these tokens."""


class _IgnoresPrompt:
    """Base of the policies that do not look at the prompt."""

    ignores_prompts: ClassVar[bool] = True
    reason: str

    def prefill(self, nodes: Sequence[NodeHandle], prompt: Prompt) -> RouteChoice:
        return RouteChoice(self._pick(nodes, _prefill_load), self.reason)

    def decode(self, nodes: Sequence[NodeHandle], prompt: Prompt) -> RouteChoice:
        return RouteChoice(self._pick(nodes, _decode_load), self.reason)

    def computed(self, node: NodeHandle, prompt: Prompt) -> None:
        pass

    def _pick(self, nodes: Sequence[NodeHandle], load: Callable[[NodeHandle], int]) -> NodeHandle:
        raise NotImplementedError


def _prefill_load(node: NodeHandle) -> int:
    return node.prefill_load


def _decode_load(node: NodeHandle) -> int:
    return node.decode_load


class RoundRobin(_IgnoresPrompt):
    """Chooses one after the other. When pairs begin to repeat, decode nodes go one further, so that
    every prefill node meets every decode node."""

    reason = "round_robin"

    def __init__(self) -> None:
        self._prefill_turns, self._decode_turns = count(), count()
        self._num_prefill = 1

    def prefill(self, nodes: Sequence[NodeHandle], prompt: Prompt) -> RouteChoice:
        self._num_prefill = len(nodes)
        return RouteChoice(nodes[next(self._prefill_turns) % len(nodes)], self.reason)

    def decode(self, nodes: Sequence[NodeHandle], prompt: Prompt) -> RouteChoice:
        turn = next(self._decode_turns)
        repeats = turn // math.lcm(self._num_prefill, len(nodes))
        return RouteChoice(nodes[(turn + repeats) % len(nodes)], self.reason)


class Random(_IgnoresPrompt):
    """Chooses each node with the same probability."""

    reason = "random"

    def _pick(self, nodes: Sequence[NodeHandle], load: Callable[[NodeHandle], int]) -> NodeHandle:
        return random.choice(nodes)


class PowerOfTwo(_IgnoresPrompt):
    """Chooses the less loaded of two nodes that are drawn at random (Mitzenmacher, 2001)."""

    reason = "power_of_two"

    def _pick(self, nodes: Sequence[NodeHandle], load: Callable[[NodeHandle], int]) -> NodeHandle:
        return min(random.sample(nodes, min(2, len(nodes))), key=load)


class CacheAware:
    """Chooses the node with the longest cached prefix, or the least loaded one when loads differ
    much."""

    ignores_prompts: ClassVar[bool] = False

    def prefill(self, nodes: Sequence[NodeHandle], prompt: Prompt) -> RouteChoice:
        longest, least = _extremes(nodes, prompt, _prefill_load)
        excess = longest.node.prefill_load - least.node.prefill_load
        saved = longest.matched - least.matched
        if longest.matched and excess <= saved + IMBALANCE_TOKENS:
            return RouteChoice(longest.node, "prefix")
        return RouteChoice(least.node, "load")

    def decode(self, nodes: Sequence[NodeHandle], prompt: Prompt) -> RouteChoice:
        longest, least = _extremes(nodes, prompt, _decode_load)
        limit = least.node.decode_load * IMBALANCE_SHARE + IMBALANCE_REQUESTS
        if longest.matched and longest.node.decode_load <= limit:
            return RouteChoice(longest.node, "prefix")
        return RouteChoice(least.node, "load")

    def computed(self, node: NodeHandle, prompt: Prompt) -> None:
        if node.tree is None and node.info is not None:
            node.tree = PrefixTree(node.info.page_size, node.info.pool_tokens)
        if node.tree is not None:
            node.tree.insert(prompt.token_ids, prompt.namespace, prompt.data)


class _Matched(NamedTuple):
    """A node and how many leading tokens of the prompt it presumably holds."""

    node: NodeHandle
    matched: int


def _extremes(
    nodes: Sequence[NodeHandle], prompt: Prompt, load: Callable[[NodeHandle], int]
) -> tuple[_Matched, _Matched]:
    """The node with the longest match and the one with the least load.

    Among nodes of equal load and match, the one whose cache holds fewest tokens is taken, so that
    different prompts use all caches.
    """

    def held(node: NodeHandle) -> int:
        return node.tree.num_tokens if node.tree else 0

    found = [_Matched(node, node.cached_tokens(prompt)) for node in nodes]
    longest = max(found, key=lambda f: (f.matched, -load(f.node)))
    least = min(found, key=lambda f: (load(f.node), -f.matched, held(f.node)))
    return longest, least


_POLICIES: dict[str, type[Policy]] = {
    "cache_aware": CacheAware,
    "round_robin": RoundRobin,
    "random": Random,
    "power_of_two": PowerOfTwo,
}


def make_policy(name: str) -> Policy:
    """Make the policy with this name. Raises UsageError for an unknown name."""
    if name not in _POLICIES:
        raise UsageError(f"unknown policy {name!r}; choose one of {', '.join(_POLICIES)}")
    return _POLICIES[name]()
