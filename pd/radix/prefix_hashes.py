"""Names of cached prefixes: a hash for each page, which stands for all tokens up to its end."""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

HASH_BYTES = 8
_TOKEN_BYTES = 4


def first_hash(namespace: str) -> bytes:
    """Hash from which those of a namespace are derived, so that no two namespaces share one."""
    return blake2b(namespace.encode(), digest_size=HASH_BYTES, person=b"pd namespace").digest()


def page_hashes(last: bytes, data: bytes, page_bytes: int) -> bytes:
    """The hashes of pages that follow one another, joined.

    Args:
        last: hash of the page before, or :func:`first_hash`.
        data: memory of the pages' tokens.
    """
    found = []
    for start in range(0, len(data), page_bytes):
        last = blake2b(last + data[start : start + page_bytes], digest_size=HASH_BYTES).digest()
        found.append(last)
    return b"".join(found)


class _Hashed(NamedTuple):
    """A prompt and the hashes of its pages."""

    data: bytes
    namespace: str
    page_size: int
    pages: tuple[int, ...]


# The prompts that were hashed last. Among them is one that begins as the next does while nodes are
# chosen for a prompt, and for the answers to it, which go on elsewhere or have ended.
_recent: deque[_Hashed] = deque(maxlen=4)


def prompt_hashes(data: bytes, namespace: str, page_size: int) -> tuple[int, ...]:
    """The hashes of a prompt's whole pages as numbers. ``data``: memory of its int32 tokens.

    Pages with which a prompt begins that was hashed just before are not hashed again.
    """
    page_bytes = page_size * _TOKEN_BYTES
    count = len(data) // page_bytes
    begun: tuple[int, ...] = ()
    for known in tuple(_recent):
        if (known.namespace, known.page_size) == (namespace, page_size):
            shared = _shared_tokens(known.data, data) // page_size
            if shared == count == len(known.pages):
                return known.pages
            if shared > len(begun):
                begun = known.pages[:shared]
    last = begun[-1].to_bytes(HASH_BYTES, "little") if begun else first_hash(namespace)
    rest = data[len(begun) * page_bytes : count * page_bytes]
    pages = begun + as_numbers(page_hashes(last, rest, page_bytes))
    _recent.append(_Hashed(data, namespace, page_size, pages))
    return pages


def _shared_tokens(one: bytes, other: bytes) -> int:
    """The number of equal tokens with which two prompts begin."""
    if one is other:
        return len(one) // _TOKEN_BYTES
    if one[:_TOKEN_BYTES] != other[:_TOKEN_BYTES]:
        return 0
    count = min(len(one), len(other)) // _TOKEN_BYTES
    differ = np.frombuffer(one, np.int32, count) != np.frombuffer(other, np.int32, count)
    first = int(differ.argmax()) if count else 0
    return first if count and differ[first] else count


def as_numbers(hashes: bytes) -> tuple[int, ...]:
    """Joined hashes as numbers."""
    return tuple(np.frombuffer(hashes, "<u8").tolist())
