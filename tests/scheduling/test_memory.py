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
    from pd.core.request import Sequence

    IntArray = np.ndarray


def make_memory(num_pages: int = 16, page_size: int = 4) -> Memory:
    return Memory(num_pages, page_size, RadixCache(page_size))


def sequence_of(tokens: list[int], namespace: str = "") -> Sequence:
    return make_request(tokens, namespace=namespace).sequence


def compute(memory: Memory, sequence: Sequence, num_tokens: int) -> None:
    """What a step does: pages, KV, insertion into the tree."""
    assert memory.grow(sequence, num_tokens)
    sequence.num_computed = num_tokens
    memory.cache(sequence)


def check(memory: Memory, *sequences: Sequence, quarantined: tuple[IntArray, ...] = ()) -> None:
    memory.check(sequences, quarantined)
    counts = memory.counts()
    assert sum(counts.values()) == 2 * counts["total"]


def test_a_computed_prompt_stays_cached_after_its_release() -> None:
    memory = make_memory()
    first, second = sequence_of(list(range(10))), sequence_of(list(range(10)))
    compute(memory, first, 10)
    check(memory, first)
    assert memory.counts() | {"locked": 3, "free": 13} == memory.counts()
    memory.release(first)
    assert memory.counts() | {"cached": 2, "free": 14, "locked": 0} == memory.counts()
    assert memory.match(second, 9) == 8
    check(memory, second)
    memory.release(second)
    check(memory)


def test_a_page_table_does_not_change_when_another_cached_the_same_tokens_first() -> None:
    memory = make_memory()
    mine, other = sequence_of(list(range(8))), sequence_of(list(range(8)))
    assert memory.grow(mine, 8)
    assert memory.grow(other, 8)
    before = mine.pages.copy()
    for sequence in (other, mine):
        sequence.num_computed = 8
        memory.cache(sequence)
    assert np.array_equal(mine.pages, before)
    assert mine.owned.all() and not other.owned.any()
    check(memory, mine, other)
    for sequence in (mine, other):
        memory.release(sequence)
    assert memory.counts() | {"cached": 2, "free": 14} == memory.counts()
    check(memory)


def test_growing_evicts_what_nobody_uses_and_nothing_else() -> None:
    memory = make_memory(num_pages=4)
    old, used, new = (sequence_of([i] * 8) for i in range(3))
    compute(memory, old, 8)
    memory.release(old)
    compute(memory, used, 8)
    assert memory.available == 2
    assert not memory.grow(new, 9)
    assert memory.grow(new, 8)
    assert memory.counts() | {"cached": 0, "locked": 4, "free": 0} == memory.counts()
    check(memory, used, new)


def test_releasing_twice_gives_nothing_twice() -> None:
    memory = make_memory()
    sequence = sequence_of(list(range(10)))
    compute(memory, sequence, 10)
    memory.release(sequence)
    memory.release(sequence)
    check(memory)


def test_quarantined_pages_are_nobodys_until_the_drain() -> None:
    memory = make_memory()
    cached, sequence = sequence_of(list(range(8))), sequence_of(list(range(12)))
    compute(memory, cached, 8)
    memory.release(cached)
    assert memory.match(sequence, 12) == 8
    assert memory.grow(sequence, 12, PageState.RESERVED)
    pages = memory.quarantine(sequence)
    assert len(pages) == 1, "the cached prefix was never written to"
    assert memory.counts() | {"quarantined": 1, "cached": 2, "reserved": 0} == memory.counts()
    check(memory, sequence, quarantined=(pages,))
    with pytest.raises(AssertionError):
        memory.check([sequence], [])
    memory.end_quarantine(pages)
    assert memory.available == 16
    check(memory, sequence)


