"""The processor time that the rules of a request may take."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from pd.core.errors import CostlyGrammarError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.core.errors import PDError

# Processor time that masks and tokens of a request may take, and how much each token adds. Ordinary
# grammars take a tenth of that per token.
BASE_SECONDS, SECONDS_PER_TOKEN = 1.0, 5e-3
# Factor for a request that another node has begun, because that node may be faster.
_RESUMED_FACTOR = 4.0


class RuleBudget:
    """The processor time of one request's rules, over all its choices. Thread-safe.

    Args:
        owner: the request's owner.
        share: the part of :data:`BASE_SECONDS` that the owner may use at present.
        is_resumed: whether another node has begun the request.

    Attributes:
        proofs: number of quick masks that a choice must show before we fill its masks together with
            others. Raised when one of the request's choices was slow.
    """

    def __init__(
        self,
        owner: str = "",
        share: Callable[[], float] = lambda: 1.0,
        *,
        is_resumed: bool = False,
    ) -> None:
        self.owner = owner
        self._share, self._is_resumed = share, is_resumed
        self._lock = threading.Lock()
        self.seconds, self.tokens = 0.0, 0
        self.proofs = 0

    @property
    def max_seconds(self) -> float:
        """Processor time that the request may have taken so far."""
        per_token = SECONDS_PER_TOKEN * self.tokens
        if self._is_resumed:
            return _RESUMED_FACTOR * (BASE_SECONDS + per_token)
        return BASE_SECONDS * self._share() + per_token

    def add_usage(self, seconds: float, tokens: int = 0) -> None:
        """Count processor time, and tokens added to outputs."""
        with self._lock:
            self.seconds += seconds
            self.tokens += tokens

    def check_limit(self, kind: str) -> PDError | None:
        """Return the error that ends the request if it is over its limit, else None. ``kind`` is
        the kind of its grammar."""
        limit = self.max_seconds
        if self.seconds <= limit:
            return None
        message = (
            f"{kind}: masks and {self.tokens} tokens of the output took {self.seconds:.2f} s of "
            f"processor time; at most {limit:.2f} may be taken"
        )
        if self._is_resumed:
            return UnavailableError(f"{message} by an output that another node began")
        return CostlyGrammarError(message, param=kind)
