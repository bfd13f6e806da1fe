"""Staged links, over a library whose writes the test holds in its hand."""

from __future__ import annotations

import random
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from held_mover import HeldMover
from staged_pair import BUFFERS, CELL, TOKENS, Pair
from transfer_helpers import (
    SEED,
    hand_off,
    introduce,
    make_pool,
    random_pages,
    reservation,
    settled,
    wait_until,
)

from pd.core.errors import TransferError
from pd.transfer.base import TransferState
from pd.transfer.common import sender as rooms_sender
from pd.transfer.ranges import Block
from pd.transfer.staged import incoming_link as staging_in
from pd.transfer.staged import incoming_links as staging_scatter
from pd.transfer.staged import outgoing_links, outgoing_peer
from pd.transfer.staged import sender as staged_sender
from pd.transfer.staged.incoming_link import IncomingLink
from pd.transfer.staged.manager import StagedManager
from pd.transfer.staged.outgoing_link import OutgoingLink
from pd.transfer.staged.sender import split_at_pages
from pd.transfer.wire import hub as channel_hub


def test_a_room_larger_than_all_buffers_goes_through_them(pair) -> None:
    nodes = pair()
    nodes.introduce()
    for _ in range(3):
        nodes.transfer()
    # 3 layers of 64 tokens in buffers of 16 cells, after the first write of the link.
    assert nodes.out.written == [(0, 1)] + [(s, 16 * CELL) for s, _ in nodes.out.written[1:]]
    assert len(nodes.out.written) == 1 + 3 * 12
    assert nodes.p.quarantined_buffers == nodes.d.quarantined_buffers == 0


def test_rooms_take_turns_and_a_small_one_does_not_wait_for_a_full_buffer(pair) -> None:
    nodes = pair()
    nodes.introduce()
    nodes.transfer()
    nodes.out.held = True
    large, large_into, _ = nodes.room()
    large.send(0, TOKENS, 0, 3)
    wait_until(lambda: len(nodes.out.paths[0].flying) == BUFFERS, "the buffers to fill")
    small, small_into, _ = nodes.room()
    small.send(0, 2, 0, 1)
    nodes.out.held = False
    wait_until(lambda: small_into.bytes_received == 2 * CELL, "the small room")
    after = nodes.out.written[1 + 12 :]
    assert after.index(next(w for w in after if w[1] == 2 * CELL)) <= BUFFERS + 1
    for end in (large, small, large_into, small_into):
        end.abort()


def test_the_pages_are_free_while_a_write_is_held(pair) -> None:
    nodes = pair()
    nodes.introduce()
    nodes.transfer()
    nodes.out.held = True
    sender, receiver, _ = nodes.room()
    sender.send(0, 16, 0, 1)
    wait_until(lambda: nodes.out.paths[0].flying, "the write")
    assert not sender.drained()
    sender.abort()
    receiver.abort()
    assert sender.drained()
    assert receiver.drained()
    nodes.target.buffer.fill_(7.0)
    nodes.source.buffer.fill_(3.0)
    nodes.out.held = False
    wait_until(lambda: nodes.d.counters.discarded_frames == 1, "the late block")
    assert bool((nodes.target.buffer == 7.0).all())
    nodes.transfer()


def test_p_s_buffer_is_free_when_it_is_written(pair, monkeypatch) -> None:
    """D's is not, before D has read it."""
    nodes = pair()
    nodes.introduce()
    nodes.transfer()
    read, scatter = threading.Event(), nodes.d._copier.scatter_block

    def late(*block):
        assert read.wait(30.0)
        return scatter(*block)

    monkeypatch.setattr(nodes.d._copier, "scatter_block", late)
    begun = len(nodes.out.written)
    sender, receiver, into = nodes.room()
    for layer in range(3):
        sender.send(0, 16, layer, layer + 1)
        wait_until(lambda: len(nodes.out.written) == begun + layer + 1, "a write")  # noqa: B023
        wait_until(lambda: not sender.sending, "its note")
    assert len(set(nodes.out.sources[begun:])) == 1
    assert len({buffer for buffer, _ in nodes.out.written[begun:]}) == 3
    read.set()
    sender.send(16, TOKENS, 0, 3)
    hand_off(sender, receiver)
    arrived = nodes.target.tokens(into, 0, TOKENS)
    assert torch.equal(arrived, nodes.source.tokens(nodes.pages, 0, TOKENS))


