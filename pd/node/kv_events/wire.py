"""The format of published events, which is that of vLLM's ``vllm/distributed/kv_events.py``.

A message has three frames: the topic, the number of the batch (8 bytes, big-endian), and a batch in
MessagePack. Batches and events are arrays; an event's first element is the name of its class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pd.radix.listener import PageRun
from pd.radix.prefix_hashes import HASH_BYTES, as_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.radix.block_log import BlockChanges

# The tier of the pages that a node computes with, under the name that routers know.
_MEDIUM = "GPU"
_BATCH_TOKENS = 1 << 15
NUMBER_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)


class _Event(msgspec.Struct, array_like=True, omit_defaults=True, tag=True, gc=False):
    """Base of events of blocks of the cache."""


class BlockStored(_Event):
    """Blocks that follow one another were stored.

    ``parent_block_hash``: hash of the block before the first, None at the beginning of a prompt.
    ``token_ids``: of all blocks, or none.
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
    """No block is stored any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events in their order. ``ts``: Unix time at which they were collected."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = 0


class EventEncoder:
    """Turns changes of a cache into batches of a bounded size.

    Args:
        block_size: tokens of a block, which is a page.
        token_ids: also say which tokens, of prompts without a ``cache_salt`` and an ``extra_key``.
    """

    def __init__(self, block_size: int, *, token_ids: bool) -> None:
        self._block_size = block_size
        self._token_ids = token_ids
        self._max_blocks = _BATCH_TOKENS // block_size
        self._encoder = msgspec.msgpack.Encoder()

    def payloads(self, changes: BlockChanges, ts: float) -> Iterator[bytes]:
        """The batches that tell of ``changes``, encoded; at least one."""
        events: list[Event] = [AllBlocksCleared()] if changes.complete else []
        room = self._max_blocks
        for change in changes.changes:
            for part in self._parts(change):
                hashes = part.hashes if isinstance(part, PageRun) else part
                count = len(hashes) // HASH_BYTES
                if count > room:
                    yield self._encoder.encode(EventBatch(ts, events))
                    events, room = [], self._max_blocks
                events.append(self._event(part))
                room -= count
        yield self._encoder.encode(EventBatch(ts, events))

    def _parts(self, change: PageRun | bytes) -> Iterator[PageRun | bytes]:
        """A change in pieces of which each fits a batch."""
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

    def _event(self, part: PageRun | bytes) -> Event:
        if isinstance(part, bytes):
            return BlockRemoved(list(as_numbers(part)))
        # NOTE: tokens of a tenant with a salt would tell, and match, what its hashes must not.
        shown = self._token_ids and not part.namespace
        return BlockStored(
            list(as_numbers(part.hashes)),
            as_numbers(part.parent)[0] if part.parent else None,
            np.frombuffer(part.tokens, "<i4").tolist() if shown else [],
            self._block_size,
        )
