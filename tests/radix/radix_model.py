"""A radix cache without a tree: one entry per cached page prefix, every question answered by scan.

Slow and obvious, it is the specification that the property tests hold the real cache against.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pd.radix import InsertResult, IntArray, MatchResult, RadixCache, TreeNode, check_invariants

Prefix = tuple[str, tuple[int, ...]]  # a namespace and whole pages of tokens

PROTECTED_SHARE = 0.8


@dataclass
class Page:
    page_id: int
    created: int
    last_used: int
    priority: int
    hits: int = 0
    locks: int = 0
    leases: int = 0


class Model:
    def __init__(self, page_size: int, policy: str) -> None:
        self.page_size = page_size
        self.policy = policy
        self.pages: dict[Prefix, Page] = {}
        self.clock = 0

    def prefixes(self, namespace: str, tokens: tuple[int, ...]) -> list[Prefix]:
        size = self.page_size
        return [(namespace, tokens[:end]) for end in range(size, len(tokens) + 1, size)]

    def cached(self, namespace: str, tokens: tuple[int, ...]) -> list[Prefix]:
        found = []
        for prefix in self.prefixes(namespace, tokens):
            if prefix not in self.pages:
                break
            found.append(prefix)
        return found

    def match(self, namespace: str, tokens: tuple[int, ...]) -> list[int]:
        self.clock += 1
        found = self.cached(namespace, tokens)
        for prefix in found:
            self.pages[prefix].last_used = self.clock
            self.pages[prefix].hits += 1
        return [self.pages[prefix].page_id for prefix in found]

    def insert(
        self, namespace: str, tokens: tuple[int, ...], page_ids: list[int], priority: int
    ) -> int:
        self.clock += 1
        existing = len(self.cached(namespace, tokens))
        for prefix, page_id in zip(self.prefixes(namespace, tokens), page_ids, strict=True):
            page = self.pages.setdefault(prefix, Page(page_id, self.clock, self.clock, priority))
            page.last_used = self.clock
            page.priority = max(page.priority, priority)
        return existing

    def lock(self, handle: Prefix, count: int) -> None:
        for prefix in self.prefixes(*handle):
            self.pages[prefix].locks += count

    def lease(self, handle: Prefix) -> list[Page]:
        """Return the pages, because a page that is evicted and comes again is not leased."""
        pages = [self.pages[prefix] for prefix in self.prefixes(*handle)]
        for page in pages:
            page.leases += 1
        return pages

    def evict(self, num_pages: int) -> list[int]:
        freed = []
        while len(freed) < num_pages and (victim := self.victim()) is not None:
            freed.append(self.pages.pop(victim).page_id)
        return freed

    def victim(self) -> Prefix | None:
        """The unlocked page without successor that the policy gives up first."""
        size = self.page_size
        inner = {(name, tokens[:-size]) for name, tokens in self.pages}
        tails = [p for p, page in self.pages.items() if p not in inner and not page.locks]
        if self.policy == "slru":
            protected = sum(page.hits > 0 for page in self.pages.values())
            if protected > PROTECTED_SHARE * len(self.pages):
                hit = [p for p in tails if self.pages[p].hits and not self.pages[p].leases]
                tails = hit or tails
        return min(
            tails,
            key=lambda p: (self.pages[p].leases > 0, self.rank(self.pages[p])),
            default=None,
        )

    def rank(self, page: Page) -> Any:
        return {
            "lru": page.last_used,
            "lfu": (page.hits, page.last_used),
            "fifo": page.created,
            "slru": (page.hits > 0, page.last_used),
            "priority": (page.priority, page.last_used),
        }[self.policy]

    def locked_pages(self) -> int:
        return sum(page.locks > 0 for page in self.pages.values())


class Rehearsal:
    """Does everything to a real cache and to the model, and compares after every step.

    It also plays the allocator: each page it ever made is either in the tree or was given back.
    """

    def __init__(self, page_size: int, policy: str) -> None:
        self.cache = RadixCache(page_size, policy=policy)
        self.model = Model(page_size, policy)
        self.handles: list[tuple[TreeNode, Prefix]] = []  # valid until the next eviction
        self.locked: list[tuple[TreeNode, Prefix]] = []
        self.leases: list[tuple[int, list[Page]]] = []
        self.num_made = self.num_inserts = 0
        self.given_back: list[int] = []

    def match(self, namespace: str, tokens: tuple[int, ...], max_tokens: int | None) -> MatchResult:
        usable = tokens if max_tokens is None else tokens[: max(max_tokens, 0)]
        expected = self.model.match(namespace, usable)
        result = self.cache.match_prefix(as_array(tokens), namespace, max_tokens=max_tokens)
        assert result.pages.tolist() == expected
        assert result.num_pages == len(expected)
        self.remember(result.handle, namespace, tokens, len(expected))
        return result

    def peek(self, namespace: str, tokens: tuple[int, ...], max_tokens: int | None) -> None:
        usable = tokens if max_tokens is None else tokens[: max(max_tokens, 0)]
        expected = len(self.model.cached(namespace, usable)) * self.model.page_size
        assert (
            self.cache.count_cached(as_array(tokens), namespace, max_tokens=max_tokens) == expected
        )
        if max_tokens is None:
            assert self.cache.count_cached_memory(as_array(tokens).tobytes(), namespace) == expected
        self.compare()

    def insert(self, namespace: str, tokens: tuple[int, ...], priority: int) -> InsertResult:
        count = len(tokens) // self.model.page_size
        # Every second time the caller has the memory, with what follows the whole pages.
        self.num_inserts += 1
        data = as_array(tokens).tobytes() if self.num_inserts % 2 else None
        tokens = tokens[: count * self.model.page_size]
        page_ids = list(range(self.num_made, self.num_made + count))
        self.num_made += count
        existing = self.model.insert(namespace, tokens, page_ids, priority)
        result = self.cache.insert_prefix(
            as_array(tokens), as_array(page_ids), namespace, priority=priority, data=data
        )
        assert result.existing_pages == existing
        stored = [self.model.pages[p].page_id for p in self.model.prefixes(namespace, tokens)]
        assert result.pages.tolist() == stored
        assert stored[existing:] == page_ids[existing:]
        self.given_back += page_ids[:existing]
        self.remember(result.handle, namespace, tokens, count)
        return result

    def lock(self, index: int) -> None:
        if self.handles:
            handle, prefix = self.handles[index % len(self.handles)]
            self.cache.lock(handle)
            self.model.lock(prefix, +1)
            self.locked.append((handle, prefix))
            self.compare()

    def unlock(self, index: int) -> None:
        if self.locked:
            handle, prefix = self.locked.pop(index % len(self.locked))
            self.cache.unlock(handle)
            self.model.lock(prefix, -1)
            self.compare()

    def lease(self, index: int) -> None:
        if self.handles:
            handle, prefix = self.handles[index % len(self.handles)]
            self.leases.append((self.cache.lease_prefix(handle), self.model.lease(prefix)))
            self.compare()

    def end_lease(self, index: int) -> None:
        if self.leases:
            number, pages = self.leases.pop(index % len(self.leases))
            self.cache.end_lease(number)
            for page in pages:
                page.leases -= 1
            self.compare()

    def evict(self, num_pages: int) -> None:
        # Slru weighs its segments anew for every leaf, the model for every page: go by pages.
        step = 1 if self.model.policy == "slru" else num_pages
        for _ in range(0, num_pages, max(step, 1)):
            expected = self.model.evict(step)
            freed = self.cache.evict_pages(step).tolist()
            assert sorted(freed) == sorted(expected)
            self.given_back += freed
        self.forget_unlocked()

    def clear(self) -> None:
        freed = self.cache.clear().tolist()
        assert sorted(freed) == sorted(self.model.evict(len(self.model.pages)))
        assert self.cache.evictable_pages == 0
        self.given_back += freed
        self.forget_unlocked()

    def remember(
        self, handle: TreeNode, namespace: str, tokens: tuple[int, ...], num_pages: int
    ) -> None:
        self.handles.append((handle, (namespace, tokens[: num_pages * self.model.page_size])))
        self.compare()

    def forget_unlocked(self) -> None:
        self.handles = list(self.locked)
        self.compare()

    def compare(self) -> None:
        check_invariants(self.cache)
        cached = self.cache.list_pages().tolist()
        assert sorted(cached) == sorted(page.page_id for page in self.model.pages.values())
        assert self.cache.locked_pages == self.model.locked_pages()
        leased = sum(page.leases > 0 for page in self.model.pages.values())
        assert self.cache.leased_pages == leased
        assert self.cache.evictable_pages == len(cached) - self.model.locked_pages()
        assert sorted(cached + self.given_back) == list(range(self.num_made)), "a page got lost"


def as_array(values: list[int] | tuple[int, ...] | range) -> IntArray:
    return np.array(values, dtype=np.int32)


def tokens_of(page_size: int, letters: str, extra: int = 0) -> tuple[int, ...]:
    """One page per letter, then ``extra`` tokens more. Pages differ in their last token only, so
    a comparison that stops early, or forgets to round to pages, is caught."""
    tokens = [token for letter in letters for token in [7] * (page_size - 1) + [ord(letter)]]
    return tuple(tokens + [7] * extra)