@pytest.mark.parametrize("who", ["P", "D"])
def test_a_write_after_the_end_of_its_link_lands_in_the_link_s_own_buffers(pair, who) -> None:
    nodes = pair()
    nodes.introduce()
    nodes.transfer()
    nodes.out.held = True
    sender, receiver, _ = nodes.room()
    sender.send(0, TOKENS, 0, 3)
    wait_until(lambda: len(nodes.out.paths[0].flying) == BUFFERS, "the writes")
    if who == "D":
        nodes.d.disconnect("P")
    else:
        nodes.p.disconnect("D")
    wait_until(lambda: settled(sender) is TransferState.FAILED and sender.drained(), "the sender")
    wait_until(lambda: settled(receiver) is TransferState.FAILED, "the receiver")
    assert receiver.drained()
    wait_until(lambda: nodes.p.quarantined_buffers == BUFFERS, "P's quarantine")
    wait_until(lambda: nodes.d.quarantined_buffers == BUFFERS, "D's quarantine")
    # They shake hands again, and a new link works beside the old one's writes.
    nodes.introduce()
    first, first_receiver, _ = nodes.room()
    wait_until(lambda: len(nodes.out.paths) == 2, "the new link")
    first.abort()
    first_receiver.abort()
    old, new = nodes.into.targets
    assert old.buffers.data_ptr() != new.buffers.data_ptr()
    assert not old.closed
    nodes.target.buffer.fill_(7.0)
    before = new.buffers.clone()
    late = nodes.out.paths[0]
    flying = dict(late.flying)
    for buffer in flying:
        late._land(buffer)
    late.flying.update(flying)
    assert bool((nodes.target.buffer == 7.0).all())
    assert torch.equal(new.buffers, before)
    nodes.out.held = False
    wait_until(lambda: nodes.p.quarantined_buffers == nodes.d.quarantined_buffers == 0, "the end")
    assert late.closed
    assert old.closed
    nodes.transfer()


def test_an_end_without_proof_keeps_the_buffers_for_long(pair, monkeypatch) -> None:
    monkeypatch.setattr(staging_in, "QUARANTINE_SECONDS", 0.5)
    nodes = pair()
    nodes.introduce()
    nodes.transfer()
    nodes.out.held = True
    sender, _, _ = nodes.room()
    sender.send(0, 16, 0, 1)
    wait_until(lambda: nodes.out.paths[0].flying, "the write")
    (link,) = nodes.d._incoming._links
    begun = time.monotonic()
    link.on_ended(link._channel, "Connection timed out", False)
    wait_until(lambda: nodes.d.quarantined_buffers == BUFFERS, "the quarantine")
    wait_until(lambda: nodes.d.quarantined_buffers == 0, "the end of the quarantine")
    assert time.monotonic() - begun >= 0.5


def with_buffers_on_device(pair) -> Pair:
    """Whose link is up, and whose D takes its buffers for a GPU's."""
    nodes = pair()
    nodes.introduce()
    nodes.transfer()
    (link,) = nodes.d._incoming._links
    link._on_device = True
    return nodes


def test_buffers_that_a_gpu_of_a_killed_peer_may_write_stay_for_a_while(pair, monkeypatch) -> None:
    monkeypatch.setattr(staging_in, "LAST_WRITE_SECONDS", 0.5)
    nodes = with_buffers_on_device(pair)
    begun = time.monotonic()
    nodes.p._outgoing.get_link("D")._channel.close()  # as a kernel does for a killed process
    wait_until(lambda: nodes.d.quarantined_buffers == BUFFERS, "the quarantine")
    wait_until(lambda: nodes.d.quarantined_buffers == 0, "the end of the quarantine")
    assert time.monotonic() - begun >= 0.5


@pytest.mark.parametrize("first", ["p", "d"])
def test_buffers_of_a_gpu_are_free_at_once_when_the_peer_says_that_it_drained(pair, first) -> None:
    nodes = with_buffers_on_device(pair)
    begun = time.monotonic()
    for side in (first, "d" if first == "p" else "p"):
        getattr(nodes, side).close()
    assert time.monotonic() - begun < staging_in.LAST_WRITE_SECONDS
    (target,) = nodes.into.targets
    assert target.closed


