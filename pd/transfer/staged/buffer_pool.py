"""Staging buffers of an outgoing link: which are free, and where the others are."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class BufferPair(NamedTuple):
    """A staging buffer of P and its target buffer on D, by number."""

    source: int
    target: int


class BufferPool:
    """Owners of a link's staging buffers, ``count`` on P and as many on D.

    A buffer of P is free, taken (being filled) or flying (read by the library). A buffer of D is
    free, taken, flying (written by the library) or held (read by D, until :meth:`release_targets`).
    We take buffers in pairs. P's buffer is free when its write is over, and D's later, so P always
    has a free one if D has. We take the most recently freed buffer first, because it is still in
    the cache.

    This is pure bookkeeping for one thread. Every method raises if a buffer is not where the call
    expects it.
    """

    def __init__(self, count: int) -> None:
        self._sources = list(reversed(range(count)))
        self._targets = list(self._sources)
        self._taken: dict[int, int] = {}
        self._flying: dict[int, int] = {}
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pairs ready to be taken."""
        return len(self._targets)

    @property
    def num_taken(self) -> int:
        return len(self._taken)

    @property
    def num_flying(self) -> int:
        return len(self._flying)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def take_pair(self) -> BufferPair:
        """Take a pair. Raises IndexError if none is free."""
        pair = BufferPair(self._sources[-1], self._targets.pop())
        self._sources.pop()
        self._taken[pair.target] = pair.source
        return pair

    def put_back(self, pair: BufferPair) -> None:
        """Free a taken pair without a write."""
        self._remove_taken(pair)
        self._sources.append(pair.source)
        self._targets.append(pair.target)

    def begin_write(self, pair: BufferPair) -> None:
        """Note that the library now writes a taken pair."""
        self._remove_taken(pair)
        self._flying[pair.target] = pair.source

    def end_write(self, target: int) -> None:
        """Note that the write to a buffer of D is over, so D holds it now. Raises KeyError."""
        self._sources.append(self._flying.pop(target))
        self._held.add(target)

    def release_targets(self, targets: Sequence[int]) -> None:
        """Free buffers that D gives back. Raises ValueError, and changes nothing, if D does not
        hold them all."""
        if not self._held.issuperset(targets) or len(set(targets)) < len(targets):
            raise ValueError(f"it freed buffers {targets}, of which it holds only {self._held}")
        self._held.difference_update(targets)
        self._targets.extend(targets)

    def _remove_taken(self, pair: BufferPair) -> None:
        if self._taken.get(pair.target) != pair.source:
            raise KeyError(pair)
        del self._taken[pair.target]