def test_reserved_pages_are_the_sequences_after_the_commit() -> None:
    memory = make_memory()
    sequence = sequence_of(list(range(10)))
    assert memory.grow(sequence, 10, PageState.RESERVED)
    check(memory, sequence)
    memory.own_reserved(sequence)
    sequence.num_computed = 10
    memory.cache(sequence)
    check(memory, sequence)
    memory.release(sequence)
    assert memory.counts() | {"cached": 2, "free": 14} == memory.counts()


def test_namespaces_share_nothing() -> None:
    memory = make_memory()
    compute(memory, sequence_of(list(range(8)), "a"), 8)
    assert memory.match(sequence_of(list(range(8)), "b"), 8) == 0


def test_asking_what_is_missing_leaves_no_trace() -> None:
    memory = make_memory()
    first, second = sequence_of(list(range(8))), sequence_of(list(range(12)))
    compute(memory, first, 8)
    before = memory.radix.lookup_tokens, memory.radix.hit_tokens
    assert memory.missing(second, 12, 11) == 1
    assert memory.missing(second, 12, 3) == 3
    assert (memory.radix.lookup_tokens, memory.radix.hit_tokens) == before


def test_flushing_keeps_what_is_used() -> None:
    memory = make_memory()
    used, unused = sequence_of([1] * 8), sequence_of([2] * 8)
    compute(memory, used, 8)
    compute(memory, unused, 8)
    memory.release(unused)
    assert memory.flush() == 2
    assert memory.counts() | {"locked": 2, "cached": 0} == memory.counts()
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
            self.memory.flush()
        check(self.memory, *self.live, *self.reserved, quarantined=tuple(self.quarantined))

    def new(self) -> Sequence:
        length = self.rng.randrange(1, 20)
        tokens = [self.rng.randrange(2) for _ in range(length)]
        return sequence_of(tokens, self.rng.choice(("", "", "tenant")))

    def begin(self) -> None:
        sequence = self.new()
        self.memory.match(sequence, sequence.num_tokens - 1)
        if self.memory.grow(sequence, sequence.num_tokens):
            self.live.append(sequence)
        else:
            self.memory.release(sequence)

    def reserve(self) -> None:
        sequence = self.new()
        self.memory.match(sequence, sequence.num_tokens)
        if self.memory.grow(sequence, sequence.num_tokens, PageState.RESERVED):
            self.reserved.append(sequence)
        else:
            self.memory.release(sequence)

    def extend(self) -> None:
        """Compute a chunk, or append a token and compute it."""
        if not self.live:
            return
        sequence = self.rng.choice(self.live)
        if sequence.num_computed == sequence.num_tokens:
            sequence.append(self.rng.randrange(2))
        if self.memory.grow(sequence, sequence.num_tokens):
            missing = sequence.num_tokens - sequence.num_computed
            sequence.num_computed += self.rng.randrange(1, missing + 1)
            self.memory.cache(sequence)

    def settle(self) -> None:
        """A reservation is committed or given up; a peer has drained."""
        if self.quarantined and self.rng.random() < 0.5:
            self.memory.end_quarantine(self.quarantined.pop())
        if not self.reserved:
            return
        sequence = self.reserved.pop(self.rng.randrange(len(self.reserved)))
        if self.rng.random() < 0.5:
            self.quarantined.append(self.memory.quarantine(sequence))
        else:
            self.memory.own_reserved(sequence)
            sequence.num_computed = sequence.num_tokens
            self.memory.cache(sequence)
            self.live.append(sequence)

    def end(self) -> None:
        if self.live:
            self.memory.release(self.live.pop(self.rng.randrange(len(self.live))))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30))
def test_every_page_has_one_owner_after_any_history(seed: int) -> None:
    history = History(random.Random(seed))
    for _ in range(60):
        history.step()
    for sequence in history.live:
        history.memory.release(sequence)
    for sequence in history.reserved:
        history.quarantined.append(history.memory.quarantine(sequence))
    for pages in history.quarantined:
        history.memory.end_quarantine(pages)
    check(history.memory)
    assert history.memory.available == history.memory.num_pages
