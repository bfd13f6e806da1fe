"""The pool's pages, the radix tree and the sequences that hold both: never two owners."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from requests_for_tests import make_request

from pd.engine.page_allocator import PageState
from pd.radix import RadixCache
from pd.scheduling.memory import Memory

if TYPE_CHECKING:
    from pd.scheduling.request import Sequence

    IntArray = np.ndarray


def make_memory(num_pages: int = 16, page_size: int = 4) -> Memory:
    return Memory(num_pages, page_size, RadixCache(page_size))


def sequence_of(tokens: list[int], namespace: str = "") -> Sequence:
    return make_request(tokens, namespace=namespace).sequence


def compute(memory: Memory, sequence: Sequence, num_tokens: int) -> None:
    """What a step does: pages, KV, insertion into the tree."""
    assert memory.grow_pages(sequence, num_tokens)
    sequence.num_computed = num_tokens
    memory.cache_tokens(sequence)


def check(memory: Memory, *sequences: Sequence, quarantined: tuple[IntArray, ...] = ()) -> None:
    memory.check_owners(sequences, quarantined)
    counts = memory.count_pages()
    assert sum(counts.values()) == 2 * counts["total"]


def test_a_computed_prompt_stays_cached_after_its_release() -> None:
    memory = make_memory()
    first, second = sequence_of(list(range(10))), sequence_of(list(range(10)))
    compute(memory, first, 10)
    check(memory, first)
    assert memory.count_pages() | {"locked": 3, "free": 13} == memory.count_pages()
    memory.release_pages(first)
    assert memory.count_pages() | {"cached": 2, "free": 14, "locked": 0} == memory.count_pages()
    assert memory.match_prefix(second, 9) == 8
    check(memory, second)
    memory.release_pages(second)
    check(memory)


def test_a_page_table_does_not_change_when_another_cached_the_same_tokens_first() -> None:
    memory = make_memory()
    mine, other = sequence_of(list(range(8))), sequence_of(list(range(8)))
    assert memory.grow_pages(mine, 8)
    assert memory.grow_pages(other, 8)
    before = mine.pages.copy()
    for sequence in (other, mine):
        sequence.num_computed = 8
        memory.cache_tokens(sequence)
    assert np.array_equal(mine.pages, before)
    assert mine.owned.all() and not other.owned.any()
    check(memory, mine, other)
    for sequence in (mine, other):
        memory.release_pages(sequence)
    assert memory.count_pages() | {"cached": 2, "free": 14} == memory.count_pages()
    check(memory)


def test_growing_evicts_what_nobody_uses_and_nothing_else() -> None:
    memory = make_memory(num_pages=4)
    old, used, new = (sequence_of([i] * 8) for i in range(3))
    compute(memory, old, 8)
    memory.release_pages(old)
    compute(memory, used, 8)
    assert memory.num_available == 2
    assert not memory.grow_pages(new, 9)
    assert memory.grow_pages(new, 8)
    assert memory.count_pages() | {"cached": 0, "locked": 4, "free": 0} == memory.count_pages()
    check(memory, used, new)


def test_releasing_twice_gives_nothing_twice() -> None:
    memory = make_memory()
    sequence = sequence_of(list(range(10)))
    compute(memory, sequence, 10)
    memory.release_pages(sequence)
    memory.release_pages(sequence)
    check(memory)


def test_quarantined_pages_are_nobodys_until_the_drain() -> None:
    memory = make_memory()
    cached, sequence = sequence_of(list(range(8))), sequence_of(list(range(12)))
    compute(memory, cached, 8)
    memory.release_pages(cached)
    assert memory.match_prefix(sequence, 12) == 8
    assert memory.grow_pages(sequence, 12, PageState.RESERVED)
    pages = memory.quarantine_pages(sequence)
    assert len(pages) == 1, "the cached prefix was never written to"
    assert (
        memory.count_pages() | {"quarantined": 1, "cached": 2, "reserved": 0}
        == memory.count_pages()
    )
    check(memory, sequence, quarantined=(pages,))
    with pytest.raises(AssertionError):
        memory.check_owners([sequence], [])
    memory.end_quarantine(pages)
    assert memory.num_available == 16
    check(memory, sequence)


def test_reserved_pages_are_the_sequences_after_the_commit() -> None:
    memory = make_memory()
    sequence = sequence_of(list(range(10)))
    assert memory.grow_pages(sequence, 10, PageState.RESERVED)
    check(memory, sequence)
    memory.own_reserved(sequence)
    sequence.num_computed = 10
    memory.cache_tokens(sequence)
    check(memory, sequence)
    memory.release_pages(sequence)
    assert memory.count_pages() | {"cached": 2, "free": 14} == memory.count_pages()


def test_namespaces_share_nothing() -> None:
    memory = make_memory()
    compute(memory, sequence_of(list(range(8)), "a"), 8)
    assert memory.match_prefix(sequence_of(list(range(8)), "b"), 8) == 0


def test_asking_what_is_missing_leaves_no_trace() -> None:
    memory = make_memory()
    first, second = sequence_of(list(range(8))), sequence_of(list(range(12)))
    compute(memory, first, 8)
    before = memory.radix.lookup_tokens, memory.radix.hit_tokens
    assert memory.count_missing(second, 12, 11) == 1
    assert memory.count_missing(second, 12, 3) == 3
    assert (memory.radix.lookup_tokens, memory.radix.hit_tokens) == before


def test_flushing_keeps_what_is_used() -> None:
    memory = make_memory()
    used, unused = sequence_of([1] * 8), sequence_of([2] * 8)
    compute(memory, used, 8)
    compute(memory, unused, 8)
    memory.release_pages(unused)
    assert memory.flush_cache() == 2
    assert memory.count_pages() | {"locked": 2, "cached": 0} == memory.count_pages()
    check(memory, used)


class History:
    """Random sequences over few tokens, so that prefixes meet, in every order of operations."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.memory = make_memory(num_pages=rng.choice((6, 12, 24)), page_size=rng.choice((1, 4)))
        self.live: list[Sequence] = []
        self.reserved: list[Sequence] = []
        self.quarantined: list[IntArray] = []

    def step(self) -> None:
        getattr(self, self.rng.choice(("begin", "begin", "reserve", "extend", "settle", "end")))()
        if self.rng.random() < 0.05:
            self.memory.flush_cache()
        check(self.memory, *self.live, *self.reserved, quarantined=tuple(self.quarantined))

    def new(self) -> Sequence:
        length = self.rng.randrange(1, 20)
        tokens = [self.rng.randrange(2) for _ in range(length)]
        return sequence_of(tokens, self.rng.choice(("", "", "tenant")))

    def begin(self) -> None:
        sequence = self.new()
        self.memory.match_prefix(sequence, sequence.num_tokens - 1)
        if self.memory.grow_pages(sequence, sequence.num_tokens):
            self.live.append(sequence)
        else:
            self.memory.release_pages(sequence)

    def reserve(self) -> None:
        sequence = self.new()
        self.memory.match_prefix(sequence, sequence.num_tokens)
        if self.memory.grow_pages(sequence, sequence.num_tokens, PageState.RESERVED):
            self.reserved.append(sequence)
        else:
            self.memory.release_pages(sequence)

    def extend(self) -> None:
        """Compute a chunk, or append a token and compute it."""
        if not self.live:
            return
        sequence = self.rng.choice(self.live)
        if sequence.num_computed == sequence.num_tokens:
            sequence.append_token(self.rng.randrange(2))
        if self.memory.grow_pages(sequence, sequence.num_tokens):
            missing = sequence.num_tokens - sequence.num_computed
            sequence.num_computed += self.rng.randrange(1, missing + 1)
            self.memory.cache_tokens(sequence)

    def settle(self) -> None:
        """A reservation is committed or given up; a peer has drained."""
        if self.quarantined and self.rng.random() < 0.5:
            self.memory.end_quarantine(self.quarantined.pop())
        if not self.reserved:
            return
        sequence = self.reserved.pop(self.rng.randrange(len(self.reserved)))
        if self.rng.random() < 0.5:
            self.quarantined.append(self.memory.quarantine_pages(sequence))
        else:
            self.memory.own_reserved(sequence)
            sequence.num_computed = sequence.num_tokens
            self.memory.cache_tokens(sequence)
            self.live.append(sequence)

    def end(self) -> None:
        if self.live:
            self.memory.release_pages(self.live.pop(self.rng.randrange(len(self.live))))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30))
def test_every_page_has_one_owner_after_any_history(seed: int) -> None:
    history = History(random.Random(seed))
    for _ in range(60):
        history.step()
    for sequence in history.live:
        history.memory.release_pages(sequence)
    for sequence in history.reserved:
        history.quarantined.append(history.memory.quarantine_pages(sequence))
    for pages in history.quarantined:
        history.memory.end_quarantine(pages)
    check(history.memory)
    assert history.memory.num_available == history.memory.num_pages
