"""Names of requests that clients chose, and the child that has the request of each name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.proxy.processes.process import ChildProcess


class Claims:
    """One table for all children. A child checks by itself that its own requests differ."""

    def __init__(self) -> None:
        self._holders: dict[tuple[str, str], ChildProcess] = {}
        # A child may claim a name again that it holds: its request is refused and then released.
        self._counts: dict[tuple[str, str], int] = {}

    def claim(self, child: ChildProcess, owner: str, rids: Sequence[str]) -> str | None:
        """Give a child these names of an owner's request; or return one that another child has,
        and give none."""
        for rid in rids:
            if self._holders.get((owner, rid), child) is not child:
                return rid
        for rid in rids:
            self._holders[owner, rid] = child
            self._counts[owner, rid] = self._counts.get((owner, rid), 0) + 1
        return None

    def release(self, child: ChildProcess, owner: str, rids: Sequence[str]) -> None:
        """Take back what a child claimed."""
        for rid in rids:
            if self._holders.get((owner, rid)) is child:
                self._counts[owner, rid] -= 1
                if not self._counts[owner, rid]:
                    del self._counts[owner, rid], self._holders[owner, rid]

    def drop(self, child: ChildProcess) -> None:
        """Take back everything that a child claimed."""
        for name in [name for name, holder in self._holders.items() if holder is child]:
            del self._holders[name], self._counts[name]