@pytest.mark.usefixtures("unstarved")
def test_what_is_not_computed_yet_is_no_fault_of_the_peer_and_keeps_nobody_waiting(
    pair, monkeypatch
) -> None:
    monkeypatch.setattr(rooms_sender, "LEASE_SECONDS", 0.2)
    nodes = pair()
    nodes.introduce()
    nodes.transfer()
    calls: list = []
    with monkeypatch.context() as held:
        held.setattr(nodes.p._computed, "call_when_done", calls.append)
        late, receiver, _ = nodes.room()
        late.send(0, TOKENS, 0, 2)
        late.send(0, TOKENS, 2, 3)
        late.finish()
    nodes.transfer()
    time.sleep(0.3)
    assert late.poll() is TransferState.ACTIVE
    for call in calls:
        call("")
    hand_off(late, receiver)
    with monkeypatch.context() as held:
        held.setattr(nodes.p._computed, "call_when_done", calls.append)
        failing, receiver, _ = nodes.room()
        failing.send(0, TOKENS, 0, 3)
    calls[-1]("an illegal memory access was encountered")
    assert failing.poll() is TransferState.FAILED
    assert "not computed: an illegal memory access" in str(failing.error)
    assert failing.drained()
    receiver.abort()
    nodes.transfer()


def lose_links(nodes: Pair) -> None:
    """As many as may be lost as far as P can tell; their writes stay in the air."""
    for _ in range(4):
        nodes.out.held = False
        nodes.out.open.update(nodes.out.paths)
        sender, _, _ = nodes.room()
        wait_until(lambda: nodes.p._outgoing.get_link("D").state.name == "UP", "a link")
        nodes.out.held = True
        sender.send(0, 16, 0, 1)
        wait_until(lambda: nodes.out.paths[-1].flying, "the write")
        nodes.out.paths[-1].poll = lambda: []
        link = nodes.p._outgoing.get_link("D")
        nodes.p._outgoing.thread.post_event(
            partial(link.end_link, "the link to D was lost: a test")
        )
        assert settled(sender) is TransferState.FAILED


def let_go(nodes: Pair) -> None:
    for path in nodes.out.paths:
        del path.poll
    nodes.out.held = False


def test_lost_links_are_counted_and_one_too_many_is_refused(pair) -> None:
    nodes = pair()
    nodes.introduce()
    lose_links(nodes)
    with pytest.raises(TransferError, match="4 links to D were lost while something was being"):
        nodes.room()
    assert nodes.p.quarantined_buffers == 4
    let_go(nodes)
    wait_until(lambda: nodes.p.quarantined_buffers == nodes.d.quarantined_buffers == 0, "the end")
    nodes.transfer()


def test_a_link_is_welcome_while_the_lost_ones_are_being_put_away(pair, monkeypatch) -> None:
    nodes = pair()
    nodes.introduce()
    lose_links(nodes)
    with monkeypatch.context() as patch:
        patch.setattr(IncomingLink, "_may_close", lambda self: False)
        let_go(nodes)
        wait_until(lambda: nodes.p.quarantined_buffers == 0, "the end of P's links")
        wait_until(lambda: nodes.d.quarantined_buffers == 4 * BUFFERS, "the end of D's links")
        nodes.transfer()
    wait_until(lambda: nodes.d.quarantined_buffers == 0, "D's buffers")


def test_a_failed_write_ends_its_rooms_and_the_next_works(pair) -> None:
    nodes = pair()
    nodes.introduce()
    nodes.transfer()
    nodes.out.error = "the peer is gone"
    sender, receiver, _ = nodes.room()
    sender.send(0, 16, 0, 1)
    assert settled(sender) is TransferState.FAILED
    assert str(sender.error) == "the link to D was lost: the peer is gone"
    receiver.abort()
    nodes.out.error = ""
    nodes.transfer()


