"""Rids chosen by clients, and the child serving the request of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.proxy.workers.process import ChildProcess


class Claims:
    """One table for all children. Each child ensures by itself that its own rids differ."""

    def __init__(self) -> None:
        self._holders: dict[tuple[str, str], ChildProcess] = {}
        # A child may claim a rid twice: it rejects the second request, which then releases the rid.
        self._counts: dict[tuple[str, str], int] = {}

    def claim_rids(self, child: ChildProcess, owner: str, rids: Sequence[str]) -> str | None:
        """Give a child the rids of an owner's request. If another child has one of them, return it
        and give none."""
        for rid in rids:
            if self._holders.get((owner, rid), child) is not child:
                return rid
        for rid in rids:
            self._holders[owner, rid] = child
            self._counts[owner, rid] = self._counts.get((owner, rid), 0) + 1
        return None

    def release_rids(self, child: ChildProcess, owner: str, rids: Sequence[str]) -> None:
        """Release rids claimed by a child."""
        for rid in rids:
            if self._holders.get((owner, rid)) is child:
                self._counts[owner, rid] -= 1
                if not self._counts[owner, rid]:
                    del self._counts[owner, rid], self._holders[owner, rid]

    def drop_child(self, child: ChildProcess) -> None:
        """Release all rids of a child."""
        for name in [name for name, holder in self._holders.items() if holder is child]:
            del self._holders[name], self._counts[name]
