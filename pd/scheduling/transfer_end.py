"""Interfaces between a node and the two ends of its hand-offs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import numpy as np
    import numpy.typing as npt

    from pd.scheduling.handlers import Handlers
    from pd.scheduling.peer_table import PeerTable
    from pd.scheduling.request import Request, RequestState, Sequence
    from pd.scheduling.step import Work

    IntArray = npt.NDArray[np.int32]


class TransferEnd(ABC):
    """One end of a node's hand-offs, and its peers.

    The caller holds the node's lock, except for :meth:`close`. No method waits for a peer.

    Attributes:
        peers: the nodes with which this end exchanges KV.
    """

    peers: PeerTable

    @abstractmethod
    def register_handlers(self, handlers: Handlers) -> None:
        """Register handlers for messages from peers."""

    # ---- a request

    @abstractmethod
    def accept_request(self, request: Request) -> None:
        """Accept a new request whose KV this end sends or receives. May end the request."""

    @abstractmethod
    def end_hand_off(self, request: Request, before: RequestState) -> None:
        """Remove an ended request from the queues, tell the peer and stop the transfer.

        This must not end another request or start anything.

        Args:
            before: the state in which the request ended.
        """

    @abstractmethod
    def may_release(self, request: Request) -> bool:
        """Return whether no transfer uses the pages of an ended request any more."""

    @abstractmethod
    def finish_release(self, request: Request) -> None:
        """Release everything else held by an ended request, once its pages are released."""

    # ---- time

    @abstractmethod
    def poll_transfers(self) -> bool:
        """Advance transfers. Return True while one is about to complete."""

    @abstractmethod
    def send_heartbeats(self) -> None:
        """Tell peers that this node is alive. Call this every ``HEARTBEAT_INTERVAL``."""

    @abstractmethod
    def drop_expired(self, now: float) -> None:
        """Drop peers and fail requests after waiting for longer than a lease."""

    # ---- peers

    @abstractmethod
    def drop_peer(self, instance: str, why: str) -> bool:
        """Forget a peer and fail the requests that depend on it.

        Returns:
            Whether the peer was known.
        """

    @abstractmethod
    def backend_of(self, instance: str) -> str:
        """Return the name of the backend that carries a peer's KV."""

    # ---- administration

    @abstractmethod
    def iter_queued(self) -> Iterator[Sequence]:
        """Iterate over one sequence for each place in this end's queues."""

    @abstractmethod
    def count_queues(self) -> dict[str, int]:
        """Count requests by queue for ``/server_info``."""

    def quarantined_pages(self) -> Iterable[IntArray]:
        """Iterate over arrays of pages waiting until a peer has drained."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Stop the threads of this end. Any thread may call this, without the lock."""


class PromptSender(TransferEnd):
    """Sends the KV of prompts computed on this node."""

    @abstractmethod
    def will_leave(self, request: Request) -> bool:
        """Return whether a prompt, once computed, needs no memory of another node."""

    @abstractmethod
    def start_sending(self, request: Request) -> None:
        """Start to send a prompt with a planned chunk, if the peer has reserved memory.

        May end the request.
        """

    @abstractmethod
    def tell_expected(self, request: Request, seconds: float) -> None:
        """Tell a peer that has reserved memory in how many seconds we expect to be done."""

    @abstractmethod
    def make_layer_sender(self, works: list[Work]) -> Callable[[int, int], None] | None:
        """Make a function for sending layers of KV during a step, or None if there is nothing to
        send.

        Call the function with ``first`` and ``stop`` when the KV of layers ``[first, stop)`` is in
        the pool or queued on the current stream. It acquires the node's lock.
        """

    @abstractmethod
    def on_chunk_computed(self, work: Work) -> None:
        """Handle a computed chunk in the middle of its prompt. May end the request."""

    @abstractmethod
    def on_prompt_computed(self, request: Request) -> None:
        """Handle a computed prompt whose first tokens are known. May end the request."""

    @abstractmethod
    def park_prompts(self, pages: int) -> None:
        """Free pages of computed prompts for which no peer has memory yet.

        Stop when ``pages`` pages are available.
        """

    @abstractmethod
    def return_reservations(self) -> None:
        """Return reservations of unstarted prompts to their peers.

        Two nodes may wait for each other's memory. One of them has to give in.
        """


class PromptReceiver(TransferEnd):
    """Receives the KV of prompts that this node decodes."""

    @abstractmethod
    def reserve_waiting(self) -> None:
        """Reserve pages for waiting requests, as far as memory and peers allow."""

    @abstractmethod
    def owes_memory(self, arrived: float) -> bool:
        """Return whether an earlier request has lacked memory for long.

        It gets the next free pages before a request arriving at ``arrived``.
        """

    @abstractmethod
    def reserved_sequences(self) -> list[Sequence]:
        """Return the sequences with pages for KV on its way to this node."""

    @property
    @abstractmethod
    def awaits_kv(self) -> bool:
        """Whether KV of a request is on its way."""

    @property
    @abstractmethod
    def is_stalled(self) -> bool:
        """Whether KV is on its way, and no peer has started to compute any of it."""

    @abstractmethod
    def iter_expected(self, seconds: float, late: float = math.inf) -> Iterator[Request]:
        """Iterate over requests whose prompts should be computed within ``seconds``.

        This includes prompts up to ``late`` seconds late.
        """

    @property
    @abstractmethod
    def queued_tokens(self) -> int:
        """Number of prompt tokens of requests waiting for memory or their peer."""

    @abstractmethod
    def connect_peers(self, peers: Mapping[str, str]) -> None:
        """Connect to nodes before a request needs them.

        Args:
            peers: URL of each node's registry by instance id.
        """

    @abstractmethod
    def list_linked_peers(self) -> list[str]:
        """List the peers whose first request would find its connections ready."""