def test_a_link_whose_library_raises_is_driven_no_more(pair, monkeypatch) -> None:
    driven: list[OutgoingLink] = []
    drive = OutgoingLink.drive

    def noted(link: OutgoingLink) -> None:
        driven.append(link)
        drive(link)

    def broken() -> None:
        raise RuntimeError("the library is broken")

    monkeypatch.setattr(OutgoingLink, "drive", noted)
    nodes = pair()
    nodes.introduce()
    nodes.transfer()
    links = nodes.p._outgoing
    lost = links.get_link("D")

    def turn() -> None:
        """The link thread has begun another turn."""
        turned = threading.Event()
        links.thread.post_event(turned.set)
        assert turned.wait(5)

    monkeypatch.setattr(nodes.out.paths[0], "poll", broken)
    sender, receiver, _ = nodes.room()
    sender.send(0, 16, 0, 1)
    assert settled(sender) is TransferState.FAILED
    assert str(sender.error) == "the link to D failed: the library is broken"
    receiver.abort()
    turn()
    driven.clear()
    for _ in range(20):
        turn()
    assert lost not in driven
    assert nodes.p.quarantined_buffers == 1, "what the library still does is unknown"
    # A room that D opens before it learns of the end would end with the link.
    wait_until(lambda: not any(link.is_live for link in nodes.d._incoming._links), "the end of it")
    nodes.transfer()


def test_rooms_of_which_nothing_was_sent_outlive_a_lost_link(pair) -> None:
    nodes = pair()
    nodes.introduce()
    nodes.transfer()
    waiting, waiting_into, into = nodes.room()
    nodes.out.error = "a cable was pulled"
    sender, receiver, _ = nodes.room()
    sender.send(0, 16, 0, 1)
    assert settled(sender) is TransferState.FAILED
    receiver.abort()
    nodes.out.error = ""
    waiting.send(0, TOKENS, 0, 3)
    hand_off(waiting, waiting_into)
    arrived = nodes.target.tokens(into, 0, TOKENS)
    assert torch.equal(arrived, nodes.source.tokens(nodes.pages, 0, TOKENS))


REFUSED = "D refused a link: cannot make buffers: no memory can be registered"


@pytest.mark.parametrize("side", ["into", "out"])
def test_a_link_that_cannot_be_opened_is_tried_again_for_its_rooms(pair, side) -> None:
    nodes = pair()
    mover = getattr(nodes, side)
    mover.refuses = "no memory can be registered"
    nodes.introduce()
    sender, receiver, into = nodes.room()
    sender.send(0, TOKENS, 0, 3)
    wait_until(lambda: mover.refused >= 3, "the third try")
    assert sender.poll() is receiver.poll() is TransferState.ACTIVE
    mover.refuses = ""
    hand_off(sender, receiver)
    arrived = nodes.target.tokens(into, 0, TOKENS)
    assert torch.equal(arrived, nodes.source.tokens(nodes.pages, 0, TOKENS))


@pytest.mark.parametrize("side", ["D", "P"])
def test_a_link_for_whose_set_up_no_thread_can_start_makes_way_for_another(
    pair, monkeypatch, side
) -> None:
    """D, which sets up first, has its rooms sent over the next link; P fails those that it has."""
    start, begun, refused = threading.Thread.start, [], 0 if side == "D" else 1

    def few_threads(self: threading.Thread) -> None:
        if self.name.endswith("set-up of a link"):
            begun.append(self)
            if len(begun) == refused + 1:
                raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", few_threads)
    nodes = pair()
    nodes.introduce()
    if side == "P":
        sender, receiver, _ = nodes.room()
        sender.send(0, TOKENS, 0, 3)
        assert settled(sender) is TransferState.FAILED
        assert "can't start new thread" in str(sender.error)
        # Rooms that D knows when it hears of the loss fail, whichever link they wait for.
        assert settled(receiver) is TransferState.FAILED
        receiver.abort()
    nodes.transfer()
    assert len(begun) == refused + 3
    wait_until(lambda: nodes.d.quarantined_buffers == 0, "the buffers of the first link")


def test_a_library_that_cannot_make_buffers_for_long_is_reported(pair, monkeypatch) -> None:
    monkeypatch.setattr(outgoing_peer, "OPENING_SECONDS", 0.3)
    nodes = pair()
    nodes.into.refuses = "no memory can be registered"
    nodes.introduce()
    sender, receiver, _ = nodes.room()
    sender.send(0, 16, 0, 1)
    assert settled(sender) is TransferState.FAILED
    assert f"{REFUSED} (tried for" in str(sender.error)
    nodes.into.refuses = ""
    receiver.abort()
    nodes.transfer()


def test_what_another_try_cannot_mend_fails_at_once(pair) -> None:
    nodes = pair()
    nodes.out.refuses, nodes.out.lasting = "the libraries do not fit together", True
    nodes.introduce()
    sender, receiver, _ = nodes.room()
    sender.send(0, 16, 0, 1)
    assert settled(sender) is TransferState.FAILED
    assert str(sender.error) == "cannot open a link to D: the libraries do not fit together"
    assert nodes.out.refused == 1
    assert settled(receiver) is TransferState.FAILED


