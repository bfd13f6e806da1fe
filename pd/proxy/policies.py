"""Policies that pick among nodes of one role, and the properties of a prompt by which they do."""

from __future__ import annotations

import math
import random
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pd.core.errors import UsageError
from pd.proxy.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from pd.proxy.worker import Worker

    IntArray = npt.NDArray[np.int32]

# How much longer a prefill node's queue may be, beyond what its cached prefix saves, before the
# prefix is given up for a shorter queue.
IMBALANCE_TOKENS = 4096
# How many more requests a decode node may have before its cached prefix, which saves only transfer,
# is given up.
IMBALANCE_REQUESTS = 4
IMBALANCE_SHARE = 1.25


class _Properties(NamedTuple):
    token_ids: IntArray
    namespace: str
    data: bytes


class Prompt(_Properties):
    """The properties of a prompt by which routing chooses.

    Attributes:
        data: memory of the token ids, in which the prefixes of every node are looked for. It is
            copied once, since a long prompt has some hundred kilobytes.
    """

    __slots__ = ()

    def __new__(cls, token_ids: IntArray, namespace: str) -> Prompt:
        return super().__new__(cls, token_ids, namespace, token_ids.tobytes())


class RouteChoice(NamedTuple):
    """A worker and why it was chosen (a label of the metrics)."""

    worker: Worker
    reason: str


class Policy(Protocol):
    """Picks among workers that can all serve the request (never an empty list)."""

    def prefill(self, workers: Sequence[Worker], prompt: Prompt) -> RouteChoice: ...

    def decode(self, workers: Sequence[Worker], prompt: Prompt) -> RouteChoice: ...

    def computed(self, worker: Worker, prompt: Prompt) -> None:
        """The worker holds (or is about to hold) the KV of these tokens."""


class _IgnoresPrompt:
    """Base of the policies that do not look at the prompt."""

    reason: str

    def prefill(self, workers: Sequence[Worker], prompt: Prompt) -> RouteChoice:
        return RouteChoice(self._pick(workers, _prefill_load), self.reason)

    def decode(self, workers: Sequence[Worker], prompt: Prompt) -> RouteChoice:
        return RouteChoice(self._pick(workers, _decode_load), self.reason)

    def computed(self, worker: Worker, prompt: Prompt) -> None:
        pass

    def _pick(self, workers: Sequence[Worker], load: Callable[[Worker], int]) -> Worker:
        raise NotImplementedError


def _prefill_load(worker: Worker) -> int:
    return worker.prefill_load


def _decode_load(worker: Worker) -> int:
    return worker.decode_load


class RoundRobin(_IgnoresPrompt):
    """Chooses one after the other. When pairs begin to repeat, decode nodes go one further, so that
    every prefill node meets every decode node."""

    reason = "round_robin"

    def __init__(self) -> None:
        self._prefill_turns, self._decode_turns = count(), count()
        self._num_prefill = 1

    def prefill(self, workers: Sequence[Worker], prompt: Prompt) -> RouteChoice:
        self._num_prefill = len(workers)
        return RouteChoice(workers[next(self._prefill_turns) % len(workers)], self.reason)

    def decode(self, workers: Sequence[Worker], prompt: Prompt) -> RouteChoice:
        turn = next(self._decode_turns)
        repeats = turn // math.lcm(self._num_prefill, len(workers))
        return RouteChoice(workers[(turn + repeats) % len(workers)], self.reason)


class Random(_IgnoresPrompt):
    """Chooses each worker with the same probability."""

    reason = "random"

    def _pick(self, workers: Sequence[Worker], load: Callable[[Worker], int]) -> Worker:
        return random.choice(workers)


class PowerOfTwo(_IgnoresPrompt):
    """Chooses the less loaded of two workers that are drawn at random (Mitzenmacher, 2001)."""

    reason = "power_of_two"

    def _pick(self, workers: Sequence[Worker], load: Callable[[Worker], int]) -> Worker:
        return min(random.sample(workers, min(2, len(workers))), key=load)


class CacheAware:
    """Chooses the node with the longest cached prefix, or the least loaded one when loads differ
    much."""

    def prefill(self, workers: Sequence[Worker], prompt: Prompt) -> RouteChoice:
        longest, least = _extremes(workers, prompt, _prefill_load)
        excess = longest.worker.prefill_load - least.worker.prefill_load
        saved = longest.matched - least.matched
        if longest.matched and excess <= saved + IMBALANCE_TOKENS:
            return RouteChoice(longest.worker, "prefix")
        return RouteChoice(least.worker, "load")

    def decode(self, workers: Sequence[Worker], prompt: Prompt) -> RouteChoice:
        longest, least = _extremes(workers, prompt, _decode_load)
        limit = least.worker.decode_load * IMBALANCE_SHARE + IMBALANCE_REQUESTS
        if longest.matched and longest.worker.decode_load <= limit:
            return RouteChoice(longest.worker, "prefix")
        return RouteChoice(least.worker, "load")

    def computed(self, worker: Worker, prompt: Prompt) -> None:
        if worker.tree is None and worker.info is not None:
            worker.tree = PrefixTree(worker.info.page_size, worker.info.pool_tokens)
        if worker.tree is not None:
            worker.tree.insert(*prompt)


class _Matched(NamedTuple):
    """A worker and how many leading tokens of the prompt it presumably holds."""

    worker: Worker
    matched: int


def _extremes(
    workers: Sequence[Worker], prompt: Prompt, load: Callable[[Worker], int]
) -> tuple[_Matched, _Matched]:
    """The worker with the longest match and the one with the least load.

    Among workers of equal load and match, the one whose cache holds fewest tokens is taken, so that
    different prompts use all caches.
    """

    def held(worker: Worker) -> int:
        return worker.tree.num_tokens if worker.tree else 0

    found = [_Matched(w, w.tree.match(*prompt) if w.tree else 0) for w in workers]
    longest = max(found, key=lambda f: (f.matched, -load(f.worker)))
    least = min(found, key=lambda f: (load(f.worker), -f.matched, held(f.worker)))
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
