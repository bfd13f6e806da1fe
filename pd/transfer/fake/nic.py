"""Receiving side of the fake backend: a "network card" that performs every arriving write."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from pd.core.errors import TransferError
from pd.transfer.base import TransferState
from pd.transfer.common.unseen_receiver import UnseenReceiver, encode_pages
from pd.transfer.ranges import Block
from pd.transfer.wire.greeting import GreetingError, IncomingGreeting

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.transfer.kv_buffer import IntArray
    from pd.transfer.pool_memory import PoolMemory
    from pd.transfer.pool_shape import MissingTokens, PoolShape
    from pd.util.starvation import Patience

logger = logging.getLogger(__name__)

SERVICE = "fake"
# magic, write, key of the memory, first layer, layers, slots, payload bytes
WRITE = struct.Struct("<4sQQIIII")
WRITE_MAGIC = b"pdFW"
# write, whether it was performed
ACK = struct.Struct("<Q?")
MAX_PAYLOAD = 16 << 20
_GREETING_SECONDS, _CLOSE_SECONDS = 5.0, 1.0


class FakeDestination(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The destination of a room's tokens, carried by ``Reservation.destination``.

    Attributes:
        key: permits this peer to write. Invalid after the peer is disconnected.
        pages: little-endian int32 page tables of the whole sequence, one after the other.
    """

    key: int
    page_size: int
    token_start: int
    token_stop: int
    pages: bytes


