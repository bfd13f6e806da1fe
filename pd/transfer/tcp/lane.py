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
from pd.transfer.pool_memory import wrap_buffer
from pd.transfer.tcp.host_buffers import DEPTH, Gathers
from pd.transfer.tcp.inbox import SERVICE
from pd.transfer.wire.dialler import Dialler, PeerGoneError, longer_pause
from pd.transfer.wire.greeting import PeerRefusedError
from pd.util.warning_limit import WarningLimit

if TYPE_CHECKING:
    import torch

    from pd.transfer.copier import CopyTicket
    from pd.transfer.pool_memory import PoolMemory, Stretches
    from pd.transfer.ranges import Block
    from pd.transfer.tcp.link import TcpLink
    from pd.transfer.tcp.sender import TcpSender

logger = logging.getLogger(__name__)

# A blocked send returns this often to check whether to continue.
_SLICE_SECONDS = 0.25
# Seconds before a lane without buffers tries again to make some. Other lanes do its work meanwhile.
_STAGE_PAUSE = 1.0


class TcpLane:
    """One connection to the peer and its thread.

    In a staged pool we copy blocks ahead: while one is on the socket, the next is on its way into
    the other buffer.
    """

    def __init__(self, link: TcpLink, number: int, memory: PoolMemory) -> None:
        self._link, self._number, self._memory = link, number, memory
        self._sock: socket.socket | None = None
        self._dialler = Dialler(
            SERVICE, link.own, link.peer, link.address, link.key, link.patience, "data connection"
        )
        self._backoff = 0.0
        self._gathers: Gathers | None = None
        self._no_buffers = WarningLimit(logger)
        self._ahead: deque[tuple[TcpSender, Block, tuple[torch.Tensor, CopyTicket] | None]] = (
            deque()
        )
        threading.Thread(target=self._run, name=f"pd-tcp-lane-{number}", daemon=True).start()

    def shut_down(self) -> None:
        """Wake the thread from a blocked send. The link is closed already."""
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        # We prepare before there is work, so the first room does not have to wait.
        self._make_gathers()
        self._try_connect()
        while self._ahead or self._link.wait_for_work():
            if not self._make_gathers():
                continue
            # Before anything else, release the blocks taken before the connection was lost.
            if not self._link.closed and (
                self._is_alive() or (not self._ahead and self._try_connect())
            ):
                self._take_ahead()
            if self._ahead:
                self._send_block(*self._ahead.popleft())
        self._close_socket()

    @property
    def can_read(self) -> bool:
        """Whether the lane can read the pool, because it has its buffers or needs none."""
        return self._gathers is not None or not self._memory.staged

    def _make_gathers(self) -> bool:
        """Make the buffers if they are missing and needed. Return False on failure; then no room
        waits for this lane."""
        if self.can_read:
            return True
        try:
            self._gathers = Gathers(self._memory.pool)
        except Exception as error:  # noqa: BLE001
            # For example, pinning memory failed.
            self._no_buffers.log_warning(f"cannot stage KV for {self._link.peer}: {error!r}")
            failure = TransferError(f"cannot stage KV in host memory: {error}")
            if self._link.on_staging_failed(failure):
                # Queued blocks would wake this lane again at once.
                time.sleep(_STAGE_PAUSE)
        return self.can_read

    def _take_ahead(self) -> None:
        depth = 1 if self._gathers is None else DEPTH
        while len(self._ahead) < depth:
            taken = self._link.take_block(self._number)
            if taken is None:
                return
            sender, block = taken
            begun = None
            if self._gathers is not None:
                try:
                    begun = self._gathers.begin_gather(sender.tables, block)
                except Exception as error:
                    # For example, a CUDA error. It ends only the room.
                    logger.exception("cannot read the pool for %s", self._link.peer)
                    sender.fail(TransferError(f"cannot read the pool: {error}"))
            self._ahead.append((sender, block, begun))

    def _send_block(
        self, sender: TcpSender, block: Block, begun: tuple[torch.Tensor, CopyTicket] | None
    ) -> None:
        try:
            if begun is None:
                try:
                    if sender.is_active:
                        self._push_stretches(sender.locate_block(block))
                finally:
                    self._link.mark_read(sender)
            else:
                host, ticket = begun
                try:
                    ticket.wait()
                finally:
                    self._link.mark_read(sender)
                if sender.is_active:
                    self._push_stretches(wrap_buffer(host, sender.make_header(block)))
        except OSError as error:
            self._on_lost(error.strerror or str(error))
        except Exception as error:
            # For example, a CUDA error: it ends the room only.
            logger.exception("cannot read the pool for %s", self._link.peer)
            sender.fail(TransferError(f"cannot read the pool: {error}"))
        finally:
            self._link.release_block(sender)

    def _push_stretches(self, stretches: Stretches) -> None:
        if self._sock is None:
            raise ConnectionResetError("the connection was lost")
        moved = time.monotonic()
        while stretches.done < stretches.total:
            try:
                stretches.send_to(self._sock)
                moved = self._link.progress = time.monotonic()
            except BlockingIOError:
                link = self._link
                if link.closed or link.patience.is_over(moved, LEASE_SECONDS, link.peer):
                    seconds = time.monotonic() - moved
                    raise TimeoutError(f"it took nothing for {seconds:.1f} s") from None

    def _is_alive(self) -> bool:
        """Whether the connection is up as far as we know. A peer never sends after the greeting, so
        any input is its end."""
        if self._sock is None:
            return False
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError as error:
            self._on_lost(error.strerror or str(error))
            return False
        self._on_lost("closed by the peer")
        return False

    def _try_connect(self) -> bool:
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
            link.on_peer_gone(error)
            return False
        except PeerRefusedError as error:
            link.on_refused(error)
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

    def _on_lost(self, reason: str) -> None:
        self._close_socket()
        self._link.on_lane_lost(self._number, reason)

    def _close_socket(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None
