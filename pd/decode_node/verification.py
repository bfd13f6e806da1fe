"""Verification of received KV by its digest (``--kv-digest``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.engine.digests import Digests

if TYPE_CHECKING:
    from pd.core.messages import Commit
    from pd.decode_node.incoming import IncomingRoom
    from pd.scheduling.core import NodeCore


class DigestCheck:
    """Compares digests of commits with those of the pages. The caller holds the node's lock."""

    def __init__(self, core: NodeCore, digests: Digests) -> None:
        self._core, self._rooms, self._digests = core, core.rooms, digests

    def is_intact(self, incoming: IncomingRoom, commit: Commit) -> bool:
        """Whether the KV is known to have the digest that the peer computed; starts to compute it,
        and fails the request if it differs."""
        request, reservation = incoming.request, incoming.reservation
        assert reservation is not None
        cached, stop = reservation.cached, len(request.prompt)
        if incoming.digest is None:
            with self._core.engine.beside_steps():
                incoming.digest = self._digests.start(request.sequence.pages, cached, stop)
        if not incoming.digest.done():
            return False  # its end wakes the control thread
        try:
            found = Digests.result(incoming.digest)
        except TransferError as failure:
            self._rooms.fail(request, failure)
            return False
        if found == commit.digest:
            return True
        error = TransferError(
            f"the KV of tokens {min(cached)} to {stop} was damaged on its way from prefill node "
            f"{request.peer}: its digest is {found.hex()}, not {commit.digest.hex()}"
        )
        self._rooms.fail(request, error)
        return False

    def close(self) -> None:
        """Stop computing digests."""
        self._digests.close()