def test_nodes_that_meet_prepare_their_link_and_take_buffers_for_the_first_room(pair) -> None:
    nodes = pair()
    assert not nodes.d.is_linked("P")
    nodes.introduce()
    wait_until(lambda: nodes.d.is_linked("P"), "the link")
    assert (nodes.out.prepared, nodes.into.prepared) == (1, 1)
    assert nodes.d.counters.links == 1
    assert nodes.p._outgoing.get_link("D").writes is None
    assert not nodes.into.targets and not nodes.out.paths
    nodes.transfer()
    assert nodes.d.counters.links == 1, "the first room opens no connection"
    assert len(nodes.into.targets) == len(nodes.out.paths) == 1


@pytest.mark.parametrize("side", ["P", "D"])
def test_of_links_that_hold_buffers_the_one_used_longest_ago_gives_way(
    pair, monkeypatch, side
) -> None:
    module = outgoing_links if side == "P" else staging_scatter
    monkeypatch.setattr(module, "MAX_LINKS", 1)
    nodes = pair()
    nodes.introduce()
    nodes.transfer()
    many, one = (nodes.p, nodes.d) if side == "P" else (nodes.d, nodes.p)
    mover = HeldMover()
    kwargs = {"buffers": BUFFERS, "buffer_bytes": 16 * CELL}
    pool = nodes.target if side == "P" else nodes.source
    other = StagedManager(pool, "X", "127.0.0.1", mover=mover, **kwargs)
    try:
        into, out = (other, many) if side == "P" else (many, other)
        names = ("P", "X") if side == "P" else ("X", "D")
        introduce(out, names[0], into, names[1], nodes.source)
        pages = np.arange(4, dtype=np.int32)
        receiver = into.receiver(names[0], bytes(16), 1, pages, (0,), TOKENS)
        asked = reservation(receiver, bytes(16), 1, 0)
        sender = out.sender(names[1], asked, nodes.pages, TOKENS)
        sender.send(0, TOKENS, 0, 3)
        hand_off(sender, receiver)
        wait_until(
            lambda: nodes.out.paths[0].closed and nodes.into.targets[0].closed, "the buffers"
        )
        assert many.quarantined_buffers == one.quarantined_buffers == 0
        # It is connected again, and takes buffers again when it has to.
        wait_until(lambda: nodes.d.is_linked("P"), "the link")
        nodes.transfer()
    finally:
        other.close()


def test_a_room_that_comes_while_its_link_gives_way_is_sent_over_the_next(
    pair, monkeypatch
) -> None:
    nodes = pair()
    nodes.introduce()
    nodes.transfer()
    monkeypatch.setattr(outgoing_links, "MAX_LINKS", 1)
    outgoing = nodes.p._outgoing
    first = outgoing.get_link("D")
    wait_until(lambda: first.is_idle, "the buffers to be given back")
    opening = outgoing.open_sender

    def open_late(peer, sender) -> None:
        outgoing.thread.post_event(outgoing.end_idle_link)
        wait_until(lambda: not first.is_idle, "the link to give way")
        opening(peer, sender)

    monkeypatch.setattr(outgoing, "open_sender", open_late)
    nodes.transfer()
    assert outgoing.get_link("D") is not first


@pytest.mark.usefixtures("unstarved")
def test_a_link_that_takes_long_to_open_makes_progress(pair, monkeypatch) -> None:
    """Each step of the libraries has its time, which is longer than a lease, not all of them
    together."""
    monkeypatch.setattr(rooms_sender, "LEASE_SECONDS", 0.3)
    monkeypatch.setattr(staged_sender, "OPENING_SECONDS", 1.0)
    nodes = pair()
    nodes.out.slow = nodes.into.slow = 0.6
    nodes.introduce()
    nodes.transfer()


@pytest.mark.usefixtures("unstarved")
def test_a_link_that_does_not_open_fails_its_rooms(pair, monkeypatch) -> None:
    monkeypatch.setattr(staged_sender, "OPENING_SECONDS", 0.2)
    nodes = pair()
    nodes.into.slow = 1.0
    nodes.introduce()
    sender, receiver, _ = nodes.room()
    sender.send(0, 16, 0, 1)
    assert settled(sender) is TransferState.FAILED
    assert "no KV data could be sent to node D for 0." in str(sender.error)
    receiver.abort()
    wait_until(lambda: nodes.out.paths, "the link")
    nodes.transfer()


