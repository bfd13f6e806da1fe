"""Sending side of the fake backend: a link that delays, loses and repeats writes."""

from __future__ import annotations

import contextlib
import heapq
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pd.core.errors import TransferError
from pd.core.messages import LEASE_SECONDS
from pd.transfer.fake.nic import ACK, SERVICE, WRITE, WRITE_MAGIC, receive_exactly
from pd.transfer.wire.greeting import greet_peer

if TYPE_CHECKING:
    from pd.transfer.fake.script import FaultScript, WritePlan
    from pd.transfer.fake.sender import FakeSender
    from pd.transfer.ranges import Block
    from pd.util.starvation import Patience

_CONNECT_SECONDS = 2.0
# A blocked call returns this often to check whether to continue.
_SLICE_SECONDS = 0.25
_CLOSE_SECONDS = 1.0


@dataclass(order=True)
class _Write:
    """One write under way.

    Attributes:
        number: its place in the link's life, and its name on the wire.
        again: seconds until it lands a second time, or None.
    """

    due: float
    number: int
    sender: FakeSender = field(compare=False)
    block: Block = field(compare=False)
    plan: WritePlan = field(compare=False)
    recallable: bool = field(compare=False)
    again: float | None = field(compare=False)


class FakeLink:
    """Writes to one peer. They wait in a heap, and then are on the wire until acknowledged."""

    def __init__(
        self,
        own: str,
        peer: str,
        address: tuple[str, int],
        key: bytes | None,
        script: FaultScript,
        patience: Patience,
    ) -> None:
        self.own, self.peer, self.address, self.key = own, peer, address, key
        self.script, self.patience = script, patience
        # Guards the link and all its senders.
        self.changed = threading.Condition(threading.RLock())
        self._began: float | None = None
        self._closed = False
        self._heap: list[_Write] = []
        self._wire: dict[int, _Write] = {}
        self._posted = 0
        self._sock: socket.socket | None = None
        self._closer: threading.Thread | None = None
        self._senders: set[FakeSender] = set()
        threading.Thread(target=self._run, name="pd-fake-wire", daemon=True).start()

    def add_sender(self, sender: FakeSender, began: float) -> None:
        with self.changed:
            if self._closed:
                raise TransferError(f"{self.peer} is not connected")
            self._began = began
            self._senders = {s for s in self._senders if not s.drained()} | {sender}

    def enqueue_sender(self, sender: FakeSender) -> None:
        """Take a sender's queued blocks at once, and make each a write."""
        while (block := sender.take_block()) is not None:
            sender.num_writes += 1
            self._posted += 1
            plan = self.script.plan_write(self.peer, sender.ordinal, sender.num_writes)
            due, number = time.monotonic() + plan.delay, self._posted
            self._push_write(
                _Write(due, number, sender, block, plan, plan.recallable, plan.duplicate_after)
            )

    def remove_sender(self, sender: FakeSender) -> None:
        """Recall a sender's writes that are not in the link yet."""
        stays = [w for w in self._heap if w.sender is not sender or not w.recallable]
        for write in [w for w in self._heap if w.sender is sender and w.recallable]:
            self._resolve_write(write, landed=False)
        self._heap = stays
        heapq.heapify(self._heap)

    def end_link(self, reason: str) -> None:
        """Drop waiting writes and fail everything.

        Returns at once. Writes on the wire hold up :meth:`FakeSender.drained` until they have
        landed, and a thread gives them a second for it.
        """
        with self.changed:
            if self._closed:
                return
            self._closed = True
            for sender in self._senders:
                sender.fail(TransferError(reason))
            # These writes could not be recalled.
            for write in self._heap:
                self._resolve_write(write, landed=False)
            self._heap = []
            self.changed.notify_all()
            sock = self._sock
            if sock is None:
                self._resolve_wire()
                return
            _shut_down(sock, socket.SHUT_WR)
            self._closer = threading.Thread(
                target=self._await_landings, args=(sock,), name="pd-fake-close", daemon=True
            )
            self._closer.start()

    def close(self, reason: str) -> None:
        """End the link, and wait up to a second for the writes on the wire."""
        self.end_link(reason)
        if self._closer is not None:
            self._closer.join()

    def _await_landings(self, sock: socket.socket) -> None:
        with self.changed:
            # The peer closes when it has read everything. A stopped peer does not, and then it has
            # to disconnect us before it uses the pages again.
            self.changed.wait_for(lambda: self._sock is None, timeout=_CLOSE_SECONDS)
            _shut_down(sock, socket.SHUT_RDWR)
            self._resolve_wire()

    def _push_write(self, write: _Write) -> None:
        heapq.heappush(self._heap, write)
        self.changed.notify_all()

    def _resolve_write(self, write: _Write, *, landed: bool) -> None:
        """Note that a write landed or never will."""
        if landed and write.again is not None and not self._closed:
            write.due, write.again = time.monotonic() + write.again, None
            write.recallable = False
            self._push_write(write)
            return
        write.sender.mark_read()
        write.sender.mark_sent()

    def _run(self) -> None:
        while True:
            write = self._next_due()
            if write is None:
                return
            self._issue_write(write)

    def _next_due(self) -> _Write | None:
        """Wait for the next write, and put it on the wire."""
        with self.changed:
            while not self._closed:
                now = time.monotonic()
                if not self._heap or self._heap[0].due > now:
                    self.changed.wait(self._heap[0].due - now if self._heap else None)
                    continue
                write = heapq.heappop(self._heap)
                began = now if self._began is None else self._began
                back = self.script.link_returns(self.peer, write.sender.ordinal, now - began)
                if back is not None and not write.plan.lost:
                    write.due, write.recallable = began + back, False
                    self._push_write(write)
                    continue
                self._wire[write.number] = write
                return write
            return None

    def _issue_write(self, write: _Write) -> None:
        sender = write.sender
        if write.plan.lost:
            with self.changed:
                sender.fail(TransferError(f"fake script: a write of room {sender.ordinal} is lost"))
                self._on_landed(write.number, landed=False)
            return
        try:
            sock = self._sock or self._open_socket()
        except (OSError, UnicodeError, TransferError) as error:
            # UnicodeError: an invalid host name.
            with self.changed:
                sender.fail(TransferError(f"cannot reach {self.peer}: {error}"))
                self._on_landed(write.number, landed=False)
            return
        block = write.block
        payload = sender.read_block(block, write.plan.corrupt)
        header = WRITE.pack(
            WRITE_MAGIC,
            write.number,
            sender.destination.key,
            block.layer_start,
            block.layer_stop - block.layer_start,
            block.token_stop - block.token_start,
            len(payload),
        )
        try:
            self._send_all(sock, header + sender.encode_slots(block) + payload)
        except OSError as error:
            # Writes on the wire may land until the peer has closed its end.
            _shut_down(sock, socket.SHUT_WR)
            sender.fail(TransferError(f"the link to {self.peer} was lost: {error}"))

    def _send_all(self, sock: socket.socket, data: bytes) -> None:
        """Send everything. Raises OSError if the peer takes nothing for too long, or the link is
        lost."""
        left, moved = memoryview(data), time.monotonic()
        while left:
            try:
                left = left[sock.send(left) :]
                moved = time.monotonic()
            except TimeoutError:
                if not self._may_still_come(moved):
                    raise

    def _may_still_come(self, since: float) -> bool:
        return not self.patience.is_over(since, LEASE_SECONDS, self.peer)

    def _open_socket(self) -> socket.socket:
        sock = socket.create_connection(self.address, timeout=_CONNECT_SECONDS)
        try:
            greet_peer(sock, SERVICE, self.own, self.peer, self.key, self.patience)
            sock.settimeout(_SLICE_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self.changed:
                if self._closed:
                    raise TransferError("disconnected")
                self._sock = sock
        except (OSError, TransferError):
            sock.close()
            raise
        threading.Thread(
            target=self._read_acks, args=(sock,), name="pd-fake-acks", daemon=True
        ).start()
        return sock

    def _read_acks(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError), sock:
            while True:
                if not _has_input(sock):
                    continue
                number, performed = ACK.unpack(
                    receive_exactly(sock, ACK.size, self._may_still_come)
                )
                with self.changed:
                    write = self._wire.get(number)
                    if write is not None and not performed:
                        write.sender.fail(TransferError(f"{self.peer} refused a write"))
                    self._on_landed(number, landed=performed)
        with self.changed:
            # The peer closed its end, so no write on the wire can land any more.
            self._sock = None
            self._resolve_wire()
            self.changed.notify_all()

    def _resolve_wire(self) -> None:
        for number in list(self._wire):
            sender = self._wire[number].sender
            sender.fail(TransferError(f"the link to {self.peer} was lost"))
            self._on_landed(number, landed=False)

    def _on_landed(self, number: int, *, landed: bool) -> None:
        write = self._wire.pop(number, None)
        if write is not None:
            self._resolve_write(write, landed=landed)


def _has_input(sock: socket.socket) -> bool:
    """Wait a while for an acknowledgement, and return whether one arrived."""
    try:
        sock.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return False
    return True


def _shut_down(sock: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(how)
