"""A patience that tests hold in their hand."""

from __future__ import annotations

import time

from pd.util.starvation import Patience


class FakePatience(Patience):
    """While ``starved``, some end got no CPU since whatever began; else both did.

    Attributes:
        asked: limits that were reached, and the peers they are for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.starved = True
        self.asked: set[tuple[float, str | None]] = set()

    def is_over(self, since: float, limit: float, peer: str | None = None) -> bool:
        if time.monotonic() - since <= limit:
            return False
        self.asked.add((limit, peer))
        return not self.starved

    def compute_extension(self, since: float, peer: str | None = None) -> float:
        return time.monotonic() - since if self.starved else 0.0
