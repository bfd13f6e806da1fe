"""Texts computed by a node, by namespace. The n-gram drafter searches them for endings."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    IntArray = npt.NDArray[np.int32]
    HashArray = npt.NDArray[np.uint64]

# Lengths of endings in the tables. They double, because we compute each hash from two of half the
# length. In other texts, fewer equal tokens occur by chance.
_LENGTHS = (4, 8, 16)
LONGEST = _LENGTHS[-1]
# The smallest and the largest number of tokens in a generation of texts.
_LEAST_TOKENS, _MOST_TOKENS = 1 << 12, 1 << 19
# Slots per token in each table. A later ending replaces another one in the same slot.
_SLOTS = 2
# Memory of all namespaces together, and of one without texts.
MAX_BYTES = 128 << 20
_NAMESPACE_BYTES = 1024
# A namespace used within this many seconds loses nothing to others.
UNUSED_SECONDS = 60.0

# Base of the polynomial hash: the golden ratio times 2**64, because it is odd and mixes bits well.
_BASE = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
# Between two texts, and before the first.
_SEPARATOR = -1
_NOTHING: IntArray = np.empty(0, dtype=np.int32)


class NgramCache:
    """Finds how a sequence's last tokens continued in other texts of its namespace.

    A namespace has two generations of texts. We append to the newer one until it is full. Then we
    drop the older one, and start a new one with room for twice as many tokens if memory allows. A
    generation is one array of tokens, and a hash table for each length of endings with the place of
    its last occurrence. Therefore :meth:`add_text` takes time in proportion to the added tokens,
    and :meth:`find_continuation` takes constant time.

    When memory is used up, a namespace only gets more from namespaces unused for
    ``UNUSED_SECONDS``. If there are none, it keeps its memory, and a new namespace gets nothing. No
    client can therefore take the texts of a namespace in use, however many namespaces it opens.

    We drop texts by age alone, whether or not their KV is still cached, because guesses need no KV.

    Thread-safe with a lock of its own, because :meth:`find_continuation` is called without the
    node's lock. We acquire no other lock while we hold it.

    Args:
        max_bytes: memory of all namespaces together.
        clock: monotonic time in seconds.
    """

    def __init__(
        self, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes, self._clock = max_bytes, clock
        self._lock = threading.Lock()
        # The longest unused first.
        self._namespaces: OrderedDict[str, _Namespace] = OrderedDict()
        self._bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all texts and their tables."""
        return self._bytes

    def add_text(self, namespace: str, ids: IntArray, start: int) -> None:
        """Add the tokens ``ids[start:]``. Tokens before ``start`` are only context.

        Args:
            ids: int32.
        """
        first = max(0, start - LONGEST)
        text, known = ids[first:], start - first
        with self._lock:
            used = self._touch_namespace(namespace)
            if used is None or not used.generations[0].has_room(len(text)):
                used = self._add_generation(namespace, used, len(text))
            if used is not None:
                used.generations[0].append_text(text, known)

    def find_continuation(
        self, namespace: str, ending: IntArray, longer_than: int, limit: int
    ) -> IntArray:
        """Find the latest place of the longest known ending.

        Args:
            ending: the last ``LONGEST`` tokens of a sequence, int32, or all if it has fewer.
            longer_than: minimum number of equal tokens, exclusive.
            limit: maximum tokens to return.

        Returns:
            The tokens after that place, int32; empty if no place has enough equal tokens.
        """
        tokens: list[int] = ending.tolist()
        with self._lock:
            used = self._touch_namespace(namespace)
            if used is None:
                return _NOTHING
            for length, hashed in reversed(_hash_endings(tokens)):
                best, most = _NOTHING, max(longer_than, length - 1)
                for generation in used.generations:
                    end = generation.find_place(length, hashed)
                    equal = generation.count_equal(end, tokens)
                    if equal > most:
                        best, most = generation.read_following(end, limit), equal
                if len(best):
                    return best
        return _NOTHING

    def clear_texts(self) -> None:
        """Drop all texts."""
        with self._lock:
            self._namespaces.clear()
            self._bytes = 0

    def _touch_namespace(self, namespace: str) -> _Namespace | None:
        """Return the texts of a namespace and mark them as used; None if there are none."""
        used = self._namespaces.get(namespace)
        if used is not None:
            used.last_used = self._clock()
            self._namespaces.move_to_end(namespace)
        return used

    def _add_generation(
        self, namespace: str, used: _Namespace | None, num_tokens: int
    ) -> _Namespace | None:
        """Start a generation with room for a text, or for its end if memory is short.

        Returns:
            None if there is no memory for a new namespace.
        """
        wanted = max(_LEAST_TOKENS, 1 << (num_tokens + 1).bit_length())
        if used is None:
            overhead = _NAMESPACE_BYTES + 4 * len(namespace)
        else:
            overhead = 0
            wanted = max(wanted, 2 * used.generations[0].capacity)
            if len(used.generations) > 1:
                self._bytes -= used.generations.pop().num_bytes
        capacity = min(wanted, _MOST_TOKENS)
        self._drop_unused(_Generation.bytes_for(capacity) + overhead)
        room = self._max_bytes - self._bytes - overhead
        while capacity >= _LEAST_TOKENS and _Generation.bytes_for(capacity) > room:
            capacity //= 2
        if used is None:
            if capacity < _LEAST_TOKENS:
                return None
            used = self._namespaces[namespace] = _Namespace(self._clock())
            self._bytes += overhead
        elif capacity < _LEAST_TOKENS:
            full = used.generations.pop()
            self._bytes -= full.num_bytes
            capacity = full.capacity
        used.generations.insert(0, _Generation(capacity))
        self._bytes += used.generations[0].num_bytes
        return used

    def _drop_unused(self, num_bytes: int) -> None:
        """Drop unused namespaces until there is room for ``num_bytes`` or none are left."""
        latest = self._clock() - UNUSED_SECONDS
        while self._namespaces and self._bytes + num_bytes > self._max_bytes:
            namespace, unused = next(iter(self._namespaces.items()))
            if unused.last_used > latest:
                return
            del self._namespaces[namespace]
            self._bytes -= sum(each.num_bytes for each in unused.generations)
            self._bytes -= _NAMESPACE_BYTES + 4 * len(namespace)


