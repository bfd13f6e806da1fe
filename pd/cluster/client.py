"""The operator's end of the connection to a control service. Nothing here joins Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import zmq

from pd.cluster.orders import MAX_MESSAGE_BYTES, Reply
from pd.core.addresses import format_host
from pd.core.errors import SetupError
from pd.util.printable import escape_text

if TYPE_CHECKING:
    from pd.cluster.orders import Request

_REPLY = msgspec.json.Decoder(Reply)


class ControlAddress(msgspec.Struct, frozen=True):
    """Where a control service listens, and the public key (Z85) that it has to prove."""

    host: str
    port: int
    public_key: str


class ControlClient:
    """Sends requests to a control service and checks its answers.

    We encrypt for the holder of ``address.public_key``, so nobody else learns anything.
    """

    def __init__(self, address: ControlAddress, keys: tuple[bytes, bytes]) -> None:
        self._address, self._keys = address, keys
        self._context = zmq.Context()
        # Making a connection costs milliseconds, so we keep idle ones.
        self._idle: list[zmq.Socket[bytes]] = []

    def close(self) -> None:
        """End the connections only."""
        self._context.destroy(linger=0)

    def send_request(self, request: Request, seconds: float = 30.0) -> Reply:
        """Send a request and return its reply, from any thread.

        Raises SetupError: no answer in time, a wrong one, or a refusal.
        """
        where = f"control service at {format_host(self._address.host)}:{self._address.port}"
        socket = self._idle.pop() if self._idle else self._open_socket()
        try:
            socket.send(msgspec.json.encode(request))
            if not socket.poll(int(seconds * 1000)):
                raise SetupError(f"{where}: no answer for {seconds:g} s")
            reply = _REPLY.decode(socket.recv())
        except BaseException as error:
            # We drop it, because a late answer would pass for the answer to the next request.
            socket.close()
            if isinstance(error, (msgspec.MsgspecError, UnicodeDecodeError)):
                raise SetupError(f"{where}: wrong answer: {escape_text(str(error))}") from None
            raise
        self._idle.append(socket)
        if reply.error:
            raise SetupError(f"{where}: {escape_text(reply.error)}")
        return reply

    def _open_socket(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.REQ)
        socket.ipv6, socket.linger = ":" in self._address.host, 0
        socket.curve_serverkey = self._address.public_key.encode()
        socket.curve_publickey, socket.curve_secretkey = self._keys
        socket.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_MESSAGE_BYTES)
        socket.connect(f"tcp://{format_host(self._address.host)}:{self._address.port}")
        return socket
