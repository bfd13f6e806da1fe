"""The greeting of a data connection: both ends name themselves and prove the cluster key.

The connecting node sends a hello with both instance ids and a nonce. The other answers with its own
nonce and an HMAC-SHA256 over both. The first proves itself the same way and learns whether it is
welcome. Both sides' fresh nonces enter each proof, and each side signs under its own label, so a
recorded or reflected proof is worthless. The proof covers only the greeting: later bytes are
neither encrypted nor signed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
import time
from typing import TYPE_CHECKING

from pd.core.addresses import is_loopback
from pd.core.errors import TransferError, UsageError
from pd.net.cluster_key import derive_key

if TYPE_CHECKING:
    import socket

    from pd.util.starvation import Patience

MAGIC = b"pd-data\n"
VERSION = 1
MAX_ID_BYTES = 64
_NONCE = 32
_MAC = 32
# magic, version, keyed, service, lengths of the two ids, ids of sender and receiver, nonce
_HELLO = struct.Struct(f"<8sH?8sBB{MAX_ID_BYTES}s{MAX_ID_BYTES}s{_NONCE}s")
# magic, version, verdict, nonce, proof
_REPLY = struct.Struct(f"<8sHB{_NONCE}s{_MAC}s")

_WELCOME, _WRONG_VERSION, _WRONG_INSTANCE, _WRONG_SERVICE, _WRONG_KEY = range(5)
_VERDICTS = {
    _WRONG_VERSION: "it speaks another version of the data protocol",
    _WRONG_INSTANCE: "another instance listens there now (the node restarted)",
    _WRONG_SERVICE: "it runs another transfer backend",
    _WRONG_KEY: "the cluster keys of the two nodes differ",
}


class GreetingError(Exception):
    """The other side does not belong to this deployment. The message says why."""


class PeerRefusedError(TransferError):
    """The peer answered and does not want this connection, so another try is useless."""


def transfer_key(cluster_key: bytes | None) -> bytes | None:
    """Derive the sub-key of data connections."""
    return None if cluster_key is None else derive_key(cluster_key, "transfer")


def require_loopback(host: str, what: str) -> None:
    """Raise UsageError unless ``host`` is this machine. Call it if there is no cluster key."""
    if not is_loopback(host):
        raise UsageError(
            f"{what} {host} is not a loopback address: set --cluster-key-file to leave this machine"
        )


def _compute_proof(key: bytes | None, label: bytes, *parts: bytes) -> bytes:
    if key is None:
        return bytes(_MAC)
    return hmac.new(key, label + b"".join(parts), hashlib.sha256).digest()


def check_instance_id(instance_id: str) -> bytes:
    """Return the id as bytes. Raises TransferError when it is empty or too long."""
    encoded = instance_id.encode()
    if not 0 < len(encoded) <= MAX_ID_BYTES:
        raise TransferError(f"instance id {instance_id!r} is not of 1 to {MAX_ID_BYTES} bytes")
    return encoded


def greet_peer(
    sock: socket.socket,
    service: str,
    own: str,
    peer: str,
    key: bytes | None,
    patience: Patience | None = None,
) -> None:
    """Greet the peer of a new connection.

    Each answer may take as long as the socket's timeout, extended by ``patience``.

    Raises:
        PeerRefusedError: another peer answered, or one side lacks the other's key.
        OSError: the connection broke or timed out.
    """
    ids = check_instance_id(own), check_instance_id(peer)
    nonce = secrets.token_bytes(_NONCE)
    hello = _HELLO.pack(
        MAGIC, VERSION, key is not None, service.encode(), *map(len, ids), *ids, nonce
    )
    sock.sendall(hello)
    reply = _receive_exactly(sock, _REPLY.size, peer, patience)
    magic, _, verdict, _, proof = _REPLY.unpack(reply)
    if magic != MAGIC:
        raise PeerRefusedError(f"{peer} does not speak the data protocol")
    if verdict != _WELCOME:
        raise PeerRefusedError(f"{peer} refused the connection: {_VERDICTS.get(verdict, verdict)}")
    signed = reply[:-_MAC]
    if not hmac.compare_digest(proof, _compute_proof(key, b"accept", hello, signed)):
        raise PeerRefusedError(f"{peer} did not prove that it has the cluster key")
    sock.sendall(_compute_proof(key, b"connect", hello, signed))
    if _receive_exactly(sock, 1, peer, patience)[0] != _WELCOME:
        raise PeerRefusedError(f"{peer} refused the connection: {_VERDICTS[_WRONG_KEY]}")


def _receive_exactly(sock: socket.socket, size: int, peer: str, patience: Patience | None) -> bytes:
    data, since, limit = b"", time.monotonic(), sock.gettimeout()
    while len(data) < size:
        try:
            part = sock.recv(size - len(data))
        except TimeoutError:
            if limit is None or patience is None or patience.is_over(since, limit, peer):
                raise
            continue
        if not part:
            raise ConnectionResetError("closed by the peer while opening")
        data += part
    return data


class IncomingGreeting:
    """The accepting side. You feed it bytes as they arrive, so it fits any kind of loop.

    Attributes:
        needs: number of bytes for the next :meth:`feed_bytes`; 0 when the greeting is over.
        peer: instance id of the other side, empty until it proved itself.
    """

    def __init__(self, service: str, own: str, key: bytes | None) -> None:
        self._service, self._own, self._key = service, own, key
        self._hello = b""
        self._signed = b""
        self._claimed = ""
        self.needs = _HELLO.size
        self.peer = ""

    def feed_bytes(self, data: bytes) -> tuple[bytes, str]:
        """Take exactly ``needs`` bytes.

        Returns:
            the answer to send, and the reason if you must then close the connection.
        """
        return self._take_proof(data) if self._hello else self._take_hello(data)

    def _take_hello(self, data: bytes) -> tuple[bytes, str]:
        magic, version, keyed, service, own_len, peer_len, sender, receiver, _ = _HELLO.unpack(data)
        if magic != MAGIC:
            raise GreetingError(f"it began with {magic!r}, not with a hello")
        if not 0 < own_len <= MAX_ID_BYTES or peer_len > MAX_ID_BYTES:
            raise GreetingError("an instance id in its hello is too long or empty")
        self._claimed = sender[:own_len].decode(errors="replace")
        meant = receiver[:peer_len].decode(errors="replace")
        name = service.rstrip(b"\0").decode(errors="replace")
        if version != VERSION:
            return self._refuse_peer(_WRONG_VERSION, f"it speaks version {version}, not {VERSION}")
        if name != self._service:
            return self._refuse_peer(
                _WRONG_SERVICE, f"it runs backend {name!r}, not {self._service!r}"
            )
        if meant != self._own:
            return self._refuse_peer(_WRONG_INSTANCE, f"it looks for instance {meant!r}")
        if keyed != (self._key is not None):
            return self._refuse_peer(_WRONG_KEY, "only one of us has a cluster key")
        self._hello = data
        nonce = secrets.token_bytes(_NONCE)
        self._signed = _REPLY.pack(MAGIC, VERSION, _WELCOME, nonce, bytes(_MAC))[:-_MAC]
        self.needs = _MAC
        return self._signed + _compute_proof(self._key, b"accept", data, self._signed), ""

    def _take_proof(self, data: bytes) -> tuple[bytes, str]:
        self.needs = 0
        if not hmac.compare_digest(
            data, _compute_proof(self._key, b"connect", self._hello, self._signed)
        ):
            return bytes([_WRONG_KEY]), f"{self._claimed} did not prove that it has the cluster key"
        self.peer = self._claimed
        return bytes([_WELCOME]), ""

    def _refuse_peer(self, verdict: int, reason: str) -> tuple[bytes, str]:
        self.needs = 0
        reply = _REPLY.pack(MAGIC, VERSION, verdict, bytes(_NONCE), bytes(_MAC))
        return reply, f"{self._claimed}: {reason}"


def peer_address(address: dict[str, str], peer: str, key: bytes | None) -> tuple[str, int]:
    """Return ``host`` and ``port`` as published by a peer. Raises TransferError naming the fault.
    Without a key, a host other than this one is a fault."""
    host, port = address.get("host", ""), address.get("port", "")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise TransferError(f"{peer} published a bad data address: host {host!r}, port {port!r}")
    check_instance_id(peer)
    if key is None and not is_loopback(host):
        raise TransferError(
            f"{peer} is at {host}, which is not a loopback address, and there is no cluster key"
        )
    return host, int(port)
