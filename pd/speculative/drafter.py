"""The interface of drafters, and which one a node has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from pd.core.config import NodeConfig

    IntArray = npt.NDArray[np.int32]


class Drafter(Protocol):
    """Guesses how sequences go on. A wrong guess costs time and never changes the output."""

    def draft(self, sequences: Sequence[IntArray], limits: Sequence[int]) -> list[IntArray]:
        """Draft tokens for each sequence; called by the thread that launches steps.

        Args:
            sequences: prompt and output so far, int32, the last token included.
            limits: how many tokens each may have, at least 1.

        Returns:
            For each sequence what may follow it, int32, ``limits[i]`` tokens at most, or none.
        """


def make_drafter(config: NodeConfig) -> Drafter | None:
    """The drafter of ``--speculative-algorithm``; None without one, or on a prefill node."""
    if config.speculative_algorithm == "none" or config.role == "prefill":
        return None
    # Imported only where it is used.
    from pd.speculative.ngram import NgramDrafter

    return NgramDrafter()
