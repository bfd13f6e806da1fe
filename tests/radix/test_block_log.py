"""What is told about a cache, change by change, adds up to what it holds."""

from __future__ import annotations

import random

import numpy as np
import pytest
from radix_model import as_array

from pd.radix import RadixCache
from pd.radix.block_log import BlockChanges, BlockLog
from pd.radix.listener import PageRun
from pd.radix.prefix_hashes import HASH_BYTES, hash_namespace, hash_pages

PAGE = 2


class Reader:
    """Applies changes in their order, and checks that each fits to what went before."""

    def __init__(self) -> None:
        self.tokens: dict[bytes, bytes] = {}
        self.parents: dict[bytes, bytes] = {}

    def apply(self, taken: BlockChanges | None) -> None:
        if taken is None:
            return
        if taken.is_complete:
            self.tokens.clear()
            self.parents.clear()
        for change in taken.changes:
            if isinstance(change, PageRun):
                self._store(change)
            else:
                for page in pages_of(change):
                    del self.tokens[page], self.parents[page]

    def _store(self, run: PageRun) -> None:
        last = run.parent
        assert not last or last in self.tokens, "a page whose parent is not stored"
        assert hash_pages(last or hash_namespace(run.namespace), run.tokens, PAGE * 4) == run.hashes
        for number, page in enumerate(pages_of(run.hashes)):
            assert page not in self.tokens, "a page that is stored already"
            self.tokens[page] = run.tokens[number * PAGE * 4 : (number + 1) * PAGE * 4]
            self.parents[page], last = last, page


def pages_of(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]


def use(cache: RadixCache, rng: random.Random) -> None:
    """Insert or evict something; few tokens and namespaces, so that prefixes part everywhere."""
    if rng.random() < 0.25:
        cache.evict_pages(rng.randrange(1, 8))
        return
    count = rng.randrange(1, 9)
    tokens = as_array([rng.randrange(2) for _ in range(count * PAGE)])
    cache.insert_prefix(tokens, np.zeros(count, dtype=np.int32), rng.choice(["", "a", "b"]))


def test_changes_add_up_to_what_is_cached(seed: int) -> None:
    rng = random.Random(seed)
    cache = RadixCache(PAGE)
    log, reader = BlockLog(cache, max_pages=60), Reader()
    complete = 0
    for _ in range(2000):
        use(cache, rng)
        if rng.random() < 0.1:
            taken = log.take_changes()
            complete += taken is not None and taken.is_complete
            reader.apply(taken)
            assert set(reader.tokens) == set(pages_of(cache.join_hashes()))
        if rng.random() < 0.01:
            log.restart()
    assert 1 < complete < 150


def test_the_first_changes_are_complete_and_then_only_changes_are_told() -> None:
    cache = RadixCache(PAGE)
    log = BlockLog(cache, max_pages=100)
    assert log.take_changes() == BlockChanges([], is_complete=True)
    assert log.take_changes() is None
    cache.insert_prefix(as_array([1, 2, 3, 4]), as_array([0, 1]), "salt")
    cache.evict_pages(1)
    taken = log.take_changes()
    assert taken is not None and not taken.is_complete
    stored, removed = taken.changes
    assert isinstance(stored, PageRun) and stored.namespace == "salt" and not stored.parent
    assert removed == stored.hashes[HASH_BYTES:]


def test_more_changes_than_pages_are_told_as_all_that_is_cached() -> None:
    cache = RadixCache(PAGE)
    log = BlockLog(cache, max_pages=4)
    log.take_changes()
    for start in range(100):
        cache.insert_prefix(as_array([start, start, 7, 7]), as_array([0, 1]))
        cache.evict_pages(2 * (start < 99))
        assert len(log._changes) <= 4
    taken = log.take_changes()
    assert taken is not None and taken.is_complete
    (run,) = taken.changes
    assert isinstance(run, PageRun) and run.hashes == cache.join_hashes()


def test_nobody_may_listen_to_a_cache_whose_pages_have_no_hashes() -> None:
    cache = RadixCache(PAGE)
    cache.insert_prefix(as_array([1, 2]), as_array([0]))
    with pytest.raises(AssertionError, match="already has pages"):
        BlockLog(cache, max_pages=4)
