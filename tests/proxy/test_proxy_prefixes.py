"""What a proxy believes to be cached at a node, by the node's reports and by its own guess."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from pd.core.messages import PREFIXES_UNKNOWN, PrefixEvents
from pd.proxy.prefix_tree import PrefixTree
from pd.proxy.reported_prefixes import ReportedPrefixes
from pd.radix import RadixCache
from pd.radix.prefix_log import PrefixLog

if TYPE_CHECKING:
    import numpy.typing as npt

PAGE = 4


def tokens(*ids: int) -> npt.NDArray[np.int32]:
    return np.array(ids, dtype=np.int32)


class ReportingCache:
    """The radix cache of a node of ``pages`` pages, which reports its changes to ``known``."""

    def __init__(self, pages: int, known: ReportedPrefixes) -> None:
        self.radix = RadixCache(PAGE)
        self.log = PrefixLog()
        self.radix.listen(self.log)
        self.pages, self.known = pages, known
        self.number = 0
        self.snapshot()

    def use(self, prompt: npt.NDArray[np.int32], namespace: str = "") -> int:
        """Compute a prompt; returns the tokens of it that were cached."""
        limit = (len(prompt) - 1) // PAGE * PAGE
        found = self.radix.match(prompt, namespace, max_tokens=limit)
        self.radix.lock(found.handle)
        count = len(prompt) // PAGE
        used = self.radix.evictable_pages + self.radix.locked_pages
        excess = used + count - len(found.pages) - self.pages
        if excess > 0:
            self.radix.evict(excess)
        ids = np.zeros(count, dtype=np.int32)
        self.radix.insert(prompt[: count * PAGE], ids, namespace)
        self.radix.unlock(found.handle)
        return len(found.pages) * PAGE

    def report(self) -> PrefixEvents | None:
        """The changes since the last report."""
        changes = self.log.take()
        if changes is None:
            return None
        self.number += 1
        return events(self.number, stored=changes.stored, removed=changes.removed)

    def snapshot(self) -> None:
        self.report()
        self.known.apply(events(self.number, stored=self.radix.hashes(), snapshot=True))


def events(number: int, **fields: Any) -> PrefixEvents:
    return PrefixEvents(to="proxy", sender="node", number=number, **fields)


def test_a_report_tells_what_is_cached_of_a_prompt() -> None:
    known = ReportedPrefixes(PAGE, 100)
    node = ReportingCache(100, known)
    node.use(tokens(*range(20)), "salt")
    report = node.report()
    assert report is not None
    known.apply(report)
    assert known.match(tokens(*range(18)), "salt") == 16
    assert known.match(tokens(*range(8), 99, *range(9, 20)), "salt") == 8
    assert known.match(tokens(*range(20)), "") == 0, "tenants' salts are in the hashes"
    assert known.num_tokens == 20


def test_what_was_just_sent_counts_until_it_is_reported_or_evicted() -> None:
    known = ReportedPrefixes(PAGE, 100)
    node = ReportingCache(100, known)
    known.insert(tokens(*range(20)), "")
    assert known.match(tokens(*range(20)), "") == 20
    node.use(tokens(*range(20)))
    node.radix.evict(2)
    report = node.report()
    assert report is not None
    known.apply(report)
    assert known.match(tokens(*range(20)), "") == 12


def test_nothing_is_believed_after_a_lost_batch_until_a_snapshot_comes() -> None:
    known = ReportedPrefixes(PAGE, 100)
    node = ReportingCache(100, known)
    node.use(tokens(*range(20)))
    node.report()  # lost
    node.use(tokens(*range(50, 70)))
    late = node.report()
    assert late is not None
    known.apply(late)
    assert known.number == PREFIXES_UNKNOWN
    node.snapshot()
    assert known.number == node.number
    assert known.match(tokens(*range(20)), "") == known.match(tokens(*range(50, 70)), "") == 20


def test_a_node_that_reports_more_than_its_pool_takes_no_more_memory() -> None:
    known = ReportedPrefixes(PAGE, 10)
    many = np.arange(1000, dtype="<u8").tobytes()
    known.apply(events(3, stored=many, snapshot=True))
    assert known.num_tokens == 10 * PAGE
    for start in range(0, 10_000, 100):
        known.insert(tokens(*range(start, start + 100)), "")
    assert len(known._expected) <= 10


@pytest.mark.parametrize("fields", [{"stored": b"1234567"}, {"removed": b"x"}, {"number": -1}])
def test_a_malformed_report_is_refused(fields: dict[str, Any]) -> None:
    whole = {"type": "PrefixEvents", "to": "p", "sender": "n", "number": 1} | fields
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(whole), type=PrefixEvents)


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


def test_reports_predict_cached_tokens_under_eviction_and_a_guess_does_not(seed: int) -> None:
    """10,000 requests at a node whose pool holds a part of the conversations, half of them from
    another proxy, with conversations of its own. A report comes after every second request,
    as it does at a node with 20 requests a second."""
    talk, foreign = Conversations(seed), Conversations(seed + 1)
    rng = random.Random(seed)
    known = ReportedPrefixes(PAGE, 4000)
    guess = PrefixTree(PAGE, 4000 * PAGE)
    node = ReportingCache(4000, known)
    right = {"reports": 0, "guess": 0}
    asked = 0
    for number in range(10_000):
        ours = rng.random() < 0.5
        prompt = (talk if ours else foreign).turn()
        if ours:
            asked += 1
            usable = (len(prompt) - 1) // PAGE * PAGE
            expected = min(known.match(prompt, ""), usable), min(guess.match(prompt, ""), usable)
            known.insert(prompt, "")
            guess.insert(prompt, "")
        found = node.use(prompt)
        if ours:
            right["reports"] += expected[0] == found
            right["guess"] += expected[1] == found
        if number % 2 and (report := node.report()) is not None:
            known.apply(report)
    shares = {name: count / asked for name, count in right.items()}
    print(f"seed {seed}: exactly right: {shares}")
    assert shares["reports"] >= 0.95 > shares["guess"]
