"""Any interleaving of operations behaves as the brute-force model says, under every policy."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from radix_model import Rehearsal, tokens_of

from pd.radix import EVICTION_POLICIES

NAMESPACES = ("", "a", "tenant")
PAGE_SIZES = (1, 2, 4, 16)
# How often the long run does each of them.
OPERATIONS = {
    "match": 6,
    "insert": 5,
    "lock": 3,
    "unlock": 3,
    "lease": 2,
    "end_lease": 2,
    "evict": 2,
}

namespaces = st.sampled_from(NAMESPACES)
words = st.text("xyz", max_size=7)
limits = st.none() | st.integers(-1, 70)
indices = st.integers(0, 1000)


class AnyInterleaving(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from(PAGE_SIZES), policy=st.sampled_from(EVICTION_POLICIES))
    def make(self, page_size: int, policy: str) -> None:
        self.page_size = page_size
        self.both = Rehearsal(page_size, policy)

    @rule(namespace=namespaces, word=words, extra=st.integers(0, 20), limit=limits)
    def match(self, namespace: str, word: str, extra: int, limit: int | None) -> None:
        self.both.match(namespace, tokens_of(self.page_size, word, extra), limit)

    @rule(namespace=namespaces, word=words, extra=st.integers(0, 20), limit=limits)
    def peek(self, namespace: str, word: str, extra: int, limit: int | None) -> None:
        self.both.peek(namespace, tokens_of(self.page_size, word, extra), limit)

    @rule(namespace=namespaces, word=words, priority=st.integers(-2, 2))
    def insert(self, namespace: str, word: str, priority: int) -> None:
        self.both.insert(namespace, tokens_of(self.page_size, word), priority)

    @precondition(lambda self: self.both.handles)
    @rule(index=indices)
    def lock(self, index: int) -> None:
        self.both.lock(index)

    @precondition(lambda self: self.both.locked)
    @rule(index=indices)
    def unlock(self, index: int) -> None:
        self.both.unlock(index)

    @precondition(lambda self: self.both.handles)
    @rule(index=indices)
    def lease(self, index: int) -> None:
        self.both.lease(index)

    @precondition(lambda self: self.both.leases)
    @rule(index=indices)
    def end_lease(self, index: int) -> None:
        self.both.end_lease(index)

    @rule(num_pages=st.integers(0, 12))
    def evict(self, num_pages: int) -> None:
        self.both.evict(num_pages)

    @rule()
    def clear(self) -> None:
        self.both.clear()


AnyInterleaving.TestCase.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None
)
TestAnyInterleaving = AnyInterleaving.TestCase


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_long_run_agrees_with_the_model_and_gives_every_page_back(
    policy: str, page_size: int
) -> None:
    rng = random.Random(f"{policy} {page_size}")
    both = Rehearsal(page_size, policy)
    for _ in range(250):
        namespace = rng.choice(NAMESPACES)
        word = "".join(rng.choices("xyz", weights=(6, 3, 1), k=rng.randrange(10)))
        tokens = tokens_of(page_size, word, rng.randrange(page_size))
        limit = rng.choice((None, None, rng.randrange(6 * page_size)))
        match rng.choices(list(OPERATIONS), list(OPERATIONS.values()))[0]:
            case "match":
                both.match(namespace, tokens, limit)
            case "insert":
                both.insert(namespace, tokens, rng.randrange(3))
            case "lock":
                both.lock(rng.randrange(1000))
            case "unlock":
                both.unlock(rng.randrange(1000))
            case "lease":
                both.lease(rng.randrange(1000))
            case "end_lease":
                both.end_lease(rng.randrange(1000))
            case "evict":
                both.evict(rng.randrange(8))
    while both.locked:
        both.unlock(0)
    both.clear()
    while both.leases:
        both.end_lease(0)
    assert sorted(both.given_back) == list(range(both.num_made))