def test_d_helps_only_while_p_waits(pair) -> None:
    nodes = pair()
    nodes.introduce()
    nodes.transfer()
    (target,) = nodes.into.targets
    nodes.out.held = True
    sender, _, _ = nodes.room()
    sender.send(0, 16, 0, 1)
    before = target.progressed
    wait_until(lambda: target.progressed > before, "help")
    nodes.out.held = False
    sender.finish()
    assert settled(sender) is TransferState.DONE
    wait_until(lambda: not next(iter(nodes.d._incoming._links))._peer_waits, "the end of it")
    time.sleep(0.05)
    before = target.progressed
    time.sleep(0.2)
    assert target.progressed == before


def test_a_manager_that_cannot_drain_closes_but_does_not_say_that_it_drained(pair) -> None:
    nodes = pair()
    nodes.introduce()
    nodes.transfer()
    nodes.out.held = True
    sender, _, _ = nodes.room()
    sender.send(0, 16, 0, 1)
    wait_until(lambda: nodes.out.paths[0].flying, "the write")
    begun = time.monotonic()
    nodes.p.close()
    assert time.monotonic() - begun < 4.0
    assert not nodes.out.paths[0].closed
    (link,) = nodes.d._incoming._links
    assert link._safe_at == float("inf")


def test_a_channel_that_is_over_before_it_was_looked_at_is_dialled_again(pair, monkeypatch) -> None:
    nodes = pair()
    make, tries = channel_hub.Channel, []

    def reset_at_first(*args, **kwargs):
        if not kwargs["inbound"]:
            tries.append(args)
            if len(tries) == 1:
                raise OSError("reset by the test")
        return make(*args, **kwargs)

    monkeypatch.setattr(channel_hub, "Channel", reset_at_first)
    nodes.introduce()
    nodes.transfer()
    assert len(tries) == 2


def test_pieces_cover_the_block_once_and_end_between_pages() -> None:
    rng = random.Random(SEED)
    for _ in range(300):
        start, layers = rng.randint(0, 50), rng.randint(1, 6)
        block = Block(start, start + rng.randint(1, 400), 0, layers)
        cells, page = rng.randint(1, 200), rng.choice([1, 4, 16])
        seen = np.zeros((layers, block.token_stop), dtype=int)
        for piece in split_at_pages(block, cells, page):
            assert 0 < piece.cells <= cells
            if piece.token_stop != block.token_stop and cells >= 2 * page:
                assert piece.token_stop % page == 0
            seen[piece.layer_start : piece.layer_stop, piece.token_start : piece.token_stop] += 1
        assert (seen[:, start:] == 1).all()
        assert not seen[:, :start].any()


def test_host_copies_agree_with_the_definition_for_any_range() -> None:
    from pd.transfer.copier import HostCopier

    rng = random.Random(SEED)
    for _ in range(200):
        page = rng.choice([1, 2, 4, 16])
        pool, other = make_pool(128, page, seed=1), make_pool(128, page, fill=-1.0)
        stop = rng.randint(1, 100)
        start, layer = rng.randint(0, stop - 1), rng.randint(0, 2)
        block = Block(start, stop, layer, rng.randint(layer + 1, 3))
        pages = random_pages(rng, pool, stop)
        into = random_pages(rng, other, stop)
        near, far = HostCopier(pool), HostCopier(other)
        buffer = near.make_buffers(
            1, block.cells * near.shape.max_cell_bytes + 100, on_device=False
        )[0]
        near.gather_block(near.make_table(pages, stop), block, near.make_view(buffer)).wait()
        layers = slice(block.layer_start, block.layer_stop)
        packed = buffer[: block.cells * near.shape.max_cell_bytes].view(torch.float32)
        assert torch.equal(packed, pool.tokens(pages, start, stop)[layers].reshape(-1))
        far.scatter_block(far.make_table(into, stop), block, far.make_view(buffer)).wait()
        assert torch.equal(
            other.tokens(into, start, stop)[layers], pool.tokens(pages, start, stop)[layers]
        )
        assert int((other.buffer != -1.0).sum()) == packed.numel()
