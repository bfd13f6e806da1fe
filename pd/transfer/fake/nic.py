"""Receiving side of the fake backend: a "network card" that performs every write that arrives."""

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

from pd.core.errors import PDError, TransferError
from pd.kernels.paging import page_count
from pd.transfer.base import Receiver, TransferState
from pd.transfer.ranges import Block, check_pages
from pd.transfer.wire.greeting import GreetingError, IncomingGreeting

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.core.starvation import Patience
    from pd.transfer.base import IntArray
    from pd.transfer.pool_memory import PoolMemory
    from pd.transfer.pool_shape import MissingTokens, PoolShape

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
    """The destination of a room's tokens, as carried by ``Reservation.destination``.

    Attributes:
        key: permits this peer to write; invalid once the peer is disconnected.
        pages: little-endian int32 page table of the whole sequence.
    """

    key: int
    page_size: int
    token_start: int
    token_stop: int
    pages: bytes


class FakeNic:
    """Listens for links and writes what they carry.

    A write names slots, and like an RDMA card this one checks only that they lie in the pool and
    that the writer's key is valid: it knows nothing of rooms and epochs.
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
        # Held during each write, so that after a key was taken away none of its writes can land.
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
        self._start("pd-fake-nic", self._accept)

    def _start(self, name: str, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        self._threads = [old for old in self._threads if old.is_alive()] + [thread]
        thread.start()

    def key_for(self, peer: str) -> int:
        """The key with which ``peer`` may write; a new one after it was disconnected."""
        with self._lock:
            if self._closed:
                raise TransferError("the transfer manager was closed")
            for key, owner in self._peers.items():
                if owner == peer:
                    return key
            key = secrets.randbits(63)
            self._peers[key] = peer
            return key

    def valid(self, key: int) -> bool:
        """Whether writes with this key can still land."""
        with self._lock:
            return key in self._peers

    def disconnect(self, peer: str) -> None:
        """Make the peer's key invalid: when this returns, no write of the peer lands any more."""
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
        # One that writes while the process ends would take it down with an error.
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        with self._listener:
            while not self._closed:
                try:
                    sock, _ = self._listener.accept()
                except OSError:
                    continue
                self._start("pd-fake-link", self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        peer = "an unknown peer"
        try:
            with sock:
                sock.settimeout(_GREETING_SECONDS)
                peer = self._greet(sock)
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

    def _greet(self, sock: socket.socket) -> str:
        welcome = IncomingGreeting(SERVICE, self._instance, self._key)
        while welcome.needs:
            answer, refusal = welcome.feed(receive_exactly(sock, welcome.needs, self._awaited))
            sock.sendall(answer)
            if refusal:
                raise GreetingError(refusal)
        return welcome.peer

    def _awaited(self, since: float) -> bool:
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
                self._memory.write(slots, block, data)
        self.writes += performed
        if not performed:
            self.refused += 1
            reason = "its key is not valid" if inside else "it is outside the pool"
            logger.warning("refused a write of %s: %s", peer, reason)
        sock.sendall(ACK.pack(write, performed))
        return True


class FakeReceiver(Receiver):
    """Does not see what arrives. It is DONE on commit, and drained when P has drained or was
    disconnected."""

    def __init__(
        self, nic: FakeNic, shape: PoolShape, peer: str, pages: IntArray, tokens: MissingTokens
    ) -> None:
        check_pages(pages, shape.page_size, shape.num_slots, tokens.start, tokens.stop)
        self.peer = peer
        self.error: PDError | None = None
        self._nic = nic
        self._key = nic.key_for(peer)
        self._expected = shape.missing_bytes(tokens)
        self._state = TransferState.ACTIVE
        self._peer_drained = False
        self._lock = threading.Lock()
        covering = pages[: page_count(tokens.stop, shape.page_size)]
        self._destination = msgspec.msgpack.encode(
            FakeDestination(
                self._key,
                shape.page_size,
                tokens.start,
                tokens.stop,
                covering.astype("<i4").tobytes(),
            )
        )

    @property
    def destination(self) -> bytes:
        return self._destination

    @property
    def bytes_received(self) -> int:
        return 0

    def commit(self, num_bytes: int) -> None:
        self.poll()
        if num_bytes != self._expected:
            self._end(
                TransferError(
                    f"{self.peer} committed {num_bytes} KV bytes; {self._expected} were reserved"
                )
            )
        else:
            self._end(None)

    def poll(self) -> TransferState:
        if self._state is TransferState.ACTIVE and not self._nic.valid(self._key):
            self._end(TransferError(f"{self.peer} was disconnected"))
        return self._state

    def abort(self) -> None:
        self._end(TransferError("aborted"))

    def drained(self) -> bool:
        # A commit follows the last landing, duplicates included: see FakeSender.poll.
        if self.poll() is TransferState.ACTIVE:
            return False
        done = self._state is TransferState.DONE
        return done or self._peer_drained or not self._nic.valid(self._key)

    def peer_drained(self) -> None:
        self._peer_drained = True

    def _end(self, error: PDError | None) -> None:
        with self._lock:
            if self._state is TransferState.ACTIVE:
                self.error = error
                self._state = TransferState.DONE if error is None else TransferState.FAILED


def receive_exactly(
    sock: socket.socket, size: int, still: Callable[[float], bool] = lambda _: False
) -> bytes:
    """Raises EOFError when the stream ends before, and TimeoutError when the socket's timeout
    passes and ``still`` does not say that what was awaited since then may still come."""
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
