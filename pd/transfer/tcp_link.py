"""P's side of the tcp backend: for each peer a queue of ranges and the threads that send them."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from pd.core.errors import PDError, TransferError
from pd.core.messages import LEASE_SECONDS
from pd.transfer.base import Sender, TransferState
from pd.transfer.frames import encode_header
from pd.transfer.greeting import RefusedError, greet
from pd.transfer.ranges import Block, check_pages
from pd.transfer.tcp_inbox import SERVICE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.transfer.base import IntArray
    from pd.transfer.memory import PoolMemory, Stretches

logger = logging.getLogger(__name__)

# Large enough that headers and lookups vanish, small enough that rooms take turns on the link.
FRAME_BYTES = 4 << 20
# A blocked send returns this often to see whether it should go on.
_SLICE_SECONDS = 0.25
_GREETING_SECONDS = 2.0
_MAX_BACKOFF = 1.0


class TcpSender(Sender):
    """A queue of blocks. A block is read from the pool when its turn comes, and the pages are free
    once the call that copies it into the kernel has returned."""

    def __init__(
        self,
        link: Link,
        memory: PoolMemory,
        room: bytes,
        epoch: int,
        pages: IntArray,
        tokens: range,
    ) -> None:
        check_pages(pages, memory.page_size, memory.num_slots, tokens.start, tokens.stop)
        self.room, self.epoch = room, epoch
        self.error: PDError | None = None
        self.lanes: set[int] = set()
        self.in_hand = 0
        self._link, self._memory = link, memory
        self._pages, self._tokens = pages.copy(), tokens
        self._blocks: deque[Iterator[Block]] = deque()
        self._state = TransferState.ACTIVE
        self._finished = False
        self._bytes = 0
        self.waiting_since = 0.0

    @property
    def bytes_sent(self) -> int:
        return self._bytes

    @property
    def state(self) -> TransferState:
        return self._state

    def send(self, token_start: int, token_stop: int, layer_start: int, layer_stop: int) -> None:
        if not self._tokens.start <= token_start <= token_stop <= self._tokens.stop:
            raise ValueError(f"tokens [{token_start}, {token_stop}) are not in {self._tokens}")
        if not 0 <= layer_start <= layer_stop <= self._memory.num_layers:
            raise ValueError(f"layers [{layer_start}, {layer_stop}) are not in the pool")
        block = Block(token_start, token_stop, layer_start, layer_stop)
        if not block.cells:
            return
        with self._link.changed:
            if self._state is not TransferState.ACTIVE:
                return
            assert not self._finished, "send after finish"
            self._bytes += block.cells * self._memory.cell_bytes
            self._blocks.append(block.split(max(1, FRAME_BYTES // self._memory.cell_bytes)))
            self._link.enqueue(self)

    def finish(self) -> None:
        with self._link.changed:
            self._finished = True
            self.settle()

    def poll(self) -> TransferState:
        if self._state is TransferState.ACTIVE:
            self._link.check_progress(self)
        return self._state

    def abort(self) -> None:
        self.fail(TransferError("aborted"))

    def drained(self) -> bool:
        with self._link.changed:
            return self._state is not TransferState.ACTIVE and not self.in_hand

    def fail(self, error: PDError) -> None:
        """Record the first error and drop what is queued."""
        with self._link.changed:
            if self._state is TransferState.ACTIVE:
                self._state, self.error = TransferState.FAILED, error
                self._blocks.clear()
                self._link.forget(self)

    # ---- called by the link, which holds its lock

    def next_block(self) -> Block | None:
        while self._blocks:
            block = next(self._blocks[0], None)
            if block is not None:
                return block
            self._blocks.popleft()
        return None

    def settle(self) -> None:
        """DONE when nothing is left to send."""
        idle = not self._blocks and not self.in_hand
        if self._state is TransferState.ACTIVE and self._finished and idle:
            self._state = TransferState.DONE
            self._link.forget(self)

    # ---- called by a lane, without the lock

    def stretches(self, block: Block) -> Stretches:
        payload = block.cells * self._memory.cell_bytes
        header = encode_header(self.room, self.epoch, block, payload)
        return self._memory.outgoing(header, self._pages, block)


class Link:
    """Everything on its way to one peer. Rooms take turns, a frame each."""

    def __init__(
        self, own: str, peer: str, address: tuple[str, int], key: bytes | None, num_lanes: int
    ) -> None:
        self.own, self.peer, self.address, self.key = own, peer, address, key
        # Guards the link and all its senders. Reentrant: a sender that ends takes itself out.
        self.changed = threading.Condition(threading.RLock())
        self.closed = False
        self.refusal: RefusedError | None = None
        self.progress = time.monotonic()
        self._senders: set[TcpSender] = set()
        self._queue: deque[TcpSender] = deque()
        self._num_lanes = num_lanes
        self._in_hand = 0
        self._lanes: list[Lane] = []

    def start(self) -> None:
        """Open the connections. Not before somebody sends: a node that only receives needs none."""
        with self.changed:
            if not self._lanes and not self.closed:
                self._lanes = [Lane(self, number) for number in range(self._num_lanes)]

    def open(self, sender: TcpSender) -> None:
        self.start()
        with self.changed:
            if self.closed:
                raise TransferError(f"{self.peer} is not connected")
            if self.refusal is not None:
                raise self.refusal
            self._senders.add(sender)

    def enqueue(self, sender: TcpSender) -> None:
        if sender not in self._queue:
            self._queue.append(sender)
            sender.waiting_since = time.monotonic()
            self.changed.notify()

    def forget(self, sender: TcpSender) -> None:
        self._senders.discard(sender)
        with contextlib.suppress(ValueError):
            self._queue.remove(sender)

    def wait_for_work(self) -> bool:
        """Block until something is queued; False when the link is closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self._queue)
            return not self.closed

    def take(self, lane: int) -> tuple[TcpSender, Block] | None:
        """The next block, now in the lane's hand until :meth:`put_down`."""
        with self.changed:
            while self._queue:
                sender = self._queue.popleft()
                block = sender.next_block()
                if block is None:
                    sender.settle()
                    continue
                self._queue.append(sender)
                sender.in_hand += 1
                self._in_hand += 1
                sender.lanes.add(lane)
                return sender, block
            return None

    def put_down(self, sender: TcpSender) -> None:
        with self.changed:
            sender.in_hand -= 1
            self._in_hand -= 1
            if self.closed:
                self.changed.notify_all()
            self.progress = sender.waiting_since = time.monotonic()
            sender.settle()

    def lane_lost(self, lane: int, reason: str) -> None:
        """What this lane carried may not have arrived: its rooms end."""
        error = TransferError(f"the data connection to {self.peer} was lost: {reason}")
        with self.changed:
            for sender in [s for s in self._senders if lane in s.lanes]:
                sender.fail(error)

    def refused(self, error: RefusedError) -> None:
        """The peer will not have us: whoever waits for it ends now."""
        with self.changed:
            self.refusal = error
            for sender in list(self._senders):
                sender.fail(error)

    def nobody_listens(self) -> None:
        """An instance listens as long as it lives: rooms with data for it need not wait longer."""
        with self.changed:
            for sender in list(self._queue):
                sender.fail(TransferError(f"{self.peer} is gone: nobody listens at its address"))

    def check_progress(self, sender: TcpSender) -> None:
        with self.changed:
            if sender not in self._queue:
                return
            idle = time.monotonic() - max(self.progress, sender.waiting_since)
            if idle > LEASE_SECONDS:
                sender.fail(
                    TransferError(f"no KV data could be sent to {self.peer} for {idle:.1f} s")
                )

    def close(self, reason: str) -> None:
        with self.changed:
            self.closed = True
            for sender in list(self._senders):
                sender.fail(TransferError(reason))
            self.changed.notify_all()
        for lane in self._lanes:
            lane.hang_up()
        with self.changed:
            self.changed.wait_for(lambda: not self._in_hand)