@dataclass(slots=True)
class _Namespace:
    """Texts of one namespace.

    Attributes:
        last_used: monotonic time of the last addition or search.
        generations: one or two, the newer one first.
    """

    last_used: float
    generations: list[_Generation] = field(default_factory=list)


class _Generation:
    """Texts, one after the other, and the place where each ending occurred last.

    Args:
        capacity: number of tokens and separators that fit, a power of two.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_bytes = self.bytes_for(capacity)
        self._tokens: IntArray = np.empty(capacity, dtype=np.int32)
        self._tokens[0] = _SEPARATOR
        self._size = 1
        self._shift = 65 - (_SLOTS * capacity).bit_length()
        # An empty slot names place 0, because its separator equals no token.
        slots = _SLOTS * capacity
        self._places = {length: np.zeros(slots, dtype=np.int32) for length in _LENGTHS}

    @staticmethod
    def bytes_for(capacity: int) -> int:
        """Return the bytes of a generation."""
        return capacity * np.dtype(np.int32).itemsize * (1 + _SLOTS * len(_LENGTHS))

    def has_room(self, num_tokens: int) -> bool:
        """Return whether a text of ``num_tokens`` fits."""
        return self._size + num_tokens + 1 <= self.capacity

    def append_text(self, text: IntArray, known: int) -> None:
        """Append a text, or as much of its end as fits.

        Args:
            known: number of leading tokens whose endings the tables have. We only note the last of
                these endings again, because something follows it now.
        """
        excess = max(0, self._size + len(text) + 1 - self.capacity)
        text, known = text[excess:], max(0, known - excess)
        first, last = self._size, self._size + len(text)
        self._tokens[first:last] = text
        self._tokens[last] = _SEPARATOR
        self._size = last + 1
        # Nothing follows the last token.
        begin, end = max(known - 1, 0), len(text) - 1
        places = np.arange(first + begin, first + end, dtype=np.int32)
        length, hashed = 1, text.astype(np.uint64)
        while length < LONGEST:
            # Hashes of twice as many tokens, with zeros before the first.
            power = np.uint64(pow(_BASE, length, 1 << 64))
            doubled = hashed.copy()
            doubled[length:] += hashed[:-length] * power
            length, hashed = 2 * length, doubled
            if length in self._places:
                self._places[length][self._hash_slots(hashed[begin:end])] = places

    def find_place(self, length: int, hashed: int) -> int:
        """Return the index of the last token of an ending's latest place, if the hash is right."""
        slot = (hashed * _BASE & _WORD) >> self._shift
        return int(self._places[length][slot])

    def count_equal(self, end: int, tokens: list[int]) -> int:
        """Count the tokens up to ``end`` equal to the last of ``tokens``."""
        if self._tokens[end] != tokens[-1]:
            return 0  # the usual case
        count = 0
        here = self._tokens[max(0, end + 1 - len(tokens)) : end + 1].tolist()
        for one, other in zip(reversed(here), reversed(tokens), strict=False):
            if one != other:
                break
            count += 1
        return count

    def read_following(self, end: int, limit: int) -> IntArray:
        """Return at most ``limit`` tokens after ``end``, up to the end of its text."""
        tokens = self._tokens[end + 1 : min(end + 1 + limit, self._size)]
        ends = np.flatnonzero(tokens == _SEPARATOR)
        return tokens[: ends[0]] if len(ends) else tokens

    def _hash_slots(self, hashed: HashArray) -> HashArray:
        slots: HashArray = (hashed * np.uint64(_BASE)) >> np.uint64(self._shift)
        return slots


def _hash_endings(tokens: list[int]) -> list[tuple[int, int]]:
    """Hash the endings whose lengths are in ``_LENGTHS``, and return lengths and hashes.

    A hash is the sum of ``BASE**i`` times the ``i``-th token from the end, modulo ``2**64``.
    """
    endings, hashed, power = [], 0, 1
    for length, token in enumerate(reversed(tokens), 1):
        hashed = hashed + token * power & _WORD
        power = power * _BASE & _WORD
        if length in _LENGTHS:
            endings.append((length, hashed))
    return endings
