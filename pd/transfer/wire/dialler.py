"""Opens connections to a peer."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.transfer.wire.greeting import PeerRefusedError, greet_peer

if TYPE_CHECKING:
    from pd.util.starvation import Patience

logger = logging.getLogger(__name__)

_SECONDS = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


class PeerGoneError(TransferError):
    """Nobody listens at the peer's address. An instance listens as long as it lives."""


class Dialler:
    """Connects to one peer, once for each call.

    Args:
        service: name of the backend.
        own, peer: instance ids of the two ends.
        what: name of the connection in log lines.
    """

    def __init__(
        self,
        service: str,
        own: str,
        peer: str,
        address: tuple[str, int],
        key: bytes | None,
        patience: Patience,
        what: str,
    ) -> None:
        self._service, self._own, self._peer = service, own, peer
        self._address, self._key, self._patience = address, key, patience
        self._what = what

    def connect(self) -> socket.socket | None:
        """Return a connection with a complete greeting, or None if another try may succeed.

        Raises:
            PeerGoneError: nobody listens. Another try may find another process.
            PeerRefusedError: the peer does not want this connection, so do not try again.
        """
        peer = self._peer
        try:
            sock = socket.create_connection(self._address, timeout=_SECONDS)
        except (OSError, UnicodeError) as error:
            # UnicodeError: an invalid host name.
            logger.info("cannot reach %s at %s:%d: %s", peer, *self._address, error)
            if isinstance(error, ConnectionRefusedError):
                message = f"node {peer} is gone: nobody listens at its address"
                raise PeerGoneError(message) from error
            return None
        try:
            greet_peer(sock, self._service, self._own, peer, self._key, self._patience)
        except PeerRefusedError as error:
            sock.close()
            logger.warning("%s", error)
            raise
        except OSError as error:
            sock.close()
            logger.info("cannot open a %s to %s: %s", self._what, peer, error)
            return None
        return sock


def longer_pause(seconds: float) -> float:
    """Return the pause before the next try, after one of ``seconds``."""
    return min(_LONGEST_PAUSE, seconds * 2 or _FIRST_PAUSE)
