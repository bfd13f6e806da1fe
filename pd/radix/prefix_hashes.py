"""Hashes of cached prefixes. The hash of a page stands for all tokens up to its end."""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

HASH_BYTES = 8
_TOKEN_BYTES = 4


def hash_namespace(namespace: str) -> bytes:
    """Hash a namespace. The hashes of its pages build on this, so namespaces share none."""
    return blake2b(namespace.encode(), digest_size=HASH_BYTES, person=b"pd namespace").digest()


def hash_pages(last: bytes, data: bytes, page_bytes: int) -> bytes:
    """Hash consecutive pages, and return the joined hashes.

    Args:
        last: hash of the page before, or of the namespace (:func:`hash_namespace`).
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


# Recently hashed prompts. A proxy hashes the same prompt again while it chooses nodes. It hashes
# the prompt with its answer after a failover and at the end.
_recent: deque[_Hashed] = deque(maxlen=4)


def hash_prompt(data: bytes, namespace: str, page_size: int) -> tuple[int, ...]:
    """Hash a prompt's whole pages, and return the hashes as numbers.

    We reuse hashes of pages that a recently hashed prompt begins with.

    Args:
        data: memory of the prompt's int32 tokens.
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
    last = begun[-1].to_bytes(HASH_BYTES, "little") if begun else hash_namespace(namespace)
    rest = data[len(begun) * page_bytes : count * page_bytes]
    pages = begun + to_numbers(hash_pages(last, rest, page_bytes))
    _recent.append(_Hashed(data, namespace, page_size, pages))
    return pages


def _shared_tokens(one: bytes, other: bytes) -> int:
    """Count the equal tokens at the start of two prompts."""
    if one is other:
        return len(one) // _TOKEN_BYTES
    if one[:_TOKEN_BYTES] != other[:_TOKEN_BYTES]:
        return 0
    count = min(len(one), len(other)) // _TOKEN_BYTES
    differ = np.frombuffer(one, np.int32, count) != np.frombuffer(other, np.int32, count)
    first = int(differ.argmax()) if count else 0
    return first if count and differ[first] else count


def to_numbers(hashes: bytes) -> tuple[int, ...]:
    """Convert joined hashes to numbers."""
    return tuple(np.frombuffer(hashes, "<u8").tolist())
