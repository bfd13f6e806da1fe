"""Which experts of a mixture a rank has."""

from __future__ import annotations

from typing import NamedTuple


class LocalExperts(NamedTuple):
    """The experts of a layer that one rank has: adjacent ones.

    Attributes:
        first: number of the first one.
        total: experts of the layer, on all ranks.
    """

    first: int
    total: int
