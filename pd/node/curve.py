"""ZMQ sockets that admit only holders of one key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zmq.auth.thread import ThreadAuthenticator

if TYPE_CHECKING:
    import zmq


def admit_only(context: zmq.Context[zmq.Socket[bytes]], client: bytes) -> ThreadAuthenticator:
    """Have the CURVE sockets of a context refuse everybody but the holder of one key pair.

    Args:
        client: its public key, in Z85.

    Returns:
        The running authenticator, which has to be stopped before the context ends.
    """

    class OnlyThisKey:
        def callback(self, domain: str, key: bytes) -> bool:
            return bool(key == client)

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("*", OnlyThisKey())
    return authenticator
