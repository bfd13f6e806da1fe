"""Names of cached prefixes: a hash for each page, which stands for all tokens up to its end."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

import numpy as np

HASH_BYTES = 8


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


@lru_cache(maxsize=4)
def prompt_hashes(data: bytes, namespace: str, page_size: int) -> tuple[int, ...]:
    """The hashes of a prompt's whole pages as numbers. ``data``: memory of its int32 tokens."""
    page_bytes = page_size * 4
    whole = data[: len(data) - len(data) % page_bytes]
    return as_numbers(page_hashes(first_hash(namespace), whole, page_bytes))


def as_numbers(hashes: bytes) -> tuple[int, ...]:
    """Joined hashes as numbers."""
    return tuple(np.frombuffer(hashes, "<u8").tolist())
