"""Receiving side of the tcp backend: one thread reads all data connections into the pool.

If the pool is staged, the thread begins copies and does not wait for them: a connection whose
buffers are all being unpacked is paused, and the others go on.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import selectors
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.core.seldom import Seldom
from pd.core.waker import Waker
from pd.transfer.pool_memory import CALL_BYTES
from pd.transfer.tcp.frames import HEADER, Frame, decode_header
from pd.transfer.tcp.host_buffers import Scatters, StagingBuffers
from pd.transfer.tcp.landing import DirectLanding, StagedLanding
from pd.transfer.wire.acceptor import Acceptor
from pd.transfer.wire.errors import PeerDataError

if TYPE_CHECKING:
    from pd.core.starvation import Patience
    from pd.transfer.pool_memory import PoolMemory
    from pd.transfer.tcp.landing import Landing
    from pd.transfer.tcp.receiver import TcpReceiver

logger = logging.getLogger(__name__)

SERVICE = "tcp"
# One connection may keep the thread for this many reads before the others get their turn.
_READS_PER_TURN = 16
_LOG_INTERVAL = 1.0


@dataclass
class ReceiveCounters:
    """Counts of what arrived and what was discarded, since the start."""

    connections: int = 0
    broken_connections: int = 0
    frames: int = 0
    bytes: int = 0
    discarded_frames: int = 0
    discarded_bytes: int = 0
    duplicate_frames: int = 0


class _ClosedError(Exception):
    """The end of a stream."""


class _Connection:
    """One connection of a peer and how far into header or payload of a frame it is."""

    def __init__(self, number: int, sock: socket.socket, peer: str, origin: str) -> None:
        self.number, self.sock, self.peer, self.origin = number, sock, peer, origin
        self.head = bytearray(HEADER.size)
        self.filled = 0
        self.frame: Frame | None = None
        self.buffers: StagingBuffers | None = None
        self.landing: Landing | None = None
        self.remaining = 0
        self.paused = False

    def __str__(self) -> str:
        return f"{self.peer} ({self.origin})"


class TcpInbox:
    """The listening socket, its connections, and the receivers they may write for."""

    def __init__(
        self,
        memory: PoolMemory,
        instance_id: str,
        host: str,
        key: bytes | None,
        patience: Patience,
    ) -> None:
        self.memory, self.patience = memory, patience
        self.counters = ReceiveCounters()
        # Guards the receivers, and the connections, which only the thread changes.
        self._lock = threading.Lock()
        self._receivers: dict[tuple[bytes, int], TcpReceiver] = {}
        self._connections: dict[int, _Connection] = {}
        self._numbers = itertools.count(1)
        self._scatters = Scatters(memory.pool) if memory.staged else None
        self._resumed: deque[_Connection] = deque()
        self._closing = False
        self._discard = memoryview(bytearray(1 << 20))
        self._next_log = 0.0
        self._seldom = Seldom(logger)
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(
            SERVICE,
            instance_id,
            host,
            key,
            patience,
            self._selector,
            "data connection",
            self._welcome,
        )
        self._waker = Waker()
        self._selector.register(self._waker, selectors.EVENT_READ, self._waker.drain)
        self._thread = threading.Thread(target=self._run, name="pd-tcp-inbox", daemon=True)
        self._thread.start()

    # ---- called by any thread

    @property
    def port(self) -> int:
        return self._acceptor.port

    def add(self, receiver: TcpReceiver) -> None:
        with self._lock:
            key = (receiver.room, receiver.epoch)
            if self._closing or key in self._receivers:
                reason = "closed" if self._closing else "a receiver of this room and epoch exists"
                raise TransferError(f"cannot receive from {receiver.peer}: {reason}")
            self._receivers[key] = receiver

    def has_connection(self, peer: str) -> bool:
        """Whether a connection of this peer is open."""
        return any(connection.peer == peer for connection in list(self._connections.values()))

    def remove(self, receiver: TcpReceiver) -> None:
        with self._lock:
            self._receivers.pop((receiver.room, receiver.epoch), None)

    def disconnect(self, peer: str) -> None:
        """Fail the peer's receivers and shut its connections down. Returns at once: while copies
        are under way :meth:`TcpReceiver.drained` is False, and the thread drops the connections."""
        self._fail_all(TransferError(f"{peer} was disconnected"), peer)
        with self._lock:
            for connection in self._connections.values():
                if connection.peer == peer:
                    with contextlib.suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            self._closing = True
        self._waker.wake()
        self._thread.join()
        self._fail_all(TransferError("the transfer manager was closed"))
        if self._scatters is not None:
            self._scatters.close()

    def _fail_all(self, error: TransferError, peer: str | None = None) -> None:
        with self._lock:
            ended = [r for r in self._receivers.values() if peer in (None, r.peer)]
        for receiver in ended:
            receiver.fail(error)

    # ---- the thread

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(timeout=1.0):
                if isinstance(key.data, _Connection):
                    self._serve(key.data)
                else:
                    key.data()
            self._resume_reading()
            self._acceptor.sweep()
        for connection in list(self._connections.values()):
            self._drop(connection, "this node stopped")
        self._acceptor.close()
        self._selector.close()
        self._waker.close()

    def _welcome(self, sock: socket.socket, peer: str, origin: str) -> None:
        connection = _Connection(next(self._numbers), sock, peer, origin)
        try:
            self._selector.register(sock, selectors.EVENT_READ, connection)
        except OSError as error:  # for example, the user may watch no more descriptors
            self._seldom.warn(f"cannot read the data connection of {connection}: {error}")
            sock.close()
            return
        with self._lock:
            self._connections[connection.number] = connection
        if self._scatters is not None:
            try:
                connection.buffers = self._scatters.buffers(partial(self._call_back, connection))
            except Exception as error:
                # For example, no memory can be pinned: it must not end the thread.
                logger.exception("cannot receive from %s", connection)
                self._drop(connection, str(error))
                return
        self.counters.connections += 1

    def _serve(self, connection: _Connection) -> None:
        if connection.number not in self._connections:
            return
        try:
            for _ in range(_READS_PER_TURN):
                landing = connection.landing
                if landing is not None and not landing.ready():
                    self._pause_reading(connection)
                    return
                if not self._read(connection):
                    return
        except BlockingIOError:
            return
        except _ClosedError:
            self._drop(connection, "closed by the peer")
        except PeerDataError as error:
            self._refuse(connection, str(error))
        except OSError as error:
            self._drop(connection, error.strerror or str(error))
        except Exception as error:
            # For example, a CUDA error: it must not end the thread.
            logger.exception("failed to receive from %s", connection)
            self._drop(connection, str(error))

    def _pause_reading(self, connection: _Connection) -> None:
        """Stop reading a connection until :meth:`_call_back` reports that its landing is ready."""
        self._selector.unregister(connection.sock)
        connection.paused = True

    def _call_back(self, connection: _Connection) -> None:
        """Have the thread read a paused connection again. Any thread."""
        self._resumed.append(connection)
        self._waker.wake()

    def _resume_reading(self) -> None:
        while self._resumed:
            connection = self._resumed.popleft()
            if connection.number not in self._connections:
                continue
            try:
                self._selector.register(connection.sock, selectors.EVENT_READ, connection)
            except OSError as error:
                self._seldom.warn(f"cannot read the data connection of {connection}: {error}")
                self._drop(connection, error.strerror or str(error))
                continue
            connection.paused = False

    def _read(self, connection: _Connection) -> bool:
        """One read; False when it took all there is, so that the next one would be in vain. Raises
        _ClosedError at the end of the stream."""
        if connection.frame is not None:
            return self._read_payload(connection)
        view = memoryview(connection.head)[connection.filled :]
        arrived = connection.sock.recv_into(view)
        if not arrived:
            raise _ClosedError
        connection.filled += arrived
        if connection.filled == len(connection.head):
            self._begin_frame(connection)
        return arrived == len(view)

    def _begin_frame(self, connection: _Connection) -> None:
        frame = decode_header(connection.head, self.memory.shape)
        with self._lock:
            receiver = self._receivers.get((frame.room, frame.epoch))
        connection.frame, connection.remaining = frame, frame.payload
        if receiver is not None and receiver.peer == connection.peer:
            if receiver.claim(frame.block, connection.number):
                connection.landing = self._landing(connection, receiver, frame)
                return
            self.counters.duplicate_frames += 1
        self._note_discarded(connection, frame)

    def _landing(self, connection: _Connection, receiver: TcpReceiver, frame: Frame) -> Landing:
        if self._scatters is None or connection.buffers is None:
            return DirectLanding(receiver, frame.block)
        return StagedLanding(
            self._scatters, connection.buffers, receiver, frame.block, frame.payload
        )

    def _note_discarded(self, connection: _Connection, frame: Frame) -> None:
        self.counters.discarded_frames += 1
        if time.monotonic() >= self._next_log:
            self._next_log = time.monotonic() + _LOG_INTERVAL
            logger.info(
                "discarded a frame from %s: room %s, epoch %d is unknown, over or has it already "
                "(%d discarded so far)",
                connection,
                frame.room.hex(),
                frame.epoch,
                self.counters.discarded_frames,
            )

    def _read_payload(self, connection: _Connection) -> bool:
        landing, asked = connection.landing, min(CALL_BYTES, connection.remaining)
        arrived = None if landing is None else landing.receive(connection.sock)
        if arrived is None:
            # Ended, perhaps in the middle of the frame: the rest must not touch the pages.
            connection.landing = None
            arrived = connection.sock.recv_into(self._discard[: connection.remaining])
            self.counters.discarded_bytes += arrived
        if not arrived:
            raise _ClosedError
        connection.remaining -= arrived
        if not connection.remaining:
            if connection.landing is not None and connection.frame is not None:
                self.counters.frames += 1
                self.counters.bytes += connection.frame.payload
            connection.frame = connection.landing = None
            connection.filled = 0
        return arrived >= asked

    def _refuse(self, connection: _Connection, reason: str) -> None:
        logger.warning("closed the data connection of %s: %s", connection, reason)
        self._drop(connection, reason)

    def _drop(self, connection: _Connection, reason: str) -> None:
        if not connection.paused:
            self._selector.unregister(connection.sock)
        # NOTE: without the lock `disconnect` could shut down the next socket with this descriptor.
        with self._lock:
            del self._connections[connection.number]
            connection.sock.close()
        if connection.landing is not None:
            connection.landing.abandon()
        if connection.frame is not None:
            self.counters.broken_connections += 1
        with self._lock:
            receivers = list(self._receivers.values())
        for receiver in receivers:
            receiver.lost(connection.number, reason)
