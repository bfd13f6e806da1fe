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
from pd.transfer.wire.greeting import greet

if TYPE_CHECKING:
    from pd.core.starvation import Patience
    from pd.transfer.fake.script import FaultScript, WritePlan
    from pd.transfer.fake.sender import FakeSender
    from pd.transfer.ranges import Block

_CONNECT_SECONDS = 2.0
# A blocked call returns this often to see whether it should go on.
_SLICE_SECONDS = 0.25
_CLOSE_SECONDS = 1.0


@dataclass(order=True)
class _Write:
    """One write on its way.

    Attributes:
        number: its place in the link's life and its name on the wire.
        again: seconds after which it lands a second time; None when it does not (any more).
    """

    due: float
    number: int
    sender: FakeSender = field(compare=False)
    block: Block = field(compare=False)
    plan: WritePlan = field(compare=False)
    recallable: bool = field(compare=False)
    again: float | None = field(compare=False)


class FakeLink:
    """Writes to one peer: waiting in a heap, or on the wire until acknowledged."""

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

    def open(self, sender: FakeSender, began: float) -> None:
        with self.changed:
            if self._closed:
                raise TransferError(f"{self.peer} is not connected")
            self._began = began
            self._senders = {s for s in self._senders if not s.drained()} | {sender}

    def post(self, sender: FakeSender, block: Block, ordinal: int) -> None:
        plan = self.script.plan_write(self.peer, sender.ordinal, ordinal)
        self._posted += 1
        due = time.monotonic() + plan.delay
        self._push(
            _Write(due, self._posted, sender, block, plan, plan.recallable, plan.duplicate_after)
        )

    def recall(self, sender: FakeSender) -> None:
        """Take back what is not in the link yet."""
        stays = [w for w in self._heap if w.sender is not sender or not w.recallable]
        for write in [w for w in self._heap if w.sender is sender and w.recallable]:
            self._resolve(write, landed=False)
        self._heap = stays
        heapq.heapify(self._heap)

    def end(self, reason: str) -> None:
        """Drop what waits and fail everything. Returns at once: what is on the wire holds up
        :meth:`FakeSender.drained` until it has landed, for which a thread gives it a second."""
        with self.changed:
            if self._closed:
                return
            self._closed = True
            for sender in self._senders:
                sender.fail(TransferError(reason))
            # Writes that could not be recalled.
            for write in self._heap:
                self._resolve(write, landed=False)
            self._heap = []
            self.changed.notify_all()
            sock = self._sock
            if sock is None:
                self._resolve_wire()
                return
            _shutdown(sock, socket.SHUT_WR)
            self._closer = threading.Thread(
                target=self._linger, args=(sock,), name="pd-fake-close", daemon=True
            )
            self._closer.start()

    def close(self, reason: str) -> None:
        """End the link and wait for what is on the wire, for a second at most."""
        self.end(reason)
        if self._closer is not None:
            self._closer.join()

    def _linger(self, sock: socket.socket) -> None:
        with self.changed:
            # The peer closes when it has read everything. A stopped peer does not: then it is up
            # to the peer to disconnect us before it uses the pages again.
            self.changed.wait_for(lambda: self._sock is None, timeout=_CLOSE_SECONDS)
            _shutdown(sock, socket.SHUT_RDWR)
            self._resolve_wire()

    def _push(self, write: _Write) -> None:
        heapq.heappush(self._heap, write)
        self.changed.notify_all()

    def _resolve(self, write: _Write, *, landed: bool) -> None:
        """The write landed or never will."""
        if landed and write.again is not None and not self._closed:
            write.due, write.again = time.monotonic() + write.again, None
            write.recallable = False
            self._push(write)
            return
        write.sender.was_read()
        write.sender.was_sent()

    def _run(self) -> None:
        while True:
            write = self._next_due()
            if write is None:
                return
            self._issue(write)

    def _next_due(self) -> _Write | None:
        """Wait for the next write to go out; it is on the wire from now on."""
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
                    self._push(write)
                    continue
                self._wire[write.number] = write
                return write
            return None

    def _issue(self, write: _Write) -> None:
        sender = write.sender
        if write.plan.lost:
            with self.changed:
                sender.fail(TransferError(f"fake script: a write of room {sender.ordinal} is lost"))
                self._landed(write.number, landed=False)
            return
        try:
            sock = self._sock or self._connect()
        except (OSError, UnicodeError, TransferError) as error:
            # UnicodeError: a host that cannot be a name.
            with self.changed:
                sender.fail(TransferError(f"cannot reach {self.peer}: {error}"))
                self._landed(write.number, landed=False)
            return
        block = write.block
        payload = sender.read(block, write.plan.corrupt)
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
            self._send(sock, header + sender.slots(block) + payload)
        except OSError as error:
            # What is on the wire may land until the peer has closed its end.
            _shutdown(sock, socket.SHUT_WR)
            sender.fail(TransferError(f"the link to {self.peer} was lost: {error}"))

    def _send(self, sock: socket.socket, data: bytes) -> None:
        """Raises OSError when the peer takes nothing for too long, or the link is lost."""
        left, moved = memoryview(data), time.monotonic()
        while left:
            try:
                left = left[sock.send(left) :]
                moved = time.monotonic()
            except TimeoutError:
                if not self._awaited(moved):
                    raise

    def _awaited(self, since: float) -> bool:
        return not self.patience.is_over(since, LEASE_SECONDS, self.peer)

    def _connect(self) -> socket.socket:
        sock = socket.create_connection(self.address, timeout=_CONNECT_SECONDS)
        try:
            greet(sock, SERVICE, self.own, self.peer, self.key, self.patience)
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
                if not _readable(sock):
                    continue
                number, performed = ACK.unpack(receive_exactly(sock, ACK.size, self._awaited))
                with self.changed:
                    write = self._wire.get(number)
                    if write is not None and not performed:
                        write.sender.fail(TransferError(f"{self.peer} refused a write"))
                    self._landed(number, landed=performed)
        with self.changed:
            # The peer closed its end, so nothing that is on the wire can land any more.
            self._sock = None
            self._resolve_wire()
            self.changed.notify_all()

    def _resolve_wire(self) -> None:
        for number in list(self._wire):
            sender = self._wire[number].sender
            sender.fail(TransferError(f"the link to {self.peer} was lost"))
            self._landed(number, landed=False)

    def _landed(self, number: int, *, landed: bool) -> None:
        write = self._wire.pop(number, None)
        if write is not None:
            self._resolve(write, landed=landed)


def _readable(sock: socket.socket) -> bool:
    """Wait a while for an acknowledgement: that none comes is no error."""
    try:
        sock.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return False
    return True


def _shutdown(sock: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(how)
