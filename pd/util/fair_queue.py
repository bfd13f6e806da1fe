"""A queue that serves its owners in turn, so that none waits for all items of another."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Serves owners in turn, and groups of one owner in turn. Not thread-safe.

    Items of one group keep their order. ``queue.Queue`` and ``deque`` know one order for all items,
    so a single owner could fill them and make everybody else wait.
    """

    def __init__(self) -> None:
        self._by_owner: OrderedDict[str, OrderedDict[Hashable, deque[T]]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(self.count_items, self._by_owner))

    def count_items(self, owner: str) -> int:
        """Count the waiting items of one owner."""
        return sum(map(len, self._by_owner.get(owner, {}).values()))

    def put_item(self, owner: str, item: T, group: Hashable = None) -> None:
        self._by_owner.setdefault(owner, OrderedDict()).setdefault(group, deque()).append(item)

    def take_item(self, skipped_owners: Collection[str] = ()) -> T:
        """Take the next item of the owner whose turn it is. Raises KeyError if there is none."""
        owner = next((owner for owner in self._by_owner if owner not in skipped_owners), None)
        if owner is None:
            raise KeyError
        groups = self._by_owner.pop(owner)
        group, items = groups.popitem(last=False)
        item = items.popleft()
        # The group and the owner go to the end of their queues.
        if items:
            groups[group] = items
        if groups:
            self._by_owner[owner] = groups
        return item
