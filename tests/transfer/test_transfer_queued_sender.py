"""The sending side that backends share, over a link that does nothing by itself."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from pd.core.errors import TransferError
from pd.core.messages import Reservation
from pd.transfer.base import TransferState
from pd.transfer.common import sender as rooms_sender
from pd.transfer.common.send_queue import SendQueue
from pd.transfer.common.sender import QueuedSender
from pd.transfer.pool_shape import MissingTokens, PlaneShape, PoolShape
from pd.transfer.ranges import Block
from pd.util.starvation import Patience

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS, LAYERS = 8, 2
RESERVATION = Reservation(to="P", sender="D", room=b"r" * 16, epoch=1, cached=(0,))


CELL_BYTES = 16
SHAPE = PoolShape(4, 64, (PlaneShape(0, range(LAYERS), CELL_BYTES),))


class StillLink:
    """Blocks are computed when the test says so, and leave when the test takes them."""

    def __init__(self) -> None:
        self.peer = "D"
        self.changed = threading.Condition(threading.RLock())
        self.patience = Patience()
        self.queue: SendQueue[StillSender] = SendQueue()
        self.uncomputed: list[Callable[[str], None]] = []

    def sender(self) -> StillSender:
        sender = StillSender(
            self,
            SHAPE,
            self.uncomputed.append,
            RESERVATION,
            MissingTokens((0,), TOKENS),
        )
        self.queue.add_sender(sender)
        return sender

    def enqueue_sender(self, sender: StillSender) -> None:
        self.queue.enqueue_sender(sender)

    def remove_sender(self, sender: StillSender) -> None:
        self.queue.remove_sender(sender)

    def compute(self, reason: str = "") -> None:
        for call in self.uncomputed:
            call(reason)
        self.uncomputed.clear()


class StillSender(QueuedSender):
    def _split_block(self, block: Block):
        return block.split(TOKENS)

    def _stalled_since(self) -> float | None:
        return self.waiting_since if self.has_queued else None


@pytest.fixture
def link() -> StillLink:
    return StillLink()


def leave(sender: QueuedSender) -> None:
    sender.mark_read()
    sender.mark_sent()


def test_done_only_when_every_block_was_computed_taken_and_has_left(link: StillLink) -> None:
    sender = link.sender()
    sender.send(0, TOKENS, 0, LAYERS)
    assert sender.bytes_sent == TOKENS * LAYERS * CELL_BYTES
    sender.finish()
    assert not link.queue, "the KV is still being computed"
    link.compute()
    for layer in range(LAYERS):
        assert sender.poll() is TransferState.ACTIVE
        assert link.queue.take_block() == (sender, Block(0, TOKENS, layer, layer + 1))
        assert not sender.drained()
        leave(sender)
    assert sender.poll() is TransferState.DONE
    assert sender.drained()
    assert not link.queue.senders


def test_nothing_to_send_is_done_at_once(link: StillLink) -> None:
    sender = link.sender()
    sender.send(3, 3, 0, LAYERS)
    sender.finish()
    assert sender.poll() is TransferState.DONE


def test_rooms_take_turns(link: StillLink) -> None:
    first, second = link.sender(), link.sender()
    for sender in (first, second):
        sender.send(0, TOKENS, 0, LAYERS)
    link.compute()
    taken = [link.queue.take_block() for _ in range(5)]
    assert [item and item[0] for item in taken] == [first, second, first, second, None]


def test_the_first_error_wins_and_drops_the_queue_but_not_what_is_read(link: StillLink) -> None:
    sender = link.sender()
    sender.send(0, TOKENS, 0, LAYERS)
    link.compute()
    assert sender.take_block() == Block(0, TOKENS, 0, 1)
    sender.fail(TransferError("first"))
    sender.abort()
    assert str(sender.error) == "first"
    assert sender.take_block() is None
    assert not sender.drained()
    leave(sender)
    assert sender.poll() is TransferState.FAILED
    assert sender.drained()
    sender.send(0, TOKENS, 0, LAYERS)
    assert not link.uncomputed, "nothing more is accepted"


def test_kv_that_was_not_computed_fails_its_room(link: StillLink) -> None:
    sender = link.sender()
    sender.send(0, TOKENS, 0, LAYERS)
    link.compute("device lost")
    assert sender.poll() is TransferState.FAILED
    assert str(sender.error) == "the KV to send was not computed: device lost"


@pytest.mark.usefixtures("unstarved")
def test_a_peer_that_takes_nothing_fails_the_room(
    link: StillLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms_sender, "LEASE_SECONDS", 0.0)
    sender = link.sender()
    assert sender.poll() is TransferState.ACTIVE, "nothing waits for the peer"
    sender.send(0, TOKENS, 0, LAYERS)
    link.compute()
    assert sender.poll() is TransferState.FAILED
    assert "no KV data could be sent to node D" in str(sender.error)


@pytest.mark.parametrize("block", [(0, TOKENS + 1, 0, 1), (0, 1, 0, LAYERS + 1), (3, 2, 0, 1)])
def test_ranges_outside_the_room_are_refused(link: StillLink, block: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"tokens \[|layers \["):
        link.sender().send(*block)
