"""ZMQ sockets that admit only holders of one key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zmq.auth.thread import ThreadAuthenticator

if TYPE_CHECKING:
    import zmq


def admit_only(context: zmq.Context[zmq.Socket[bytes]], client: bytes) -> ThreadAuthenticator:
    """Make the CURVE sockets of a context refuse everybody except the holder of one key pair.

    Args:
        client: public key of the pair, in Z85.

    Returns:
        The running authenticator. Stop it before you end the context.
    """

    class OnlyThisKey:
        def callback(self, domain: str, key: bytes) -> bool:
            return bool(key == client)

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("*", OnlyThisKey())
    return authenticator