class FakeNic:
    """Listens for links and performs their writes.

    A write names slots. Like an RDMA card, this one checks only that they lie in the pool and that
    the writer's key is valid. It does not know rooms and epochs.
    """

    def __init__(
        self,
        memory: PoolMemory,
        instance_id: str,
        host: str,
        key: bytes | None,
        patience: Patience,
    ) -> None:
        self._memory, self._patience = memory, patience
        self._instance, self._key = instance_id, key
        # Held during each write, so that no write can land after its key was revoked.
        self._lock = threading.Lock()
        self._peers: dict[int, str] = {}
        self._links: dict[socket.socket, str] = {}
        self._closed = False
        self.writes = 0
        self.refused = 0
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._start_thread("pd-fake-nic", self._accept_links)

    def _start_thread(self, name: str, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        self._threads = [old for old in self._threads if old.is_alive()] + [thread]
        thread.start()

    def key_for(self, peer: str) -> int:
        """Return the key for writes of ``peer``, which is a new one after a disconnect."""
        with self._lock:
            if self._closed:
                raise TransferError("the transfer manager was closed")
            for key, owner in self._peers.items():
                if owner == peer:
                    return key
            key = secrets.randbits(63)
            self._peers[key] = peer
            return key

    def is_valid(self, key: int) -> bool:
        """Whether writes with this key can still land."""
        with self._lock:
            return key in self._peers

    def disconnect_peer(self, peer: str) -> None:
        """Revoke the peer's key. When this returns, no write of the peer lands any more."""
        with self._lock:
            self._peers = {k: p for k, p in self._peers.items() if p != peer}
            links = [sock for sock, owner in self._links.items() if owner == peer]
        for sock in links:
            _shut_down(sock)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._peers = {}
            links = list(self._links)
        _shut_down(self._listener)
        for sock in links:
            _shut_down(sock)
        # A thread that writes while the process ends would crash it.
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept_links(self) -> None:
        with self._listener:
            while not self._closed:
                try:
                    sock, _ = self._listener.accept()
                except OSError:
                    continue
                self._start_thread("pd-fake-link", self._serve_link, sock)

    def _serve_link(self, sock: socket.socket) -> None:
        peer = "an unknown peer"
        try:
            with sock:
                sock.settimeout(_GREETING_SECONDS)
                peer = self._greet_peer(sock)
                sock.settimeout(None)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    if self._closed:
                        return
                    self._links[sock] = peer
                while self._perform_next(sock, peer):
                    pass
        except (OSError, EOFError):
            logger.info("the fake link of %s is closed", peer)
        except GreetingError as error:
            logger.warning("closed the fake link of %s: %s", peer, error)
        finally:
            with self._lock:
                self._links.pop(sock, None)

    def _greet_peer(self, sock: socket.socket) -> str:
        welcome = IncomingGreeting(SERVICE, self._instance, self._key)
        while welcome.needs:
            answer, refusal = welcome.feed_bytes(
                receive_exactly(sock, welcome.needs, self._may_still_come)
            )
            sock.sendall(answer)
            if refusal:
                raise GreetingError(refusal)
        return welcome.peer

    def _may_still_come(self, since: float) -> bool:
        return not self._patience.is_over(since, _GREETING_SECONDS)

    def _perform_next(self, sock: socket.socket, peer: str) -> bool:
        header = receive_exactly(sock, WRITE.size)
        magic, write, key, layer, layers, num_slots, payload = WRITE.unpack(header)
        block, shape = Block(0, num_slots, layer, layer + layers), self._memory.shape
        in_plane = shape.is_in_one_plane(block)
        malformed = in_plane and payload != shape.num_bytes(block)
        malformed |= max(payload, 4 * num_slots) > MAX_PAYLOAD
        if magic != WRITE_MAGIC or malformed:
            raise GreetingError(f"a write of {payload} bytes for {num_slots} slots is malformed")
        slots = np.frombuffer(receive_exactly(sock, 4 * num_slots), dtype="<i4")
        data = receive_exactly(sock, payload)
        inside = in_plane and (
            not num_slots or (slots.min() >= 0 and slots.max() < shape.num_slots)
        )
        with self._lock:
            performed = bool(inside and self._peers.get(key) == peer)
            if performed:
                self._memory.write_block(slots, block, data)
        self.writes += performed
        if not performed:
            self.refused += 1
            reason = "its key is not valid" if inside else "it is outside the pool"
            logger.warning("refused a write of %s: %s", peer, reason)
        sock.sendall(ACK.pack(write, performed))
        return True


class FakeReceiver(UnseenReceiver):
    """A room whose pages are safe when P has drained or was disconnected."""

    def __init__(
        self, nic: FakeNic, shape: PoolShape, peer: str, pages: IntArray, tokens: MissingTokens
    ) -> None:
        self._nic, self._key = nic, nic.key_for(peer)
        destination = FakeDestination(
            self._key,
            shape.page_size,
            tokens.start,
            tokens.stop,
            encode_pages(pages, tokens, shape.page_size),
        )
        super().__init__(peer, shape.missing_bytes(tokens), msgspec.msgpack.encode(destination))

    def commit(self, num_bytes: int) -> None:
        self.poll()
        super().commit(num_bytes)

    def poll(self) -> TransferState:
        if self._state is TransferState.ACTIVE and not self._nic.is_valid(self._key):
            self.fail(TransferError(f"{self.peer} was disconnected"))
        return self._state

    def drained(self) -> bool:
        # A commit follows the last landing, including duplicates: see FakeSender.poll.
        if self.poll() is TransferState.ACTIVE:
            return False
        done = self._state is TransferState.DONE
        return done or self._peer_drained or not self._nic.is_valid(self._key)


def receive_exactly(
    sock: socket.socket, size: int, still: Callable[[float], bool] = lambda _: False
) -> bytes:
    """Receive ``size`` bytes.

    Args:
        still: whether bytes awaited since a time may still come. Asked after each time-out of the
            socket.

    Raises:
        EOFError: the stream ended before.
        TimeoutError: the socket's timeout passed, and ``still`` denied.
    """
    data, since = bytearray(size), time.monotonic()
    view, filled = memoryview(data), 0
    while filled < size:
        try:
            arrived = sock.recv_into(view[filled:])
        except TimeoutError:
            if not still(since):
                raise
            continue
        if not arrived:
            raise EOFError
        filled += arrived
    return bytes(data)


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
