"""Connection between the ends of ``pd-bench transfer``: P makes one call at a time, D answers."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
from typing import TYPE_CHECKING, Any

import msgspec

from pd.core.errors import PDError, SetupError, UsageError
from pd.transfer.wire.channel import set_options
from pd.transfer.wire.greeting import (
    GreetingError,
    IncomingGreeting,
    greet_peer,
    require_loopback,
    transfer_key,
)

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

SERVICE = "bench"
SOURCE, TARGET = "bench-P", "bench-D"
_LENGTH = struct.Struct("<I")
_MAX_BYTES = 16 << 20
_GREETING_SECONDS = 10.0
_END = "end"


class Control:
    """A connection to the other end, after the greeting."""

    def __init__(self, sock: socket.socket) -> None:
        set_options(sock)
        self._sock = sock
        self.host: str = sock.getsockname()[0]

    def send_message(self, message: dict[str, Any]) -> None:
        data = msgspec.msgpack.encode(message)
        self._sock.sendall(_LENGTH.pack(len(data)) + data)

    def receive_message(self) -> dict[str, Any]:
        """Receive the next message. Raises SetupError when the other end is gone."""
        try:
            (size,) = _LENGTH.unpack(_receive_exactly(self._sock, _LENGTH.size))
            if size > _MAX_BYTES:
                raise SetupError(f"the other end sent a message of {size} bytes")
            message: dict[str, Any] = msgspec.msgpack.decode(_receive_exactly(self._sock, size))
        except OSError as error:
            raise SetupError(f"the other end is gone: {error.strerror or error}") from error
        return message

    def call(self, op: str, **fields: Any) -> dict[str, Any]:
        """Call an operation of D. Raises SetupError with D's error."""
        self.send_message({"op": op, **fields})
        return self.receive_answer()

    def receive_answer(self) -> dict[str, Any]:
        answer = self.receive_message()
        if "error" in answer:
            raise SetupError(f"the decode end: {answer['error']}")
        return answer

    def serve_calls(
        self, operations: dict[str, Callable[[dict[str, Any]], dict[str, Any]]]
    ) -> None:
        """Answer calls until P has finished. Raises SetupError if P leaves before."""
        while True:
            message = self.receive_message()
            if message.get("op") == _END:
                return
            try:
                answer = operations[message.pop("op")](message)
            except PDError as error:
                answer = {"error": error.message}
            except (OSError, MemoryError) as error:
                answer = {"error": str(error)}
            except Exception as error:
                # A library raised it: P reports the error, and this end logs the traceback.
                logger.exception("failed")
                answer = {"error": f"{type(error).__name__}: {error}"}
            self.send_message(answer)

    def close(self) -> None:
        """Tell the other end that this was the last call."""
        with contextlib.suppress(SetupError, OSError):
            self.send_message({"op": _END})
        self._sock.close()


def open_listener(host: str, port: int, key: bytes | None) -> socket.socket:
    """Listen. Raises UsageError for a public address without a key, SetupError for one in use."""
    if key is None:
        require_loopback(host, "--listen")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise SetupError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def accept_socket(listener: socket.socket, key: bytes | None) -> socket.socket:
    """Accept the next connection whose peer proves that it has the key; close all others."""
    while True:
        sock, address = listener.accept()
        sock.settimeout(_GREETING_SECONDS)
        welcome = IncomingGreeting(SERVICE, TARGET, transfer_key(key))
        try:
            while welcome.needs:
                reply, refusal = welcome.feed_bytes(_receive_exactly(sock, welcome.needs))
                sock.sendall(reply)
                if refusal:
                    raise GreetingError(refusal)
            sock.settimeout(None)
            return sock
        except (GreetingError, OSError) as error:
            logger.warning("closed the connection of %s: %s", address[0], error)
            sock.close()


def connect_socket(host: str, port: int, key: bytes | None) -> socket.socket:
    """Connect and greet. Raises SetupError without an answer, TransferError if D rejects us."""
    if key is None:
        require_loopback(host, "--connect")
    try:
        sock = socket.create_connection((host, port), timeout=_GREETING_SECONDS)
    except OSError as error:
        raise SetupError(
            f"cannot connect to {host}:{port}: {error.strerror or error}; "
            f"start pd-bench transfer --listen there first"
        ) from error
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        greet_peer(sock, SERVICE, SOURCE, TARGET, transfer_key(key))
        undo.pop_all()
    sock.settimeout(None)
    return sock


def parse_address(text: str) -> tuple[str, int]:
    """Parse ``HOST:PORT``; an IPv6 host is in brackets. Raises UsageError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"an address is HOST:PORT, not {text!r}")
    return host.strip("[]"), int(port)


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionResetError("it closed the connection")
        data += part
    return bytes(data)
