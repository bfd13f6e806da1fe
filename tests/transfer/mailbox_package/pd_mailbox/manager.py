"""Manager, sender and receiver of the mailbox.

Each node has a private directory in /dev/shm. The sender copies a block out of its pool and writes
it into a file there; the receiver, whenever it is polled, copies the files of its room into its
pages. So only the receiver writes its pages, and only the sender reads its own.

This is an example of the interface and not for use, since it leaves out:

- Threads. Files are written and read while the node holds its lock, so that a large prompt delays
  everything else on the node.
- A limit to the wait after a commit. If a file is missing then, the receiver waits until the
  request's deadline. It should fail when ``patience`` says that a lease has passed.
- Authentication. A peer names the directory that this process writes to, and any process of the
  same user can write files into a mailbox. Peers have the cluster key, but a backend should not
  trust them with the files of its user.
"""

from __future__ import annotations

import shutil
import struct
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pd.core.errors import TransferError
from pd.kernels.paging import select_table
from pd.transfer.base import Receiver, Sender, TransferManager, TransferState
from pd.transfer.pool_memory import PoolMemory

if TYPE_CHECKING:
    from pd.core.errors import PDError
    from pd.core.messages import Reservation
    from pd.core.node_info import NodeInfo
    from pd.transfer.kv_buffer import IntArray, KVBuffer
    from pd.transfer.pool_shape import MissingTokens
    from pd.transfer.ranges import Block
    from pd.util.starvation import Patience

# Token start and stop, layer start and stop of a block of one plane; its bytes follow as PoolMemory
# reads them.
_HEADER = struct.Struct("<4I")


class MailboxManager(TransferManager):
    """Peers and their directories."""

    name = "mailbox"

    def __init__(
        self,
        pool: KVBuffer,
        instance_id: str,
        host: str,
        *,
        advertise_host: str,
        cluster_key: bytes | None,
        patience: Patience,
    ) -> None:
        self._memory = PoolMemory(pool)
        super().__init__(self._memory.shape, patience)
        self._directory = Path(tempfile.mkdtemp(prefix="pd-mailbox-", dir="/dev/shm"))
        self._lock = threading.Lock()
        self._peers: dict[str, Path] = {}
        self._open: dict[str, list[MailboxSender | MailboxReceiver]] = {}

    def address(self) -> dict[str, str]:
        return {"directory": str(self._directory)}

    def connect(self, peer: NodeInfo) -> None:
        directory = Path(peer.address_of(self.name).get("directory", ""))
        if not directory.is_dir():
            raise TransferError(f"{peer.instance_id} has no mailbox here: {directory}")
        with self._lock:
            self._peers[peer.instance_id] = directory

    def disconnect(self, instance_id: str) -> None:
        with self._lock:
            self._peers.pop(instance_id, None)
            ends = self._open.pop(instance_id, [])
        for end in ends:
            end.fail(TransferError(f"{instance_id} was disconnected"))

    def open_sender(
        self, peer: str, reservation: Reservation, pages: IntArray, tokens: MissingTokens
    ) -> Sender:
        prefix = _prefix(reservation.room, reservation.epoch)
        sender = MailboxSender(self._memory, self._get_directory(peer) / prefix, pages, tokens)
        self._remember(peer, sender)
        return sender

    def open_receiver(
        self, peer: str, room: bytes, epoch: int, pages: IntArray, tokens: MissingTokens
    ) -> Receiver:
        self._get_directory(peer)
        prefix = _prefix(room, epoch)
        receiver = MailboxReceiver(self._memory, self._directory / prefix, pages, tokens)
        self._remember(peer, receiver)
        return receiver

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _get_directory(self, peer: str) -> Path:
        with self._lock:
            if peer not in self._peers:
                raise TransferError(f"{peer} is not connected")
            return self._peers[peer]

    def _remember(self, peer: str, end: MailboxSender | MailboxReceiver) -> None:
        with self._lock:
            ends = [old for old in self._open.get(peer, []) if old.poll() is TransferState.ACTIVE]
            self._open[peer] = [*ends, end]


def _prefix(room: bytes, epoch: int) -> str:
    return f"{room.hex()}-{epoch}"


