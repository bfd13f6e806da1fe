"""The best hit rate that requests can have in a prefix cache of unlimited size.

**Definition.** Each request has a prompt, and at most its first `reusable` tokens may come from the
cache: all but the last one, because its logits give the next token, and none whose logits give a
log probability that was asked for. We replay the requests one after the other. A request hits the
longest beginning of its prompt that an earlier request has left, in whole pages and at most its
reusable tokens. Then it leaves its own prompt. Where prompts and answers share a node, it also
leaves the tokens of its answers whose KV was computed. Nothing is ever evicted. The optimum is the
largest sum of hits over all orders of the requests.

**The best order** is by ascending number of reusable pages. To see why, look at any page of a
prompt, at depth d. A request hits it if it comes after another one that left the page, and if it
has at least d reusable pages. Requests with fewer must compute the page anyway, and requests with
the page in their answer have fewer, too, because their answer begins after their prompt. So if
there is any such request, the order puts it first and everyone else hits. If there is none, one
request must pay, and exactly one does.

**Causality.** A program cannot send an answer back before it has it. The order respects this
whenever a prompt continues an earlier prompt and its answer, because such a prompt has more
reusable pages. Other dependences, such as an answer quoted in an unrelated prompt, are ignored.
They could only lower the optimum, so a measured hit rate never exceeds it.

**A small pool.** The best order may need programs to wait for each other to the end, which nobody
wants of chats. So :func:`replay_sent_order` keeps the order in which the requests were sent, and
asks what the best eviction gives in a pool of some size: pages that are hit again last go first
(Belady's rule). A scheduler that changes the order may do better than that.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class CacheRequest:
    """One prompt as a node sees it.

    Attributes:
        token_ids: tokens of the prompt.
        reusable: number of leading tokens that may come from the cache; less than the prompt's.
        answers: for each answer, the tokens after the prompt whose KV was computed.
    """

    token_ids: tuple[int, ...]
    reusable: int
    answers: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Replay:
    """What a cache of unlimited size does for requests in their best order.

    Attributes:
        prompt_tokens: tokens of all prompts.
        hit_tokens: tokens of them that were cached.
        distinct_tokens: tokens that the cache holds in the end.
    """

    prompt_tokens: int
    hit_tokens: int
    distinct_tokens: int

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / max(1, self.prompt_tokens)


def replay_best_order(
    requests: Sequence[CacheRequest], page_size: int, *, answers_stay: bool
) -> Replay:
    """Replay requests in the order with the most hits.

    Args:
        page_size: tokens per page.
        answers_stay: the cache also keeps answers, because the node that prefills generates them.
    """
    ordered = sorted(requests, key=lambda request: request.reusable // page_size)
    return replay_requests(ordered, page_size, answers_stay=answers_stay)


def replay_requests(
    requests: Sequence[CacheRequest], page_size: int, *, answers_stay: bool
) -> Replay:
    """Replay requests in this order. Arguments are those of :func:`replay_best_order`."""
    cache = _UnlimitedCache(page_size)
    hits = 0
    for request in requests:
        hits += cache.count_hits(request.token_ids[: request.reusable])
        cache.keep_tokens(request.token_ids)
        for answer in request.answers if answers_stay else ():
            cache.keep_tokens(request.token_ids + answer)
    total = sum(len(request.token_ids) for request in requests)
    return Replay(total, hits, cache.num_pages * page_size)


def replay_sent_order(
    requests: Sequence[CacheRequest], page_size: int, num_pages: int, *, answers_stay: bool
) -> int:
    """Count the hits of requests in this order, in a pool whose eviction knows the future.

    A request needs all its pages in the pool at the same time.

    Args:
        num_pages: pages of the pool, enough for each request alone.
    """
    tree = _UnlimitedCache(page_size)
    paths = [tree.keep_tokens(request.token_ids) for request in requests]
    needed = [set(path) for path in paths]
    if answers_stay:
        for pages, request in zip(needed, requests, strict=True):
            for answer in request.answers:
                pages.update(tree.keep_tokens(request.token_ids + answer))
    reusable = [
        path[: request.reusable // page_size] for path, request in zip(paths, requests, strict=True)
    ]
    # For each page, the requests that need it, the last one first, and whether they can hit it.
    # Others compute it anyway, so nothing is gained by keeping it until then.
    uses: dict[int, list[tuple[int, bool]]] = {}
    for number in reversed(range(len(requests))):
        hittable = set(reusable[number])
        for page in needed[number]:
            uses.setdefault(page, []).append((number, page in hittable))
    cached: set[int] = set()
    # Cached pages by their next use, the latest first, and then the last of a prefix; a page may
    # also have outdated entries.
    order: list[tuple[int, int]] = []
    next_uses: dict[int, int] = {}
    hits = 0
    for number, pages in enumerate(needed):
        hits += next(
            (depth for depth, page in enumerate(reusable[number]) if page not in cached),
            len(reusable[number]),
        )
        surplus = len(cached | pages) - num_pages
        while surplus > 0:
            next_use, page = (-value for value in heapq.heappop(order))
            if page in cached and page not in pages and next_uses[page] == next_use:
                cached.remove(page)
                surplus -= 1
        for page in pages:
            left = uses[page]
            left.pop()
            next_uses[page] = left[-1][0] if left and left[-1][1] else len(requests)
            heapq.heappush(order, (-next_uses[page], -page))
        cached |= pages
    return hits * page_size


class _UnlimitedCache:
    """A tree of pages. It shares no code with :class:`pd.radix.RadixCache`, which it judges."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        # The number of each page, by the number of the page before it and its tokens.
        self._pages: dict[tuple[int, tuple[int, ...]], int] = {}

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    def count_hits(self, tokens: tuple[int, ...]) -> int:
        """Count the leading tokens that are cached in whole pages."""
        place, hits = 0, 0
        for page in self._split_pages(tokens):
            found = self._pages.get((place, page))
            if found is None:
                break
            place, hits = found, hits + self._page_size
        return hits

    def keep_tokens(self, tokens: tuple[int, ...]) -> list[int]:
        """Keep all whole pages, and return their numbers."""
        place, numbers = 0, []
        for page in self._split_pages(tokens):
            place = self._pages.setdefault((place, page), len(self._pages) + 1)
            numbers.append(place)
        return numbers

    def _split_pages(self, tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
        size = self._page_size
        return [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)]
