"""Messages between rank 0 and its workers, over a socket pair that each worker inherits."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pd.core.node_info import Plane
from pd.engine.draft_tree import DraftTree
from pd.engine.forward_item import ForwardItem
from pd.kernels.paging import count_needed_pages

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    import numpy.typing as npt

_LENGTH = struct.Struct("<Q")


class StartWorker(msgspec.Struct, tag=True):
    """First message to a worker.

    Attributes:
        settings: the node's settings for building an engine, by name.
        extra_planes: planes of the KV in addition to the model's.
        rendezvous: file in a private directory. The devices find each other through it.
        threads: number of compute threads on a CPU.
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
    """Sent by a worker that is about to join the process group."""


class PageCapacity(msgspec.Struct, tag=True):
    """The number of pages for which a worker has memory. Rank 0 answers with the smallest number of
    all ranks."""

    num_pages: int


class Built(msgspec.Struct, tag=True):
    """Sent by a worker that is ready for steps.

    Attributes:
        handle, offset: location of its pool for :class:`pd.kernels.cuda_ipc.CudaIpc`, if the node
            has transfers. Empty on a CPU, where the pool lies in rank 0's file.
    """

    handle: bytes = b""
    offset: int = 0


class RankFailed(msgspec.Struct, tag=True):
    """Last message of a worker: the reason why it ends."""

    reason: str


class PackedTables(msgspec.Struct):
    """Page tables of a sequence: int32 ``[tables, n]``, or ``[n]`` if ``tables`` is 0."""

    pages: bytes
    tables: int

    @classmethod
    def pack_tables(cls, pages: npt.NDArray[np.int32]) -> PackedTables:
        return cls(pack_ints(pages), len(pages) if pages.ndim > 1 else 0)

    def unpack_tables(self) -> npt.NDArray[np.int32]:
        pages = unpack_ints(self.pages)
        return pages.reshape(self.tables, -1) if self.tables else pages


class ForwardStep(msgspec.Struct, tag=True):
    """A forward pass, for all workers. Numbers are int32 arrays as bytes.

    Attributes:
        starts, lengths, num_logits: of each item.
        num_pages: size of each item's page tables.
        num_tables: number of each item's page tables, or 0 if they have one dimension.
        num_tree: size of each item's tree, or -1 for None.
        reread: 0 or 1 for each item.
        token_ids, pages, trees: of all items, one item after the other.
        num_previous: number of previously sampled tokens, which rank 0 broadcasts first; 0 if none
            are needed.
    """

    starts: bytes
    lengths: bytes
    num_logits: bytes
    num_pages: bytes
    num_tree: bytes
    reread: bytes
    token_ids: bytes
    pages: bytes
    num_tables: int
    trees: bytes
    num_previous: int

    @classmethod
    def pack_items(
        cls, items: Sequence[ForwardItem], page_size: int, num_previous: int
    ) -> ForwardStep:
        """Pack a step, with the part of the page tables that it touches."""
        tables = [
            item.pages[..., : count_needed_pages(item.start + len(item.token_ids), page_size)]
            for item in items
        ]
        return cls(
            pack_ints([item.start for item in items]),
            pack_ints([len(item.token_ids) for item in items]),
            pack_ints([item.num_logits for item in items]),
            pack_ints([table.shape[-1] for table in tables]),
            pack_ints([-1 if item.tree is None else item.tree.size for item in items]),
            pack_ints([item.reread for item in items]),
            pack_ints(np.concatenate([item.token_ids for item in items])),
            pack_ints(np.concatenate(tables, axis=-1)),
            len(tables[0]) if tables[0].ndim > 1 else 0,
            b"".join(pack_ints(item.tree.parents) for item in items if item.tree is not None),
            num_previous,
        )

    def unpack_items(self) -> list[ForwardItem]:
        """Unpack the items. Only rank 0 needs their carried states, so these are not packed."""
        token_ids = unpack_ints(self.token_ids)
        pages = PackedTables(self.pages, self.num_tables).unpack_tables()
        lengths, num_pages = unpack_ints(self.lengths), unpack_ints(self.num_pages)
        token_ends, page_ends = np.cumsum(lengths).tolist(), np.cumsum(num_pages).tolist()
        trees, num_tree = unpack_ints(self.trees), unpack_ints(self.num_tree)
        tree_ends = np.cumsum(np.maximum(num_tree, 0)).tolist()
        rows = zip(
            unpack_ints(self.starts).tolist(),
            lengths.tolist(),
            token_ends,
            num_pages.tolist(),
            page_ends,
            unpack_ints(self.num_logits).tolist(),
            [
                None if n < 0 else DraftTree(trees[e - n : e])
                for n, e in zip(num_tree.tolist(), tree_ends, strict=True)
            ],
            unpack_ints(self.reread).tolist(),
            strict=True,
        )
        return [
            ForwardItem(
                token_ids[t - length : t],
                start,
                pages[..., p - count : p],
                logits,
                tree,
                bool(reread),
            )
            for start, length, t, count, p, logits, tree, reread in rows
        ]


class MoveTokens(msgspec.Struct, tag=True):
    """Tells all workers to move KV of tokens: for each page table, rank 0 broadcasts ``count``
    slots to read and as many to write."""

    tables: int
    count: int


class SavePages(msgspec.Struct, tag=True):
    """Tells all workers to copy pages to host memory."""

    key: int
    pages: PackedTables


class RestorePages(msgspec.Struct, tag=True):
    """Tells all workers to write the last saved pages into ``pages``."""

    key: int
    pages: PackedTables


class ForgetPages(msgspec.Struct, tag=True):
    """Tells all workers to drop saved pages."""

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


def pack_ints(values: npt.ArrayLike) -> bytes:
    """Encode int32 numbers for a message."""
    return np.asarray(values, dtype="<i4").tobytes()


def unpack_ints(data: bytes) -> npt.NDArray[np.int32]:
    """Decode the result of :func:`pack_ints`. The array is read-only."""
    return np.frombuffer(data, dtype="<i4")


class RankChannel:
    """Messages over a connected stream socket, which it owns. One thread may send while another
    receives."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._encoder = msgspec.msgpack.Encoder()

    def encode_message(self, message: RankMessage) -> bytes:
        """Encode a message. :meth:`send_encoded` can send the result over several channels."""
        body = self._encoder.encode(message)
        return _LENGTH.pack(len(body)) + body

    def send_message(self, message: RankMessage) -> None:
        """Send a message, waiting for room. Raises OSError if the other end is gone."""
        self.send_encoded(self.encode_message(message))

    def send_encoded(self, data: bytes) -> None:
        """Send an encoded message like :meth:`send_message`."""
        self.socket.sendall(data)

    def receive_message(self) -> RankMessage:
        """Return the next message. Raises EOFError if the other end is gone."""
        (length,) = _LENGTH.unpack(self._read_bytes(_LENGTH.size))
        message: RankMessage = _decoder.decode(self._read_bytes(length))
        return message

    def _read_bytes(self, length: int) -> bytearray:
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
        """Close the socket. The other end reads EOF."""
        self.socket.close()
