"""A queue in which nobody waits behind all that another has put into it."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Serves owners in turn, and what one of them put in in its order. Not for several threads."""

    def __init__(self) -> None:
        self._by_owner: OrderedDict[str, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._by_owner.values()))

    def count(self, owner: str) -> int:
        """What waits of one owner."""
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
