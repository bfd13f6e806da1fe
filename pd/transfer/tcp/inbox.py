"""Receiving side of the tcp backend: one thread reads all data connections into the pool.

If the pool is staged, the thread begins copies without waiting for them. It pauses a connection
whose buffers are all being unpacked, and keeps reading the others.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import selectors
import socket
import threading
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.transfer.common.open_receivers import OpenReceivers
from pd.transfer.pool_memory import CALL_BYTES
from pd.transfer.tcp.frames import HEADER, Frame, decode_header
from pd.transfer.tcp.host_buffers import Scatters, StagingBuffers
from pd.transfer.tcp.landing import DirectLanding, StagedLanding
from pd.transfer.wire.acceptor import Acceptor
from pd.transfer.wire.errors import PeerDataError
from pd.util.waker import Waker
from pd.util.warning_limit import WarningLimit

if TYPE_CHECKING:
    from pd.transfer.pool_memory import PoolMemory
    from pd.transfer.tcp.landing import Landing
    from pd.transfer.tcp.receiver import TcpReceiver
    from pd.util.starvation import Patience

logger = logging.getLogger(__name__)

SERVICE = "tcp"
# One connection may keep the thread for this many reads before it is the others' turn.
_READS_PER_TURN = 16


@dataclass
class ReceiveCounters:
    """Counts of received and discarded frames since the start."""

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
    """One connection of a peer, and how far we have read the header or payload of a frame."""

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
        self.memory = memory
        self.counters = ReceiveCounters()
        # Guards the receivers and the connections. Only the thread changes connections.
        self._lock = threading.Lock()
        self.receivers: OpenReceivers[TcpReceiver] = OpenReceivers(self._lock, patience)
        self._connections: dict[int, _Connection] = {}
        self._numbers = itertools.count(1)
        self._scatters = Scatters(memory.pool) if memory.staged else None
        self._resumed: deque[_Connection] = deque()
        self._closing = False
        self._discard = memoryview(bytearray(1 << 20))
        self._warnings = WarningLimit(logger)
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(
            SERVICE,
            instance_id,
            host,
            key,
            patience,
            self._selector,
            "data connection",
            self._on_accepted,
        )
        self._waker = Waker()
        self._selector.register(self._waker, selectors.EVENT_READ, self._waker.drain)
        self._thread = threading.Thread(target=self._run, name="pd-tcp-inbox", daemon=True)
        self._thread.start()

    # ---- called by any thread

    @property
    def port(self) -> int:
        return self._acceptor.port

    def has_connection(self, peer: str) -> bool:
        """Whether this peer has an open connection."""
        return any(connection.peer == peer for connection in list(self._connections.values()))

    def disconnect_peer(self, peer: str) -> None:
        """Fail the peer's receivers and shut its connections down.

        Returns at once. :meth:`TcpReceiver.drained` stays False while copies are under way, and the
        thread drops the connections.
        """
        self.receivers.fail_receivers(TransferError(f"{peer} was disconnected"), peer)
        with self._lock:
            for connection in self._connections.values():
                if connection.peer == peer:
                    with contextlib.suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.receivers.close()
        self._closing = True
        self._waker.wake_poll()
        self._thread.join()
        self.receivers.fail_receivers(TransferError("the transfer manager was closed"))
        if self._scatters is not None:
            self._scatters.close()

    # ---- the thread

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(timeout=1.0):
                if isinstance(key.data, _Connection):
                    self._serve_connection(key.data)
                else:
                    key.data()
            self._resume_reading()
            self._acceptor.close_overdue()
        for connection in list(self._connections.values()):
            self._drop_connection(connection, "this node stopped")
        self._acceptor.close()
        self._selector.close()
        self._waker.close()

    def _on_accepted(self, sock: socket.socket, peer: str, origin: str) -> None:
        connection = _Connection(next(self._numbers), sock, peer, origin)
        try:
            self._selector.register(sock, selectors.EVENT_READ, connection)
        # For example, the user has reached the limit of watched descriptors.
        except OSError as error:
            self._warnings.log_warning(f"cannot read the data connection of {connection}: {error}")
            sock.close()
            return
        with self._lock:
            self._connections[connection.number] = connection
        if self._scatters is not None:
            try:
                connection.buffers = self._scatters.make_buffers(
                    partial(self._call_back, connection)
                )
            except Exception as error:
                # For example, pinning memory failed. It must not end the thread.
                logger.exception("cannot receive from %s", connection)
                self._drop_connection(connection, str(error))
                return
        self.counters.connections += 1

    def _serve_connection(self, connection: _Connection) -> None:
        if connection.number not in self._connections:
            return
        try:
            for _ in range(_READS_PER_TURN):
                landing = connection.landing
                if landing is not None and not landing.is_ready():
                    # Until `_call_back` reports the landing as ready.
                    self._selector.unregister(connection.sock)
                    connection.paused = True
                    return
                if not self._read_some(connection):
                    return
        except BlockingIOError:
            return
        except _ClosedError:
            self._drop_connection(connection, "closed by the peer")
        except PeerDataError as error:
            self._refuse_connection(connection, str(error))
        except OSError as error:
            self._drop_connection(connection, error.strerror or str(error))
        except Exception as error:
            # For example, a CUDA error. It must not end the thread.
            logger.exception("failed to receive from %s", connection)
            self._drop_connection(connection, str(error))

    def _call_back(self, connection: _Connection) -> None:
        """Have the thread read a paused connection again. Any thread may call this."""
        self._resumed.append(connection)
        self._waker.wake_poll()

    def _resume_reading(self) -> None:
        while self._resumed:
            connection = self._resumed.popleft()
            if connection.number not in self._connections:
                continue
            try:
                self._selector.register(connection.sock, selectors.EVENT_READ, connection)
            except OSError as error:
                self._warnings.log_warning(
                    f"cannot read the data connection of {connection}: {error}"
                )
                self._drop_connection(connection, error.strerror or str(error))
                continue
            connection.paused = False

    def _read_some(self, connection: _Connection) -> bool:
        """Read once. Return False if another read would find nothing. Raises _ClosedError at the
        end of the stream."""
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
        receiver = self.receivers.find_receiver(frame.room, frame.epoch, connection.peer)
        connection.frame, connection.remaining = frame, frame.payload
        if receiver is not None:
            if receiver.claim_block(frame.block, connection.number):
                scatters, buffers = self._scatters, connection.buffers
                connection.landing = (
                    DirectLanding(receiver, frame.block)
                    if scatters is None or buffers is None
                    else StagedLanding(scatters, buffers, receiver, frame.block, frame.payload)
                )
                return
            self.counters.duplicate_frames += 1
        self.counters.discarded_frames += 1
        count = self.counters.discarded_frames
        self.receivers.log_discarded(connection, frame.room, frame.epoch, count)

    def _read_payload(self, connection: _Connection) -> bool:
        landing, asked = connection.landing, min(CALL_BYTES, connection.remaining)
        arrived = None if landing is None else landing.receive_some(connection.sock)
        if arrived is None:
            # The room has ended, perhaps within the frame, so the rest must not touch the pages.
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

    def _refuse_connection(self, connection: _Connection, reason: str) -> None:
        logger.warning("closed the data connection of %s: %s", connection, reason)
        self._drop_connection(connection, reason)

    def _drop_connection(self, connection: _Connection, reason: str) -> None:
        if not connection.paused:
            self._selector.unregister(connection.sock)
        # NOTE: without the lock `disconnect_peer` could shut down the next socket with this
        # descriptor.
        with self._lock:
            del self._connections[connection.number]
            connection.sock.close()
        if connection.landing is not None:
            connection.landing.give_up()
        if connection.frame is not None:
            self.counters.broken_connections += 1
        for receiver in self.receivers.list_receivers():
            receiver.on_connection_lost(connection.number, reason)
