"""Messages between rank 0 and its workers, over a socket pair that a worker inherits."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pd.core.node_info import Plane
from pd.engine.draft_tree import DraftTree
from pd.engine.model_runner import ForwardItem
from pd.kernels.paging import page_count

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    import numpy.typing as npt

_LENGTH = struct.Struct("<Q")


class StartWorker(msgspec.Struct, tag=True):
    """First message to a worker.

    Attributes:
        settings: the settings of the node from which an engine is built, by name.
        extra_planes: planes of the KV beside the model's.
        rendezvous: file in a private directory, through which the devices find each other.
        threads: number of threads that compute on a CPU.
        log_level: level of the root logger.
    """

    settings: dict[str, object]
    extra_planes: list[Plane]
    rank: int
    size: int
    rendezvous: str
    threads: int
    log_level: int


class Joining(msgspec.Struct, tag=True):
    """A worker reports that it is about to join the process group."""


class PageCapacity(msgspec.Struct, tag=True):
    """A worker reports the pages that it has memory for; rank 0 answers with the least of all
    ranks."""

    num_pages: int


class Built(msgspec.Struct, tag=True):
    """A worker reports that it is ready for steps.

    Attributes:
        handle, offset: where its pool lies, for :class:`pd.kernels.cuda_ipc.CudaIpc`, if the node
            has transfers; empty on a CPU, where the pool lies in the file that rank 0 made.
    """

    handle: bytes = b""
    offset: int = 0


class RankFailed(msgspec.Struct, tag=True):
    """Last message of a worker that ends: the reason."""

    reason: str


class ForwardStep(msgspec.Struct, tag=True):
    """A forward pass, for all workers. Numbers are int32 arrays as bytes.

    Attributes:
        starts, lengths, num_logits: those of each item; ``num_pages`` is the size of its page
        table, ``num_tree`` that of its tree, or -1 for None, and ``reread`` is 0 or 1.
        token_ids, pages, trees: those of all items, one item after the other.
        num_previous: tokens sampled before, which rank 0 broadcasts first; 0 if none are needed.
    """

    starts: bytes
    lengths: bytes
    num_logits: bytes
    num_pages: bytes
    num_tree: bytes
    reread: bytes
    token_ids: bytes
    pages: bytes
    trees: bytes
    num_previous: int

    @classmethod
    def of(cls, items: Sequence[ForwardItem], page_size: int, num_previous: int) -> ForwardStep:
        """Pack a step, with the part of the page tables that it touches."""
        tables = [
            item.pages[: page_count(item.start + len(item.token_ids), page_size)] for item in items
        ]
        return cls(
            packed([item.start for item in items]),
            packed([len(item.token_ids) for item in items]),
            packed([item.num_logits for item in items]),
            packed([len(table) for table in tables]),
            packed([-1 if item.tree is None else item.tree.size for item in items]),
            packed([item.reread for item in items]),
            packed(np.concatenate([item.token_ids for item in items])),
            packed(np.concatenate(tables)),
            b"".join(packed(item.tree.parents) for item in items if item.tree is not None),
            num_previous,
        )

    def items(self) -> list[ForwardItem]:
        """Unpack the items that :meth:`of` packed; a carried state is a matter of rank 0."""
        token_ids, pages = unpacked(self.token_ids), unpacked(self.pages)
        lengths, num_pages = unpacked(self.lengths), unpacked(self.num_pages)
        token_ends, page_ends = np.cumsum(lengths).tolist(), np.cumsum(num_pages).tolist()
        trees, num_tree = unpacked(self.trees), unpacked(self.num_tree)
        tree_ends = np.cumsum(np.maximum(num_tree, 0)).tolist()
        rows = zip(
            unpacked(self.starts).tolist(),
            lengths.tolist(),
            token_ends,
            num_pages.tolist(),
            page_ends,
            unpacked(self.num_logits).tolist(),
            [
                None if n < 0 else DraftTree(trees[e - n : e])
                for n, e in zip(num_tree.tolist(), tree_ends, strict=True)
            ],
            unpacked(self.reread).tolist(),
            strict=True,
        )
        return [
            ForwardItem(
                token_ids[t - length : t], start, pages[p - count : p], logits, tree, bool(reread)
            )
            for start, length, t, count, p, logits, tree, reread in rows
        ]


class MoveTokens(msgspec.Struct, tag=True):
    """Lets all workers move KV of tokens: rank 0 broadcasts ``count`` slots to read and as many to
    write."""

    count: int


class SavePages(msgspec.Struct, tag=True):
    """Lets all workers copy pages to host memory."""

    key: int
    pages: bytes


class RestorePages(msgspec.Struct, tag=True):
    """Lets all workers write saved pages, from the saved page ``first`` on, into ``pages``."""

    key: int
    pages: bytes
    first: int


class ForgetPages(msgspec.Struct, tag=True):
    """Lets all workers drop saved pages."""

    key: int


RankMessage = (
    StartWorker
    | Joining
    | PageCapacity
    | Built
    | RankFailed
    | ForwardStep
    | MoveTokens
    | SavePages
    | RestorePages
    | ForgetPages
)
_decoder = msgspec.msgpack.Decoder(RankMessage)


def packed(values: npt.ArrayLike) -> bytes:
    """Encode int32 numbers for a message."""
    return np.asarray(values, dtype="<i4").tobytes()


def unpacked(data: bytes) -> npt.NDArray[np.int32]:
    """Decode the result of :func:`packed`; the array is read-only."""
    return np.frombuffer(data, dtype="<i4")


class RankChannel:
    """Messages over a connected stream socket, which it owns. One thread may send and another
    receive."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: RankMessage) -> bytes:
        """Encode a message for :meth:`send_encoded`, which may send it over several channels."""
        body = self._encoder.encode(message)
        return _LENGTH.pack(len(body)) + body

    def send(self, message: RankMessage) -> None:
        """Send a message, waiting for room; raises OSError when the other end is gone."""
        self.send_encoded(self.encode(message))

    def send_encoded(self, data: bytes) -> None:
        """Send an encoded message as :meth:`send` does."""
        self.socket.sendall(data)

    def receive(self) -> RankMessage:
        """Return the next message; raises EOFError when the other end is gone."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        message: RankMessage = _decoder.decode(self._read(length))
        return message

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            try:
                count = self.socket.recv_into(view)
            except OSError as error:
                raise EOFError(str(error)) from error
            if count == 0:
                raise EOFError("the other end is closed")
            view = view[count:]
        return data

    def close(self) -> None:
        """Close the socket; the other end reads EOF."""
        self.socket.close()
