"""A node's prefix cache under conversations from two proxies, and what one of them believes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pd.core.messages import PrefixEvents
from pd.proxy.nodes.prefix_tree import PrefixTree
from pd.proxy.nodes.reported_prefixes import ReportedPrefixes
from pd.radix import RadixCache
from pd.radix.prefix_log import PrefixLog

if TYPE_CHECKING:
    import numpy.typing as npt

PAGE = 4
# Pages of the node's pool, which holds a part of the conversations.
PAGES = 4000


def tokens(*ids: int) -> npt.NDArray[np.int32]:
    return np.array(ids, dtype=np.int32)


class ReportingCache:
    """The radix cache of a node of ``pages`` pages, which reports its changes to ``known``."""

    def __init__(self, pages: int, known: ReportedPrefixes) -> None:
        self.radix = RadixCache(PAGE)
        self.log = PrefixLog()
        self.radix.add_listener(self.log)
        self.pages, self.known = pages, known
        self.number = 0
        self.snapshot()

    def use(self, prompt: npt.NDArray[np.int32], namespace: str = "") -> int:
        """Compute a prompt; returns the tokens of it that were cached."""
        limit = (len(prompt) - 1) // PAGE * PAGE
        found = self.radix.match_prefix(prompt, namespace, max_tokens=limit)
        self.radix.lock(found.handle)
        count = len(prompt) // PAGE
        used = self.radix.evictable_pages + self.radix.locked_pages
        excess = used + count - len(found.pages) - self.pages
        if excess > 0:
            self.radix.evict_pages(excess)
        ids = np.zeros(count, dtype=np.int32)
        self.radix.insert_prefix(prompt[: count * PAGE], ids, namespace)
        self.radix.unlock(found.handle)
        return len(found.pages) * PAGE

    def report(self) -> PrefixEvents | None:
        """The changes since the last report."""
        changes = self.log.take_changes()
        if changes is None:
            return None
        self.number += 1
        return events(self.number, stored=changes.stored, removed=changes.removed)

    def snapshot(self) -> None:
        self.report()
        self.known.apply_events(events(self.number, stored=self.radix.join_hashes(), snapshot=True))


def events(number: int, **fields: Any) -> PrefixEvents:
    return PrefixEvents(to="proxy", sender="node", number=number, **fields)


class Conversations:
    """Turns of conversations that share system prompts; some are taken up again much later."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.systems = [self._some(200) for _ in range(8)]
        self.open = [self._new() for _ in range(60)]

    def _some(self, count: int) -> list[int]:
        return [self.rng.randrange(1000) for _ in range(count)]

    def _new(self) -> list[int]:
        return list(self.rng.choice(self.systems))

    def turn(self) -> npt.NDArray[np.int32]:
        index = min(int(self.rng.expovariate(0.08)), len(self.open) - 1)
        history = self.open[index]
        history += self._some(self.rng.randrange(10, 120))
        if len(history) > 1500:
            self.open[index] = self._new()
        return tokens(*history)


class Shares(NamedTuple):
    """What a proxy knew.

    Attributes:
        reports: share of prompts whose cached tokens it knew exactly by the node's reports.
        guess: the same by what it had sent there.
        cached: share of prompt tokens that were cached.
    """

    reports: float
    guess: float
    cached: float


def predict(requests: int, seed: int) -> Shares:
    """Predict for so many requests of the proxy. Another sends about as many, with conversations of
    its own. A report comes after every second request, as it does at a node with 20 requests a
    second."""
    talk, foreign = Conversations(seed), Conversations(seed + 1)
    rng = random.Random(seed)
    known = ReportedPrefixes(PAGE, PAGES)
    guess = PrefixTree(PAGE, PAGES * PAGE)
    node = ReportingCache(PAGES, known)
    number = asked = by_reports = by_guess = cached = total = 0
    while asked < requests:
        number += 1
        ours = rng.random() < 0.5
        prompt = (talk if ours else foreign).turn()
        usable = (len(prompt) - 1) // PAGE * PAGE
        expected = (
            min(known.count_cached(prompt, ""), usable),
            min(guess.count_cached(prompt, ""), usable),
        )
        if ours:
            known.add_tokens(prompt, "")
            guess.add_tokens(prompt, "")
        found = node.use(prompt)
        cached, total = cached + found, total + len(prompt)
        if ours:
            asked += 1
            by_reports += expected[0] == found
            by_guess += expected[1] == found
        if number % 2 and (report := node.report()) is not None:
            known.apply_events(report)
    return Shares(by_reports / asked, by_guess / asked, cached / total)
