"""A queue that serves its owners in turn."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items of one owner come in their order, and no owner waits behind all items of another. Not
    for several threads."""

    def __init__(self) -> None:
        self._by_owner: OrderedDict[str, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._by_owner.values()))

    def count(self, owner: str) -> int:
        """The number of items of one owner that wait."""
        return len(self._by_owner.get(owner, ()))

    def put(self, owner: str, item: T) -> None:
        self._by_owner.setdefault(owner, deque()).append(item)

    def get(self) -> T:
        """Take the next of the owner whose turn it is. Raises KeyError if there is none."""
        owner, items = self._by_owner.popitem(last=False)
        item = items.popleft()
        if items:
            self._by_owner[owner] = items  # behind all others
        return item
