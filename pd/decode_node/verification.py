"""Verifies received KV by its digest (``--kv-digest``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.engine.digests import Digests

if TYPE_CHECKING:
    from pd.core.messages import Commit
    from pd.decode_node.incoming import IncomingRoom
    from pd.scheduling.core import NodeCore


class DigestCheck:
    """Compares the digests of commits with the pages. The caller holds the node's lock."""

    def __init__(self, core: NodeCore, digests: Digests) -> None:
        self._core, self._requests, self._digests = core, core.requests, digests

    def is_intact(self, incoming: IncomingRoom, commit: Commit) -> bool:
        """Whether the KV is known to have the peer's digest.

        The first call starts to compute it. Fails the request if the digests differ.
        """
        request, reservation = incoming.request, incoming.reservation
        assert reservation is not None
        cached, stop = reservation.cached, len(request.prompt)
        if incoming.digest is None:
            with self._core.engine.use_side_stream():
                incoming.digest = self._digests.start_digest(request.sequence.tables, cached, stop)
        if not incoming.digest.done():
            return False  # its completion wakes the control thread
        try:
            digest = Digests.get_result(incoming.digest)
        except TransferError as failure:
            self._requests.fail_request(request, failure)
            return False
        if digest == commit.digest:
            return True
        error = TransferError(
            f"the KV of tokens {min(cached)} to {stop} was damaged on its way from prefill node "
            f"{request.peer}: its digest is {digest.hex()}, not {commit.digest.hex()}"
        )
        self._requests.fail_request(request, error)
        return False

    def close(self) -> None:
        """Stop computing digests."""
        self._digests.close()
