"""Staging buffers of an outgoing link: which are free, and what becomes of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class BufferPair(NamedTuple):
    """A staging buffer of P and the one of D to which it is written, by number."""

    source: int
    target: int


class BufferPool:
    """Owners of a link's staging buffers, ``count`` on P and as many on D.

    A buffer of P is free, taken (it is being filled) or flying (the library reads it). A buffer of
    D is free, taken, flying (the library writes it) or held (D reads it, until :meth:`release`).
    Buffers are taken in pairs. P's is free again when its write is over, D's later; so whenever D
    has a free one, P has. The buffer that became free last is taken first: it is still in the
    cache.

    Pure bookkeeping for one thread; every method raises if a buffer is not where the call says.
    """

    def __init__(self, count: int) -> None:
        self._sources = list(reversed(range(count)))
        self._targets = list(self._sources)
        self._taken: dict[int, int] = {}
        self._flying: dict[int, int] = {}
        self._held: set[int] = set()

    @property
    def free(self) -> int:
        """Pairs that can be taken."""
        return len(self._targets)

    @property
    def taken(self) -> int:
        return len(self._taken)

    @property
    def flying(self) -> int:
        return len(self._flying)

    @property
    def held(self) -> int:
        return len(self._held)

    def take(self) -> BufferPair:
        """Raises IndexError if none is free."""
        pair = BufferPair(self._sources[-1], self._targets.pop())
        self._sources.pop()
        self._taken[pair.target] = pair.source
        return pair

    def put_back(self, pair: BufferPair) -> None:
        """A taken pair is free again without having been written."""
        self._remove_taken(pair)
        self._sources.append(pair.source)
        self._targets.append(pair.target)

    def begin_write(self, pair: BufferPair) -> None:
        """The library writes a taken pair."""
        self._remove_taken(pair)
        self._flying[pair.target] = pair.source

    def end_write(self, target: int) -> None:
        """The write to a buffer of D is over, which D holds from now on. Raises KeyError."""
        self._sources.append(self._flying.pop(target))
        self._held.add(target)

    def release(self, targets: Sequence[int]) -> None:
        """D gives buffers back. Raises ValueError, and changes nothing, if it does not hold them
        all."""
        if not self._held.issuperset(targets) or len(set(targets)) < len(targets):
            raise ValueError(f"it freed buffers {targets}, of which it holds only {self._held}")
        self._held.difference_update(targets)
        self._targets.extend(targets)

    def _remove_taken(self, pair: BufferPair) -> None:
        if self._taken.get(pair.target) != pair.source:
            raise KeyError(pair)
        del self._taken[pair.target]
