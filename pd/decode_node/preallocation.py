"""Queue "preallocation" of a receiving end: requests waiting for memory."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from pd.engine.page_allocator import PageState
from pd.scheduling.memory import LACKING_SECONDS
from pd.scheduling.request import RequestState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pd.decode_node.incoming import IncomingRoom
    from pd.scheduling.core import NodeCore
    from pd.scheduling.decode import DecodeScheduler
    from pd.scheduling.peer_table import PeerTable
    from pd.scheduling.transfer_end import PromptSender


class Preallocation:
    """Holds requests without pages, in order of arrival. The caller holds the node's lock.

    Args:
        sending, owes_memory: see :class:`pd.decode_node.receiving.ReceivingEnd`.
        receiving: the requests with pages, which may need more memory as they grow.
        begin: called with a request with pages and its number of cached tokens. It must remove
            the request from the queue.
    """

    def __init__(
        self,
        core: NodeCore,
        decode: DecodeScheduler,
        peers: PeerTable,
        sending: PromptSender | None,
        owes_memory: Callable[[float], bool],
        receiving: Sequence[IncomingRoom],
        begin: Callable[[IncomingRoom, int], None],
    ) -> None:
        self._memory, self._decode, self._peers = core.memory, decode, peers
        self._sending, self._owes_memory = sending, owes_memory
        self._receiving, self._begin = receiving, begin
        self._waiting: deque[IncomingRoom] = deque()
        # The first request refused memory, if it still lacks some.
        self._lacking: IncomingRoom | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[IncomingRoom]:
        return iter(self._waiting)

    def add_request(self, incoming: IncomingRoom) -> None:
        self._waiting.append(incoming)

    def put_back(self, incoming: IncomingRoom) -> None:
        """Put back a request after it lost its memory. It is the next to get some."""
        self._waiting.appendleft(incoming)

    def remove_request(self, incoming: IncomingRoom) -> None:
        self._waiting.remove(incoming)

    def reserve_waiting(self) -> None:
        """Reserve pages for all fitting requests, in order of arrival.

        Skips requests whose peer is not connected yet or has not compiled their grammar.
        """
        if self._decode.needs_memory:
            return
        self._lacking = None
        # NOTE: a copy, because requests leave the queue when they get memory or fail without a
        # receiver.
        for incoming in list(self._waiting):
            if not self._may_reserve(incoming):
                continue
            arrived = incoming.request.times.arrived
            if self._owes_memory(arrived) or self._exceeds_share(incoming):
                return
            if not self._reserve_pages(incoming):
                incoming.lacking_since = incoming.lacking_since or time.monotonic()
                self._lacking = incoming
                return

    def owes_memory(self, arrived: float) -> bool:
        """Whether a request that arrived before ``arrived`` has lacked memory for long."""
        lacking = self._lacking
        if lacking is None or lacking.lacking_since is None or not self._may_reserve(lacking):
            return False
        waits = time.monotonic() > lacking.lacking_since + LACKING_SECONDS
        return waits and lacking.request.times.arrived < arrived

    def _may_reserve(self, incoming: IncomingRoom) -> bool:
        # NOTE: we must not promise memory to a peer that was disconnected after the handshake.
        request = incoming.request
        waiting = request.state is RequestState.PREALLOCATING and incoming.connected
        return waiting and not incoming.awaits_grammar and request.peer in self._peers

    def _exceeds_share(self, incoming: IncomingRoom) -> bool:
        """Whether a reservation would leave too little memory for prompts prefilled here.

        Otherwise two nodes that send KV to each other could deadlock: each would promise its memory
        to prompts that the other has no memory to prefill.
        """
        if self._sending is None or not self._receiving:
            return False
        reserved = self._memory.count_pages()["reserved"]
        wanted = self._memory.pages_for(len(incoming.request.prompt))
        return reserved + wanted > self._memory.num_pages // 2

    def _reserve_pages(self, incoming: IncomingRoom) -> bool:
        """Reserve pages for the prompt; False if memory is lacking."""
        memory, sequence = self._memory, incoming.request.sequence
        length = len(incoming.request.prompt)
        growth = self._decode.count_headroom(
            sequence, [i.request.sequence for i in self._receiving]
        )
        needed = memory.count_missing(sequence, length, length, length) + growth
        if not self._can_allocate(needed):
            return False
        # NOTE: matching locks pages counted as available. Every path out of this method must
        # release them.
        cached = memory.match_prefix(sequence, length)
        needed = memory.count_growth(sequence, length, length) + growth
        if not self._can_allocate(needed) or not memory.grow_pages(
            sequence, length, PageState.RESERVED, length
        ):
            memory.release_pages(sequence)
            return False
        incoming.lacking_since = None
        self._begin(incoming, cached)
        return True

    def _can_allocate(self, pages: int) -> bool:
        """Whether so many pages are available, after parking prompts that wait for their peers."""
        if self._memory.num_available < pages and self._sending is not None:
            self._sending.park_prompts(pages)
        return self._memory.num_available >= pages
