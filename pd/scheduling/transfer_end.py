"""Interfaces of the sending and the receiving end of hand-offs, as a node uses them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import numpy as np
    import numpy.typing as npt

    from pd.core.node_info import NodeInfo
    from pd.core.request import Request, RequestState, Sequence
    from pd.scheduling.handlers import Handlers
    from pd.scheduling.step import Work

    IntArray = npt.NDArray[np.int32]


class TransferEnd(ABC):
    """One end of the hand-offs of a node, with its peers.

    The caller holds the node's lock, but for :meth:`close`. No method waits for a peer.
    """

    @abstractmethod
    def register(self, handlers: Handlers) -> None:
        """Register the handlers of messages from peers."""

    # ---- a request

    @abstractmethod
    def accept(self, request: Request) -> None:
        """Take a new request that this end sends or receives the KV of. May end it."""

    @abstractmethod
    def ended(self, request: Request, before: RequestState) -> None:
        """Take a terminal request out of this end's queues, tell the peer and stop the transfer.
        Ends and starts nothing else.

        Args:
            before: the state in which the request ended.
        """

    @abstractmethod
    def may_release(self, request: Request) -> bool:
        """Whether no transfer reads or writes the pages of an ended request any more."""

    @abstractmethod
    def released(self, request: Request) -> None:
        """The pages of an ended request's sequences were released; release what else it holds."""

    # ---- time

    @abstractmethod
    def poll(self) -> bool:
        """Move transfers along; True while one is about to complete."""

    @abstractmethod
    def heartbeat(self) -> None:
        """Tell peers that this node lives; called every ``HEARTBEAT_INTERVAL``."""

    @abstractmethod
    def sweep(self, now: float) -> None:
        """Drop peers, and end requests, that were waited for longer than a lease."""

    # ---- peers

    @abstractmethod
    def drop_peer(self, instance: str, why: str) -> bool:
        """Forget a peer, if it is known: requests that depend on it fail, everything else goes on.
        Returns whether it was known."""

    @abstractmethod
    def peers(self) -> list[NodeInfo]:
        """The nodes that this end exchanges KV with at present."""

    @abstractmethod
    def backend_of(self, instance: str) -> str:
        """Name of the backend by which the KV of a peer travels."""

    # ---- administration

    @abstractmethod
    def queued(self) -> Iterator[Sequence]:
        """The sequences in this end's queues, one for each place in one."""

    @abstractmethod
    def queues(self) -> dict[str, int]:
        """Requests by queue, as ``/server_info`` shows them."""

    def quarantined_pages(self) -> Iterable[IntArray]:
        """Arrays of pages that wait for a peer's drain."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Stop threads of this end. May be called by any thread, without the lock."""


class PromptSender(TransferEnd):
    """Sends the KV of prompts that are computed here."""

    @abstractmethod
    def open(self, request: Request) -> None:
        """A chunk of the prompt is planned: begin to send, if the peer has reserved and nothing was
        begun yet. May end the request."""

    @abstractmethod
    def tell_expected(self, request: Request, seconds: float) -> None:
        """Tell the peer that the prompt is predicted to be computed in so many seconds, if the
        peer has reserved."""

    @abstractmethod
    def layer_sender(self, works: list[Work]) -> Callable[[int, int], None] | None:
        """A function to be called during a step, with ``[first, stop)``, when the KV of these
        layers is in the pool or queued on the current stream; None if no work is to be sent. The
        function acquires the node's lock."""

    @abstractmethod
    def chunk_computed(self, work: Work) -> None:
        """A chunk that is not the last one of its prompt was computed. May end the request."""

    @abstractmethod
    def prompt_computed(self, request: Request) -> None:
        """The whole prompt was computed and token 1 of each choice is known. May end the
        request."""

    @abstractmethod
    def park(self, pages: int) -> None:
        """Free pages of computed prompts for which no peer has memory yet, until so many are
        available, or as many as there are."""

    @abstractmethod
    def give_back(self) -> None:
        """Give reservations of prompts that are not begun back to peers, which may be waiting for
        that memory as this node waits for its own. Of two nodes that wait for each other one does
        so."""


class PromptReceiver(TransferEnd):
    """Receives the KV of prompts that are decoded here."""

    @abstractmethod
    def note_message(self, instance: str) -> None:
        """A message of a peer came, before it is handled."""

    @abstractmethod
    def pump(self) -> None:
        """Let waiting requests go on as far as memory and peers allow."""

    @abstractmethod
    def owes(self, arrived: float) -> bool:
        """Whether a request has lacked memory for so long that it gets what comes free before one
        that arrived then, since it came earlier."""

    @property
    @abstractmethod
    def awaits(self) -> bool:
        """Whether there is a request whose KV will come."""

    @property
    @abstractmethod
    def stalled(self) -> bool:
        """Whether there are such requests, and no peer has said that it computes one of them."""

    @abstractmethod
    def expected(self, seconds: float, late: float = math.inf) -> Iterator[Request]:
        """Requests whose prompts are predicted to be computed within ``seconds`` from now on, or
        were so ``late`` seconds ago at most."""

    @property
    @abstractmethod
    def queued_tokens(self) -> int:
        """Prompt tokens of requests that wait for memory or their peer."""

    @abstractmethod
    def meet(self, peers: Mapping[str, str]) -> None:
        """Connect to nodes whose requests may come here, ahead of need.

        Args:
            peers: by instance id, the URL of the node's registry.
        """

    @abstractmethod
    def linked(self) -> list[str]:
        """Peers from which the first request would find its connections made."""