class Lane:
    """One connection to the peer and its thread."""

    def __init__(self, link: Link, number: int) -> None:
        self._link, self._number = link, number
        self._sock: socket.socket | None = None
        self._backoff = 0.0
        threading.Thread(target=self._run, name=f"pd-tcp-lane-{number}", daemon=True).start()

    def hang_up(self) -> None:
        """Wake the thread from a blocked send; the link is closed already."""
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        # Connecting before there is work saves the first room a round trip or two.
        self._connect()
        while self._link.wait_for_work():
            if not self._alive() and not self._connect():
                continue
            taken = self._link.take(self._number)
            if taken is not None:
                self._send(*taken)
        self._close()

    def _send(self, sender: TcpSender, block: Block) -> None:
        try:
            self._push(sender.stretches(block))
        except OSError as error:
            self._lost(error.strerror or str(error))
        except Exception as error:
            # Say a CUDA error: it ends the room only.
            logger.exception("cannot read the pool for %s", self._link.peer)
            sender.fail(TransferError(f"cannot read the pool: {error}"))
        finally:
            self._link.put_down(sender)

    def _push(self, stretches: Stretches) -> None:
        assert self._sock is not None
        moved = time.monotonic()
        while stretches.done < stretches.total:
            try:
                stretches.send(self._sock)
                moved = self._link.progress = time.monotonic()
            except BlockingIOError:
                if self._link.closed or time.monotonic() - moved > LEASE_SECONDS:
                    raise TimeoutError(f"it took nothing for {LEASE_SECONDS} s") from None

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
        self._backoff = min(_MAX_BACKOFF, self._backoff * 2 or 0.05)
        if link.closed:
            return False
        try:
            sock = socket.create_connection(link.address, timeout=_GREETING_SECONDS)
        except (OSError, UnicodeError) as error:
            # UnicodeError: a host that cannot be a name.
            logger.info("cannot reach %s at %s:%d: %s", link.peer, *link.address, error)
            if isinstance(error, ConnectionRefusedError):
                link.nobody_listens()
            return False
        try:
            greet(sock, SERVICE, link.own, link.peer, link.key)
        except RefusedError as error:
            sock.close()
            logger.warning("%s", error)
            link.refused(error)
            return False
        except OSError as error:
            sock.close()
            logger.info("cannot open a data connection to %s: %s", link.peer, error)
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