class MailboxSender(Sender):
    """Writes a file for each block; nothing is left to do when :meth:`send` returns."""

    def __init__(
        self, memory: PoolMemory, prefix: Path, pages: IntArray, tokens: MissingTokens
    ) -> None:
        self.error: PDError | None = None
        self._memory, self._prefix = memory, prefix
        self._pages, self._tokens = pages.copy(), tokens
        self._state = TransferState.ACTIVE
        self._num_files = self._num_bytes = 0

    @property
    def bytes_sent(self) -> int:
        return self._num_bytes

    def send(self, token_start: int, token_stop: int, layer_start: int, layer_stop: int) -> None:
        ends = (token_start, token_stop, layer_start, layer_stop)
        for block in self._memory.shape.make_blocks(self._tokens, *ends):
            if self._state is TransferState.ACTIVE:
                self._write(block)

    def _write(self, block: Block) -> None:
        data = self._memory.read_block(self._pages, block)
        ends = (block.token_start, block.token_stop, block.layer_start, block.layer_stop)
        file = self._prefix.with_name(f"{self._prefix.name}-{self._num_files}")
        try:
            # A rename, so that the receiver sees the whole file or none.
            unfinished = file.with_name(f"unfinished-{file.name}")
            unfinished.write_bytes(_HEADER.pack(*ends) + data)
            unfinished.rename(file)
        except OSError as error:
            self.fail(TransferError(f"the mailbox {file.parent} is gone: {error.strerror}"))
            return
        self._num_files += 1
        self._num_bytes += len(data)

    def finish(self) -> None:
        if self._state is TransferState.ACTIVE:
            self._state = TransferState.DONE

    def poll(self) -> TransferState:
        return self._state

    def abort(self) -> None:
        self.fail(TransferError("aborted"))

    def fail(self, error: PDError) -> None:
        """Record the first error."""
        if self._state is TransferState.ACTIVE:
            self._state, self.error = TransferState.FAILED, error

    def drained(self) -> bool:
        return self._state is not TransferState.ACTIVE


class MailboxReceiver(Receiver):
    """Copies files into pages while it is polled."""

    def __init__(
        self, memory: PoolMemory, prefix: Path, pages: IntArray, tokens: MissingTokens
    ) -> None:
        self.error: PDError | None = None
        self._memory, self._prefix = memory, prefix
        self._pages, self._tokens = pages.copy(), tokens
        self._expected = memory.shape.missing_bytes(tokens)
        self._state = TransferState.ACTIVE
        self._received = 0
        self._committed = False
        self._lock = threading.Lock()

    @property
    def destination(self) -> bytes:
        return b""

    @property
    def bytes_received(self) -> int:
        return self._received

    def commit(self, num_bytes: int) -> None:
        if num_bytes != self._expected:
            self.fail(TransferError(f"{num_bytes} KV bytes, not {self._expected}, were committed"))
        self._committed = True
        self.poll()

    def poll(self) -> TransferState:
        with self._lock:
            if self._state is TransferState.ACTIVE:
                for file in self._prefix.parent.glob(f"{self._prefix.name}-*"):
                    self._take(file)
                if self._committed and self._received == self._expected:
                    self._state = TransferState.DONE
        return self._state

    def _take(self, file: Path) -> None:
        content = file.read_bytes()
        file.unlink()
        ends = _HEADER.unpack_from(content)
        (block,) = self._memory.shape.make_blocks(self._tokens, *ends)
        tokens = np.arange(block.token_start, block.token_stop, dtype=np.int32)
        page_size = self._memory.shape.page_size
        # Layers with a sliding window have a page table of their own.
        pages = select_table(self._pages, self._memory.shape.plane_of(block).table)
        slots = pages[tokens // page_size] * page_size + tokens % page_size
        data = content[_HEADER.size :]
        self._memory.write_block(slots, block, data)
        self._received += len(data)

    def abort(self) -> None:
        self.fail(TransferError("aborted"))

    def fail(self, error: PDError) -> None:
        """Record the first error; no page is written any more when this returns."""
        with self._lock:
            if self._state is TransferState.ACTIVE:
                self._state, self.error = TransferState.FAILED, error

    def drained(self) -> bool:
        return self._state is not TransferState.ACTIVE

    def on_peer_drained(self) -> None:
        """Nothing to do: only this object writes its pages."""
