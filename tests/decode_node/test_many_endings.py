"""Thousands of requests that end in one event."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster import is_idle, wait_until
from decode_helpers import ask, lose

from pd.core.errors import TransferError
from pd.core.messages import Failed
from pd.engine.page_allocator import PageState

if TYPE_CHECKING:
    import pytest
    from prefill_peer import PrefillPeer
    from raw_peer import RawPeer

    from pd.launch import NodeServer

ROOMS = 2000
# The pool has 64 pages; the first of the rooms ends for want of a receiver, which makes room for
# the next.
PROMPT = [1] * 8


def test_2000_waiting_rooms_that_get_no_receiver_end_one_after_the_other(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_receiver(*args: Any) -> Any:
        raise TransferError("no receiver today")

    monkeypatch.setattr(decode.node.transfers[-1], "receiver", no_receiver)
    node, receiving = decode.node, decode.node.receiving
    with node.core.events.lock:
        allocator = node.core.memory.allocator
        hole = allocator.allocate_pages(allocator.count_pages(PageState.FREE), PageState.OWNED)
    rooms = [ask(proxy, decode, prefill, PROMPT) for _ in range(ROOMS)]

    def all_connected() -> bool:
        with node.core.events.lock:
            waiting = list(receiving.preallocation)
        return len(waiting) == ROOMS and all(r.connected for r in waiting)

    wait_until(all_connected, 30)
    with node.core.events.lock:
        allocator.free_pages(hole, PageState.OWNED)
    failed = [proxy.receive(Failed, 30) for _ in rooms]
    assert {message.room for message in failed} == set(rooms)
    assert {message.error.message for message in failed} == {"no receiver today"}
    wait_until(lambda: is_idle(decode), 5, node.server_info)
    assert node.core.memory.count_pages()["free"] == node.core.memory.num_pages
    node.check_books()


def test_2000_waiting_rooms_that_lose_their_prefill_node_end_in_one_event(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer
) -> None:
    # No room but that of the first fits before its commit.
    rooms = [ask(proxy, decode, prefill, [1] * 200) for _ in range(ROOMS)]
    wait_until(lambda: len(decode.node.receiving.preallocation) == ROOMS - 1, 30)
    decode.node.check_books()
    lose(decode, prefill)
    assert {proxy.receive(Failed, 30).room for _ in rooms} == set(rooms)
    wait_until(lambda: is_idle(decode), 5, decode.node.server_info)
