"""The decode node's half of a hand-off, told by a prefill node that says whatever it likes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster import is_idle, wait_until
from decode_helpers import PROMPT, ask, handled, lose, state_of
from free_rules import MakeFreeRules
from prefill_peer import PrefillPeer, is_ones
from raw_peer import SOON, proxy_of
from tiny import TOKEN_BYTES, tiny_head, tiny_node

from pd import assembly
from pd.core.grammar import Grammar
from pd.core.messages import (
    Abort,
    AbortRoom,
    CommitAck,
    Failed,
    Finish,
    FirstToken,
    GrammarReady,
    NodeHeartbeat,
    Reservation,
    StepOutputs,
)
from pd.engine.page_allocator import PageState
from pd.grammar.compiler import CompileLimits
from pd.grammar.grammars import Grammars
from pd.scheduling.request import RequestState

if TYPE_CHECKING:
    from raw_peer import RawPeer

    from pd.engine.rule_budget import RuleBudget
    from pd.launch import NodeServer

# ---- the good way


def test_kv_is_used_only_after_commit_and_token_1_is_repeated(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer
) -> None:
    room = ask(proxy, decode, prefill)
    reservation = prefill.receive(Reservation)
    assert (reservation.room, reservation.cached) == (room, (0,))
    sender = prefill.push(reservation, len(PROMPT))
    handled(decode)
    assert state_of(decode, room) is RequestState.RECEIVING
    assert decode.node.core.memory.count_pages()["reserved"] == 6
    assert decode.node.core.memory.radix.count_cached(np.array(PROMPT, np.int32)) == 0
    pages = decode.node.requests.find_request(room).sequence.pages.copy()
    prefill.commit(reservation, sender.bytes_sent)
    assert prefill.receive(CommitAck).epoch == reservation.epoch
    (output,) = proxy.receive(StepOutputs).outputs
    assert (output.position, output.token_ids) == (0, [7])
    assert output.transferred_bytes == len(PROMPT) * TOKEN_BYTES
    assert is_ones(decode, pages[:5])
    (output,) = proxy.receive(StepOutputs).outputs
    assert output.position == 1


def test_the_second_turn_reserves_only_what_is_not_cached(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer
) -> None:
    turns = (PROMPT, 0), (PROMPT, 20), ([*PROMPT, 1, 2, 3], 20), (PROMPT[:20], 20)
    for tokens, cached in turns:
        ask(proxy, decode, prefill, tokens, params={"max_tokens": 2})
        reservation = prefill.receive(Reservation)
        assert reservation.cached == (cached,)
        sender = prefill.push(reservation, len(tokens))
        prefill.commit(reservation, sender.bytes_sent)
        (output,) = proxy.receive(StepOutputs).outputs
        assert output.transferred_bytes == (len(tokens) - cached) * TOKEN_BYTES
        assert proxy.receive(StepOutputs).outputs[0].finish
        wait_until(lambda: is_idle(decode), 5)


def test_choices_that_ended_with_token_1_or_at_the_proxy_do_not_run(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer
) -> None:
    room = ask(proxy, decode, prefill, params={"n": 4, "max_tokens": 6})
    reservation = prefill.receive(Reservation)
    proxy.send(Abort(to=decode.instance_id, sender=proxy.name, room=room, index=2))
    wait_until(lambda: decode.node.requests.find_request(room).ended_choices == {2}, 5)
    sender = prefill.push(reservation, len(PROMPT))
    stopped = FirstToken(1, 8, finish=Finish("stop", 8))
    tokens = [FirstToken(0, 7), stopped, FirstToken(2, 9), FirstToken(3, 10)]
    prefill.commit(reservation, sender.bytes_sent, first_tokens=tokens)
    wait_until(lambda: is_idle(decode), 5)
    proxy.beat()
    proxy.receive(NodeHeartbeat)
    outputs = [o for m in proxy.seen if isinstance(m, StepOutputs) for o in m.outputs]
    assert {output.index for output in outputs} == {0, 3}
    bytes_told = [output.transferred_bytes for output in outputs if output.transferred_bytes]
    assert bytes_told == [len(PROMPT) * TOKEN_BYTES], "the choices share one transfer"


# ---- commits that are not what they should be


def test_a_repeated_commit_is_acknowledged_again_however_late(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = decode.node.engine.runner.forward

    def slowly(*args: Any) -> Any:
        time.sleep(0.01)
        return forward(*args)

    monkeypatch.setattr(decode.node.engine.runner, "forward", slowly)
    ask(proxy, decode, prefill, params={"max_tokens": 200})
    reservation = prefill.receive(Reservation)
    sender = prefill.push(reservation, len(PROMPT))
    prefill.commit(reservation, sender.bytes_sent)
    prefill.receive(CommitAck)
    decode.node.receiving._recent.clear()  # as after a lease
    prefill.commit(reservation, sender.bytes_sent)
    prefill.receive(CommitAck)
    assert not any(isinstance(seen, AbortRoom) for seen in prefill.seen)


@pytest.mark.parametrize("what", ["epoch", "room"])
def test_a_commit_of_something_else_is_refused_and_changes_nothing(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer, what: str
) -> None:
    room = ask(proxy, decode, prefill)
    reservation = prefill.receive(Reservation)
    sender = prefill.push(reservation, len(PROMPT))
    other_room, other_epoch = room, reservation.epoch + 1
    if what == "room":
        other_room, other_epoch = b"an unknown room.", reservation.epoch
    wrong = Reservation(to="", sender="", room=other_room, epoch=other_epoch, cached=(0,))
    prefill.commit(wrong, sender.bytes_sent)
    refusal = prefill.receive(AbortRoom)
    assert (refusal.room, refusal.epoch) == (other_room, other_epoch)
    assert state_of(decode, room) is RequestState.RECEIVING
    prefill.commit(reservation, sender.bytes_sent)
    assert prefill.receive(CommitAck).epoch == reservation.epoch


def test_a_commit_of_another_number_of_bytes_fails_the_request(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer
) -> None:
    ask(proxy, decode, prefill)
    reservation = prefill.receive(Reservation)
    sender = prefill.push(reservation, len(PROMPT))
    prefill.commit(reservation, sender.bytes_sent - 1)
    failed = proxy.receive(Failed)
    assert failed.error.kind == "transfer"
    assert f"committed {sender.bytes_sent - 1} KV bytes" in failed.error.message
    assert prefill.receive(AbortRoom).epoch == reservation.epoch


@pytest.mark.parametrize(
    "tokens",
    [[], [FirstToken(1, 7)], [FirstToken(0, 7), FirstToken(1, 7)], [FirstToken(0, -1)],
     [FirstToken(0, 256)]],
)  # fmt: skip
def test_a_commit_without_exactly_the_first_tokens_fails_the_request(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer, tokens: list[FirstToken]
) -> None:
    ask(proxy, decode, prefill)
    reservation = prefill.receive(Reservation)
    sender = prefill.push(reservation, len(PROMPT))
    prefill.commit(reservation, sender.bytes_sent, first_tokens=tokens)
    assert proxy.receive(Failed).error.kind == "transfer"


def test_a_node_without_a_head_takes_no_drafter_state(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer
) -> None:
    ask(proxy, decode, prefill)
    reservation = prefill.receive(Reservation)
    sender = prefill.push(reservation, len(PROMPT))
    prefill.commit(reservation, sender.bytes_sent, drafter_state=bytes(5))
    failed = proxy.receive(Failed)
    assert failed.error.kind == "transfer"
    assert "a drafter state of 5 bytes; expected 0" in failed.error.message


def test_a_drafter_state_of_another_size_fails_its_request_alone() -> None:
    settings: dict[str, Any] = {"kv_cache_tokens": 256, "reserved_decode_tokens": 8}
    settings |= {"speculative_algorithm": "eagle", "speculative_draft_model": tiny_head()}
    node = tiny_node("decode", **settings)
    try:
        with PrefillPeer(node) as prefill, proxy_of(node) as proxy:
            right = node.node.engine.drafter_state_bytes
            assert right == 32 * 4
            # Without a state the first step has no draft.
            for size in (right - 1, right + 1, 2 * right, right, 0):
                ask(proxy, node, prefill, params={"max_tokens": 4})
                reservation = prefill.receive(Reservation)
                sender = prefill.push(reservation, len(PROMPT))
                prefill.commit(reservation, sender.bytes_sent, drafter_state=bytes(size))
                if size in (0, right):
                    prefill.receive(CommitAck)
                else:
                    failed = proxy.receive(Failed)
                    assert failed.error.kind == "transfer"
                    told = f"a drafter state of {size} bytes; expected {right}"
                    assert told in failed.error.message
                    assert prefill.receive(AbortRoom).epoch == reservation.epoch
                wait_until(lambda: is_idle(node), 10)
            assert proxy.receive(StepOutputs).outputs[0].token_ids == [7]
            node.node.check_books()
            lose(node, prefill)
    finally:
        node.stop()


def test_a_commit_before_the_data_waits_for_it(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer
) -> None:
    room = ask(proxy, decode, prefill)
    reservation = prefill.receive(Reservation)
    prefill.commit(reservation, len(PROMPT) * TOKEN_BYTES)
    handled(decode)
    assert state_of(decode, room) is RequestState.RECEIVING
    prefill.push(reservation, len(PROMPT))
    prefill.receive(CommitAck)


# ---- aborts


@pytest.mark.parametrize(
    ("kind", "told"), [("node_failed", True), ("deadline", True), ("aborted", False)]
)
def test_p_gives_up_and_the_proxy_hears_the_real_reason(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer, kind: str, told: bool
) -> None:
    room = ask(proxy, decode, prefill)
    reservation = prefill.receive(Reservation)
    prefill.give_up(room, reservation.epoch, kind)
    assert prefill.receive(AbortRoom, SOON).epoch == reservation.epoch
    wait_until(lambda: is_idle(decode), SOON)
    if told:
        assert proxy.receive(Failed).error.kind == kind
    else:
        proxy.beat()
        proxy.receive(NodeHeartbeat)
        assert not any(isinstance(seen, Failed) for seen in proxy.seen)


@pytest.mark.parametrize("kind", ["node_failed", "aborted"])
def test_what_was_committed_goes_on_though_p_ends_before_it_knows(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer, kind: str
) -> None:
    room = ask(proxy, decode, prefill, params={"max_tokens": 100})
    reservation = prefill.receive(Reservation)
    sender = prefill.push(reservation, len(PROMPT))
    prefill.commit(reservation, sender.bytes_sent)
    prefill.receive(CommitAck)
    prefill.give_up(room, reservation.epoch, kind)
    assert prefill.receive(CommitAck).epoch == reservation.epoch
    tokens = 0
    while tokens < 100:
        for output in proxy.receive(StepOutputs).outputs:
            tokens = output.position + len(output.token_ids)
    assert not any(isinstance(seen, Failed) for seen in proxy.seen)


def test_when_token_1_ended_the_request_nothing_more_is_said(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer
) -> None:
    room = ask(proxy, decode, prefill)
    prefill.receive(Reservation)
    prefill.give_up(room, 0, "finished")
    wait_until(lambda: is_idle(decode), SOON)
    proxy.beat()
    proxy.receive(NodeHeartbeat)
    assert not any(isinstance(seen, Failed | StepOutputs) for seen in proxy.seen)


def test_an_abort_of_another_epoch_is_dropped(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer
) -> None:
    room = ask(proxy, decode, prefill)
    reservation = prefill.receive(Reservation)
    prefill.give_up(room, reservation.epoch + 1)
    prefill.drained(room, reservation.epoch + 1)
    prefill.drained(b"an unknown room.", reservation.epoch)
    sender = prefill.push(reservation, len(PROMPT))
    prefill.commit(reservation, sender.bytes_sent)
    prefill.receive(CommitAck)


def test_another_prefill_node_cannot_end_a_room(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer
) -> None:
    room = ask(proxy, decode, prefill)
    reservation = prefill.receive(Reservation)
    with PrefillPeer(decode) as other:
        mine = ask(proxy, decode, other, [1] * 8)
        other.receive(Reservation)
        other.give_up(room, reservation.epoch)
        other.give_up(room, 0)
        other.drained(room, reservation.epoch)
        other.commit(reservation, len(PROMPT) * TOKEN_BYTES)
        assert other.receive(AbortRoom).room == room
        assert state_of(decode, room) is RequestState.RECEIVING
        other.give_up(mine, 0)
        wait_until(lambda: mine not in decode.node.requests, 5)
        lose(decode, other)
    sender = prefill.push(reservation, len(PROMPT))
    prefill.commit(reservation, sender.bytes_sent)
    prefill.receive(CommitAck)


@pytest.mark.parametrize("stage", ["preallocating", "receiving", "running"])
def test_a_proxys_abort_reaches_p_until_the_commit(
    decode: NodeServer, prefill: PrefillPeer, proxy: RawPeer, stage: str
) -> None:
    room = ask(proxy, decode, prefill, params={"max_tokens": 200})
    reservation = prefill.receive(Reservation)
    if stage == "preallocating":
        with (
            decode.node.core.events.lock
        ):  # memory for the second comes only when the first is gone
            taken = decode.node.core.memory.allocator.count_pages(PageState.FREE)
            hole = decode.node.core.memory.allocator.allocate_pages(taken, PageState.OWNED)
        room = ask(proxy, decode, prefill, [1] * 40)
        wait_until(lambda: room in decode.node.requests, 5)
    if stage == "running":
        sender = prefill.push(reservation, len(PROMPT))
        prefill.commit(reservation, sender.bytes_sent)
        proxy.receive(StepOutputs)
    handled(decode)
    proxy.send(Abort(to=decode.instance_id, sender=proxy.name, room=room))
    wait_until(lambda: room not in decode.node.requests, SOON)
    if stage == "preallocating":
        assert prefill.receive(AbortRoom, SOON).epoch == 0
        decode.node.core.memory.allocator.free_pages(hole, PageState.OWNED)
    elif stage == "receiving":
        assert prefill.receive(AbortRoom, SOON).epoch == reservation.epoch
    else:
        handled(decode)
        assert not any(isinstance(seen, AbortRoom) for seen in prefill.seen)


class _Only9:
    """Rules that allow token 9 alone."""

    has_ended = jumps_forward = is_quick = False
    first_mask = None

    def __init__(self, budget: RuleBudget) -> None:
        self.budget = budget

    def ends_with(self, token: int) -> bool:
        return False

    def fork_rules(self) -> _Only9:
        return self

    def fill_mask(self, mask: Any) -> None:
        mask[:] = 0
        mask[0] = 1 << 9

    def accept_token(self, token: int) -> bool:
        return token == 9

    def roll_back(self, count: int) -> None:
        """Nothing to take back."""

    def find_forced(self, ids: Any) -> list[int]:
        return []


class _MakeOnly9(MakeFreeRules):
    """Makes these rules for every choice."""

    def __call__(self, ending: Any) -> Any:
        return _Only9(self._budget)


@pytest.mark.parametrize(("first", "is_right"), [(9, True), (7, False)])
def test_a_token_1_that_the_grammar_forbids_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, first: int, is_right: bool
) -> None:
    made = Grammars("no tokens", CompileLimits(1.0, 1, 1), 0)
    monkeypatch.setattr(
        made, "request_rules", lambda _, done, owner="", **_options: done(_MakeOnly9())
    )
    monkeypatch.setattr(assembly, "make_grammars", lambda *_: made)
    node = tiny_node("decode")
    try:
        with PrefillPeer(node) as prefill, proxy_of(node) as proxy:
            grammar = Grammar("regex", "a")
            room = ask(proxy, node, prefill, params={"max_tokens": 3, "grammar": grammar})
            prefill.receive(GrammarReady)
            prefill.has_grammar(room)
            reservation = prefill.receive(Reservation)
            sender = prefill.push(reservation, len(PROMPT))
            tokens = [FirstToken(0, first)]
            prefill.commit(reservation, sender.bytes_sent, first_tokens=tokens)
            if is_right:
                assert proxy.receive(StepOutputs).outputs[0].token_ids == [9]
            else:
                assert "forbids token 7" in proxy.receive(Failed).error.message
            wait_until(lambda: is_idle(node), 10)
            node.node.check_books()
            lose(node, prefill)
    finally:
        node.stop()
