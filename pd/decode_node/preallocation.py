"""Queue "preallocation" of a receiving end: requests that wait for memory."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from pd.core.request import RequestState
from pd.engine.page_allocator import PageState
from pd.scheduling.memory import LACKING_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pd.decode_node.incoming import IncomingRoom
    from pd.decode_node.peers import PrefillPeers
    from pd.scheduling.core import NodeCore
    from pd.scheduling.decode import DecodeScheduler
    from pd.scheduling.transfer_end import PromptSender


class Preallocation:
    """Requests without pages, in order of arrival. The caller holds the node's lock.

    Args:
        sending, owes_memory: see :class:`pd.decode_node.receiving.ReceivingEnd`.
        receiving: the requests that have pages, for which memory may be wanted.
        begin: called with a request that has pages, and how many of its tokens were cached. It
            leaves the queue in that call.
    """

    def __init__(
        self,
        core: NodeCore,
        decode: DecodeScheduler,
        peers: PrefillPeers,
        sending: PromptSender | None,
        owes_memory: Callable[[float], bool],
        receiving: Sequence[IncomingRoom],
        begin: Callable[[IncomingRoom, int], None],
    ) -> None:
        self._memory, self._decode, self._peers = core.memory, decode, peers
        self._sending, self._owes_memory = sending, owes_memory
        self._receiving, self._begin = receiving, begin
        self._waiting: deque[IncomingRoom] = deque()
        # The first that was refused memory, if that is still so.
        self._lacking: IncomingRoom | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[IncomingRoom]:
        return iter(self._waiting)

    def add(self, incoming: IncomingRoom) -> None:
        self._waiting.append(incoming)

    def put_back(self, incoming: IncomingRoom) -> None:
        """Take a request that had memory and lost it: it is the next to get some."""
        self._waiting.appendleft(incoming)

    def remove(self, incoming: IncomingRoom) -> None:
        self._waiting.remove(incoming)

    def pump(self) -> None:
        """Reserve pages for requests that fit, in order of arrival; those whose peer is not
        connected yet, or has not compiled their grammar, are passed over."""
        if self._decode.needs_memory:
            return
        self._lacking = None
        # NOTE: a copy, since requests that get memory, or fail for want of a receiver, leave it.
        for incoming in list(self._waiting):
            if not self._may_reserve(incoming):
                continue
            arrived = incoming.request.times.arrived
            if self._owes_memory(arrived) or self._exceeds_share(incoming):
                return
            if not self._reserve(incoming):
                incoming.lacking_since = incoming.lacking_since or time.monotonic()
                self._lacking = incoming
                return

    def owes(self, arrived: float) -> bool:
        """Whether a request that arrived earlier than this has lacked memory for long."""
        lacking = self._lacking
        if lacking is None or lacking.lacking_since is None or not self._may_reserve(lacking):
            return False
        waits = time.monotonic() > lacking.lacking_since + LACKING_SECONDS
        return waits and lacking.request.times.arrived < arrived

    def _may_reserve(self, incoming: IncomingRoom) -> bool:
        # NOTE: nothing may be promised to a peer that was disconnected after the handshake.
        request = incoming.request
        waiting = request.state is RequestState.PREALLOCATING and incoming.connected
        return waiting and not incoming.awaits_grammar and self._peers.connected(request.peer)

    def _exceeds_share(self, incoming: IncomingRoom) -> bool:
        """Whether a reservation would leave too little memory for prompts that are computed here.

        Two nodes that send KV to each other would otherwise wait for each other: each with its
        memory promised to prompts that the other has no memory to compute.
        """
        if self._sending is None or not self._receiving:
            return False
        reserved = self._memory.counts()["reserved"]
        wanted = self._memory.pages_for(len(incoming.request.prompt))
        return reserved + wanted > self._memory.num_pages // 2

    def _reserve(self, incoming: IncomingRoom) -> bool:
        """Reserve pages for the prompt; False if memory is lacking."""
        memory, sequence = self._memory, incoming.request.sequence
        length = len(incoming.request.prompt)
        growth = self._decode.headroom(sequence, [i.request.sequence for i in self._receiving])
        needed = memory.missing(sequence, length, length) + growth
        if not self._has(needed):
            return False
        # NOTE: matching locks pages, which were available until then; every way out of here must
        # release them.
        cached = memory.match(sequence, length)
        needed = memory.pages_for(length) - len(sequence.pages) + growth
        if not self._has(needed) or not memory.grow(sequence, length, PageState.RESERVED):
            memory.release(sequence)
            return False
        incoming.lacking_since = None
        self._begin(incoming, cached)
        return True

    def _has(self, pages: int) -> bool:
        """Whether so many pages can be had, with those of prompts that wait for their peers."""
        if self._memory.available < pages and self._sending is not None:
            self._sending.park(pages)
        return self._memory.available >= pages
