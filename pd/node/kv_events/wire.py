"""The format of published events, as in vLLM's ``vllm/distributed/kv_events.py``.

A message has three frames: the topic, the number of the batch (8 bytes, big-endian), and a batch in
MessagePack. Batches and events are arrays; an event's first element is the name of its class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pd.radix.listener import PageRun
from pd.radix.prefix_hashes import HASH_BYTES, to_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.radix.block_log import BlockChanges

# Routers' name for the tier of the pages that a node computes with.
_MEDIUM = "GPU"
_BATCH_TOKENS = 1 << 15
NUMBER_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)


class _Event(msgspec.Struct, array_like=True, omit_defaults=True, tag=True, gc=False):
    """Base of events about cache blocks."""


class BlockStored(_Event):
    """Consecutive blocks were stored.

    ``parent_block_hash``: hash of the block before the first; None at the beginning of a prompt.
    ``token_ids``: tokens of all blocks, or empty.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = _MEDIUM
    lora_name: str | None = None


class BlockRemoved(_Event):
    """Blocks were evicted."""

    block_hashes: list[int]
    medium: str | None = _MEDIUM


class AllBlocksCleared(_Event):
    """The cache is empty."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events in order. ``ts``: Unix time at which they were collected."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = 0


class EventEncoder:
    """Turns cache changes into batches of bounded size.

    Args:
        block_size: tokens per block. A block is a page.
        token_ids: whether to include the tokens of prompts with neither ``cache_salt`` nor
            ``extra_key``.
    """

    def __init__(self, block_size: int, *, token_ids: bool) -> None:
        self._block_size = block_size
        self._token_ids = token_ids
        self._max_blocks = _BATCH_TOKENS // block_size
        self._encoder = msgspec.msgpack.Encoder()

    def encode_changes(self, changes: BlockChanges, ts: float) -> Iterator[bytes]:
        """Yield the encoded batches of ``changes``, at least one."""
        events: list[Event] = [AllBlocksCleared()] if changes.is_complete else []
        room = self._max_blocks
        for change in changes.changes:
            for part in self._split_change(change):
                hashes = part.hashes if isinstance(part, PageRun) else part
                count = len(hashes) // HASH_BYTES
                if count > room:
                    yield self._encoder.encode(EventBatch(ts, events))
                    events, room = [], self._max_blocks
                events.append(self._encode_event(part))
                room -= count
        yield self._encoder.encode(EventBatch(ts, events))

    def _split_change(self, change: PageRun | bytes) -> Iterator[PageRun | bytes]:
        """Split a change into pieces that fit a batch."""
        if isinstance(change, bytes):
            size = self._max_blocks * HASH_BYTES
            yield from (change[at : at + size] for at in range(0, len(change), size))
            return
        page_bytes = 4 * self._block_size
        last = change.parent
        for first in range(0, len(change.hashes) // HASH_BYTES, self._max_blocks):
            end = first + self._max_blocks
            hashes = change.hashes[first * HASH_BYTES : end * HASH_BYTES]
            tokens = change.tokens[first * page_bytes : end * page_bytes]
            yield PageRun(last, hashes, tokens, change.namespace)
            last = hashes[-HASH_BYTES:]

    def _encode_event(self, part: PageRun | bytes) -> Event:
        if isinstance(part, bytes):
            return BlockRemoved(list(to_numbers(part)))
        # NOTE: the tokens of a salted prompt would reveal the prompt and match across tenants,
        # which salted hashes prevent.
        shown = self._token_ids and not part.namespace
        return BlockStored(
            list(to_numbers(part.hashes)),
            to_numbers(part.parent)[0] if part.parent else None,
            np.frombuffer(part.tokens, "<i4").tolist() if shown else [],
            self._block_size,
        )
