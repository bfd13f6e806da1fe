"""Sending side of one data connection of the tcp backend."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.core.messages import LEASE_SECONDS
from pd.core.seldom import Seldom
from pd.transfer.pool_memory import in_buffer
from pd.transfer.tcp.host_buffers import DEPTH, Gathers
from pd.transfer.tcp.inbox import SERVICE
from pd.transfer.wire.dialler import Dialler, PeerGoneError, longer_pause
from pd.transfer.wire.greeting import PeerRefusedError

if TYPE_CHECKING:
    import torch

    from pd.transfer.copier import CopyTicket
    from pd.transfer.pool_memory import PoolMemory, Stretches
    from pd.transfer.ranges import Block
    from pd.transfer.tcp.link import TcpLink, TcpSender

logger = logging.getLogger(__name__)

# A blocked send returns this often to see whether it should go on.
_SLICE_SECONDS = 0.25
# Seconds before a lane without buffers tries again to make some, while others do its work.
_STAGE_PAUSE = 1.0


class TcpLane:
    """One connection to the peer and its thread.

    Blocks of a staged pool are copied ahead: while one is on the socket, the next is on its way
    into the other buffer.
    """

    def __init__(self, link: TcpLink, number: int, memory: PoolMemory) -> None:
        self._link, self._number, self._memory = link, number, memory
        self._sock: socket.socket | None = None
        self._dialler = Dialler(
            SERVICE, link.own, link.peer, link.address, link.key, link.patience, "data connection"
        )
        self._backoff = 0.0
        self._gathers: Gathers | None = None
        self._no_buffers = Seldom(logger)
        self._ahead: deque[tuple[TcpSender, Block, tuple[torch.Tensor, CopyTicket] | None]] = (
            deque()
        )
        threading.Thread(target=self._run, name=f"pd-tcp-lane-{number}", daemon=True).start()

    def shut_down(self) -> None:
        """Wake the thread from a blocked send; the link is closed already."""
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        # Before there is work, since it saves the first room their time.
        self._stage()
        self._connect()
        while self._ahead or self._link.wait_for_work():
            if not self._stage():
                continue
            # What was taken before the connection was lost is released before anything else.
            if not self._link.closed and (self._alive() or (not self._ahead and self._connect())):
                self._take()
            if self._ahead:
                self._send(*self._ahead.popleft())
        self._close()

    @property
    def can_read(self) -> bool:
        """Whether the lane has what it takes to read the pool: its buffers, if the pool is
        staged."""
        return self._gathers is not None or not self._memory.staged

    def _stage(self) -> bool:
        """Make the buffers, unless there are some or none are needed. False if that failed; then
        no room waits for this lane."""
        if self.can_read:
            return True
        try:
            self._gathers = Gathers(self._memory.pool)
        except Exception as error:  # noqa: BLE001
            # For example, no memory can be pinned.
            self._no_buffers.warn(f"cannot stage KV for {self._link.peer}: {error!r}")
            failure = TransferError(f"cannot stage KV in host memory: {error}")
            if self._link.cannot_stage(failure):
                # What is queued would wake this lane again at once.
                time.sleep(_STAGE_PAUSE)
        return self.can_read

    def _take(self) -> None:
        depth = 1 if self._gathers is None else DEPTH
        while len(self._ahead) < depth:
            taken = self._link.take(self._number)
            if taken is None:
                return
            sender, block = taken
            begun = None
            if self._gathers is not None:
                try:
                    begun = self._gathers.begin(sender.tables, block)
                except Exception as error:
                    # For example, a CUDA error: it ends the room only.
                    logger.exception("cannot read the pool for %s", self._link.peer)
                    sender.fail(TransferError(f"cannot read the pool: {error}"))
            self._ahead.append((sender, block, begun))

    def _send(
        self, sender: TcpSender, block: Block, begun: tuple[torch.Tensor, CopyTicket] | None
    ) -> None:
        try:
            if begun is None:
                try:
                    if sender.active:
                        self._push(sender.in_place(block))
                finally:
                    self._link.copied(sender)
            else:
                host, ticket = begun
                try:
                    ticket.wait()
                finally:
                    self._link.copied(sender)
                if sender.active:
                    self._push(in_buffer(host, sender.header(block)))
        except OSError as error:
            self._lost(error.strerror or str(error))
        except Exception as error:
            # For example, a CUDA error: it ends the room only.
            logger.exception("cannot read the pool for %s", self._link.peer)
            sender.fail(TransferError(f"cannot read the pool: {error}"))
        finally:
            self._link.release(sender)

    def _push(self, stretches: Stretches) -> None:
        if self._sock is None:
            raise ConnectionResetError("the connection was lost")
        moved = time.monotonic()
        while stretches.done < stretches.total:
            try:
                stretches.send(self._sock)
                moved = self._link.progress = time.monotonic()
            except BlockingIOError:
                link = self._link
                if link.closed or link.patience.is_over(moved, LEASE_SECONDS, link.peer):
                    seconds = time.monotonic() - moved
                    raise TimeoutError(f"it took nothing for {seconds:.1f} s") from None

    def _alive(self) -> bool:
        """Whether the connection is up as far as this end knows. A peer never sends after the
        greeting, so anything to read is its end."""
        if self._sock is None:
            return False
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError as error:
            self._lost(error.strerror or str(error))
            return False
        self._lost("closed by the peer")
        return False

    def _connect(self) -> bool:
        link = self._link
        if self._backoff:
            with link.changed:
                link.changed.wait_for(lambda: link.closed, timeout=self._backoff)
        self._backoff = longer_pause(self._backoff)
        if link.closed:
            return False
        try:
            sock = self._dialler.connect()
        except PeerGoneError as error:
            link.nobody_listens(error)
            return False
        except PeerRefusedError as error:
            link.refused(error)
            return False
        if sock is None:
            return False
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seconds, fraction = divmod(_SLICE_SECONDS, 1)
        timeout = struct.pack("@ll", int(seconds), int(fraction * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._sock, self._backoff = sock, 0.0
        return True

    def _lost(self, reason: str) -> None:
        self._close()
        self._link.lane_lost(self._number, reason)

    def _close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None
