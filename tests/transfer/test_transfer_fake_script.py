"""Each rule of a fake script does what its documentation says, and bad scripts are refused."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from transfer_helpers import hand_off, introduce, make_pool, reservation, settled, wait_until

from pd.core.errors import UsageError
from pd.transfer import make_transfer_manager
from pd.transfer.base import TransferState
from pd.transfer.fake.manager import FakeManager
from pd.transfer.fake.script import FaultScript, load_script

if TYPE_CHECKING:
    from pd.transfer.base import Receiver, Sender

TOKENS = 8
PAGES = np.arange(2, dtype=np.int32)


@pytest.fixture
def pair(tmp_path):
    """``make(*rules)`` → pools and managers; P runs the script."""
    managers = []

    def make(*rules: dict, peer: str = "D"):
        source, target = make_pool(64, 4), make_pool(64, 4, fill=-1.0)
        path = tmp_path / "script.json"
        path.write_text(json.dumps({"seed": 3, "rules": list(rules)}))
        p = make_transfer_manager("fake", source, "P", fake_script=path)
        d = make_transfer_manager("fake", target, peer)
        managers.extend((p, d))
        introduce(p, "P", d, peer, source)
        return source, target, p, d

    yield make
    for manager in managers:
        manager.close()


def open_room(p: FakeManager, d: FakeManager, epoch: int = 1, peer: str = "D"):
    room = epoch.to_bytes(16)
    receiver = d.receiver("P", room, epoch, PAGES, (0,), TOKENS)
    return p.sender(peer, reservation(receiver, room, epoch, 0), PAGES, TOKENS), receiver


def send_all(sender: Sender) -> None:
    sender.send(0, TOKENS, 0, 3)
    sender.finish()


def untouched(target) -> bool:
    return bool((target.buffer == -1.0).all())


def abort(sender: Sender, receiver: Receiver) -> None:
    sender.abort()
    receiver.abort()


def test_delay_write_delays_and_an_abort_recalls_it(pair) -> None:
    source, target, p, d = pair({"do": "delay_write", "seconds": 0.1, "rooms": 1})
    began = time.monotonic()
    sender, receiver = open_room(p, d)
    sender.send(0, TOKENS, 0, 3)
    assert sender.poll() is TransferState.ACTIVE
    assert untouched(target)
    hand_off(sender, receiver)
    assert time.monotonic() - began >= 0.1
    assert torch.equal(target.tokens(PAGES, 0, TOKENS), source.tokens(PAGES, 0, TOKENS))


def test_an_abort_recalls_a_delayed_write(pair) -> None:
    _, target, p, d = pair({"do": "delay_write", "seconds": 30})
    sender, receiver = open_room(p, d)
    send_all(sender)
    abort(sender, receiver)
    assert sender.drained()
    assert not receiver.drained()
    receiver.on_peer_drained()
    assert receiver.drained()
    assert untouched(target)


def test_late_write_lands_after_the_abort_and_only_then_the_sender_is_drained(pair) -> None:
    source, target, p, d = pair({"do": "late_write", "seconds": 0.1})
    sender, receiver = open_room(p, d)
    send_all(sender)
    abort(sender, receiver)
    assert not sender.drained()
    assert not receiver.drained()
    assert untouched(target)
    wait_until(sender.drained, "the late write")
    assert torch.equal(target.tokens(PAGES, 0, TOKENS), source.tokens(PAGES, 0, TOKENS))


def test_late_write_reads_the_source_when_it_goes_out(pair) -> None:
    """Which is why source pages stay quarantined as well."""
    source, target, p, d = pair({"do": "late_write", "seconds": 0.1})
    sender, receiver = open_room(p, d)
    send_all(sender)
    source.buffer.fill_(8.0)
    hand_off(sender, receiver)
    assert bool((target.tokens(PAGES, 0, TOKENS) == 8.0).all())


def test_duplicate_write_lands_twice_and_counts_as_undrained_in_between(pair) -> None:
    source, target, p, d = pair({"do": "duplicate_write", "seconds": 0.2})
    sender, receiver = open_room(p, d)
    send_all(sender)
    wait_until(lambda: d.nic.writes == 1, "the write")
    target.buffer.fill_(-1.0)
    # Not DONE: a commit now would let D use and reuse the pages under the duplicate.
    assert sender.poll() is TransferState.ACTIVE
    abort(sender, receiver)
    assert not sender.drained()
    wait_until(sender.drained, "the duplicate")
    assert d.nic.writes == 2
    assert torch.equal(target.tokens(PAGES, 0, TOKENS), source.tokens(PAGES, 0, TOKENS))


def test_a_duplicated_write_is_done_after_the_duplicate(pair) -> None:
    _, _, p, d = pair({"do": "duplicate_write", "seconds": 0.05})
    sender, receiver = open_room(p, d)
    sender.send(0, TOKENS, 0, 3)
    hand_off(sender, receiver)
    assert d.nic.writes == 2


def test_lose_write_fails_the_sender_after_a_time(pair) -> None:
    _, target, p, d = pair({"do": "lose_write", "seconds": 0.05})
    sender, _ = open_room(p, d)
    send_all(sender)
    assert sender.poll() is TransferState.ACTIVE
    assert settled(sender) is TransferState.FAILED
    assert str(sender.error) == "fake script: a write of room 1 is lost"
    wait_until(sender.drained, "the drain")
    assert untouched(target)


@pytest.mark.parametrize(
    ("more", "plane", "byte"),
    [({}, 0, 0), ({"part": "v", "byte": 3}, 1, 3), ({"byte": 1 << 40}, 0, None)],
)
def test_corrupt_flips_one_byte_of_the_named_token_and_layer(pair, more, plane, byte) -> None:
    source, target, p, d = pair({"do": "corrupt", "token": 5, "layer": 1, **more})
    sender, receiver = open_room(p, d)
    sender.send(0, 6, 0, 1)
    sender.send(6, TOKENS, 0, 1)
    sender.send(0, TOKENS, 1, 3)
    hand_off(sender, receiver)
    got = target.tokens(PAGES, 0, TOKENS).contiguous().view(torch.uint8)
    sent = source.tokens(PAGES, 0, TOKENS).contiguous().view(torch.uint8)
    where = (got != sent).nonzero().tolist()
    ((layer, part, token, head, found),) = where
    assert (layer, part, token) == (1, plane, 5)
    place = head * got.shape[-1] + found
    assert place == (byte if byte is not None else more["byte"] % (got[0, 0, 0].numel()))
    assert int(got[tuple(where[0])]) ^ int(sent[tuple(where[0])]) == 0xFF


def test_fail_room_fails_the_named_rooms(pair) -> None:
    _, _, p, d = pair({"do": "fail_room", "rooms": [2, 4]})
    states = []
    for epoch in range(1, 6):
        sender, receiver = open_room(p, d, epoch)
        send_all(sender)
        states.append(settled(sender))
        if states[-1] is TransferState.FAILED:
            assert str(sender.error) == f"fake script: room {epoch} fails"
            assert sender.drained()
        receiver.abort()
    done, failed = TransferState.DONE, TransferState.FAILED
    assert states == [done, failed, done, failed, done]


def test_link_down_holds_writes_until_the_link_returns_even_after_an_abort(pair) -> None:
    source, target, p, d = pair({"do": "link_down", "from": 0.0, "to": 0.3})
    sender, receiver = open_room(p, d)
    send_all(sender)
    second, _ = open_room(p, d, 2)
    wait_until(lambda: not p._links["D"]._heap[0].recallable, "the write to enter the link")
    abort(sender, receiver)
    assert not sender.drained()
    assert untouched(target)
    wait_until(sender.drained, "the link to return")
    assert torch.equal(target.tokens(PAGES, 0, TOKENS), source.tokens(PAGES, 0, TOKENS))
    send_all(second)
    assert settled(second) is TransferState.DONE


def test_delay_reservation_answers_for_the_nth_reservation() -> None:
    script = FaultScript(
        rules=json_rules(
            {"do": "delay_reservation", "seconds": 0.5, "rooms": 2},
            {"do": "delay_reservation", "seconds": [1.0, 2.0], "rooms": 3},
        )
    )
    d = FakeManager(make_pool(16, 4), "D", script=script)
    delays = [d.reservation_delay() for _ in range(4)]
    d.close()
    assert delays[:2] == [0.0, 0.5]
    assert 1.0 <= delays[2] <= 2.0
    assert delays[3] == 0.0


def test_other_backends_never_delay_reservations() -> None:
    manager = make_transfer_manager("tcp", make_pool(16, 4), "D")
    assert manager.reservation_delay() == 0.0
    manager.close()


def json_rules(*rules: dict):
    import msgspec

    return msgspec.convert({"rules": list(rules)}, FaultScript).rules


@pytest.mark.parametrize(("peer", "fails"), [("decode-1", True), ("unified-1", False)])
def test_rules_select_peers_by_pattern(pair, peer, fails) -> None:
    _, _, p, d = pair({"do": "fail_room", "peer": "decode-*"}, peer=peer)
    sender, _ = open_room(p, d, peer=peer)
    send_all(sender)
    assert (settled(sender) is TransferState.FAILED) == fails


def test_draws_depend_on_the_seed_and_the_numbers_only() -> None:
    rules = json_rules({"do": "delay_write", "seconds": [0.0, 1.0], "probability": 0.5})
    script = FaultScript(seed=5, rules=rules)
    plans = [script.plan_write("D", room, write).delay for room in range(20) for write in range(9)]
    again = [script.plan_write("D", room, write).delay for room in range(20) for write in range(9)]
    other = FaultScript(seed=6, rules=rules)
    assert plans == again
    assert 60 < sum(delay == 0.0 for delay in plans) < 120
    assert plans != [
        other.plan_write("D", room, write).delay for room in range(20) for write in range(9)
    ]


def test_the_card_refuses_what_lies_outside_the_pool(pair, caplog) -> None:
    """All that it checks besides the key."""
    import msgspec

    from pd.transfer.fake.nic import FakeDestination

    _, target, p, d = pair()
    receiver = d.receiver("P", bytes(16), 1, PAGES, (0,), TOKENS)
    asked = reservation(receiver, bytes(16), 1, 0)
    found = msgspec.msgpack.decode(asked.destination, type=FakeDestination)
    for page in (16, -1, 1 << 28):
        pages = np.array([0, page], dtype="<i4").tobytes()
        asked.destination = msgspec.msgpack.encode(msgspec.structs.replace(found, pages=pages))
        sender = p.sender("D", asked, PAGES, TOKENS)
        send_all(sender)
        assert settled(sender) is TransferState.FAILED
        assert str(sender.error) == "D refused a write"
    assert untouched(target)
    sender, receiver = open_room(p, d, 2)
    sender.send(0, TOKENS, 0, 3)
    hand_off(sender, receiver)


@pytest.mark.parametrize(
    "destination", [b"", b"\xff", b"\x80", "short", "start", "stop", "page_size"]
)
def test_bad_destinations_are_refused(pair, destination) -> None:
    import msgspec

    from pd.core.errors import TransferError
    from pd.transfer.fake.nic import FakeDestination

    _, _, p, d = pair()
    receiver = d.receiver("P", bytes(16), 1, PAGES, (0,), TOKENS)
    asked = reservation(receiver, bytes(16), 1, 0)
    if isinstance(destination, bytes):
        asked.destination = destination
    else:
        found = msgspec.msgpack.decode(asked.destination, type=FakeDestination)
        change = {
            "short": {"pages": found.pages[:-4]},
            "start": {"token_start": 1},
            "stop": {"token_stop": 9},
            "page_size": {"page_size": 0},
        }[destination]
        asked.destination = msgspec.msgpack.encode(msgspec.structs.replace(found, **change))
    with pytest.raises(TransferError, match=r"D sent a bad destination|D reserved tokens"):
        p.sender("D", asked, PAGES, TOKENS)


BAD_SCRIPTS = {
    "rules: [{do: delay_write, secnds: 1}]": ("secnds", "$.rules[0]"),
    "rules: [{do: delay_write}]": ("seconds", "$.rules[0]"),
    "rules: [{do: explode}]": ("explode", "$.rules[0].do"),
    "rules: [{do: delay_write, seconds: -1}]": ("`seconds` must be", "$.rules[0]"),
    "rules: [{do: fail_room, rooms: 0}]": ("`rooms` are numbered from 1", "$.rules[0]"),
    "rules: [{do: fail_room, probability: 2}]": ("<= 1", "$.rules[0].probability"),
    "rules: [{do: link_down, from: 3, to: 2}]": ("`from` (3) must be before `to`", "$.rules[0]"),
    "rules: [{do: late_write, seconds: [2, 1]}]": ("[least, most]", "$.rules[0]"),
    "rules: [{do: late_write, seconds: [1]}]": ("[least, most]", "$.rules[0]"),
    "rules: [{do: late_write, seconds: .nan}]": ("`seconds` must be", "$.rules[0]"),
    "rules: [{do: delay_reservation, seconds: 1, peer: x}]": ("`peer`", "$.rules[0]"),
    "seeds: 3": ("seeds", ""),
    "[1, 2": ("neither JSON nor YAML", "script"),
    "hello": ("Expected `object`", "script"),
}


@pytest.mark.parametrize("text", BAD_SCRIPTS)
def test_a_bad_script_is_refused_in_one_line_naming_the_place(tmp_path, text) -> None:
    path = tmp_path / "script.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as raised:
        load_script(path)
    assert all(part in str(raised.value) for part in (*BAD_SCRIPTS[text], str(path)))
    assert "\n" not in str(raised.value)


def test_a_missing_script_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="cannot read the fake script"):
        load_script(Path("no-such-file"))


def test_yaml_json_and_empty_scripts_load(tmp_path) -> None:
    path = tmp_path / "script"
    rule = {"do": "link_down", "from": 1, "to": 2, "rooms": [1, 2], "peer": "d*"}
    path.write_text(json.dumps({"seed": 4, "rules": [rule]}))
    as_json = load_script(path)
    path.write_text("seed: 4\nrules:\n  - {do: link_down, from: 1, to: 2, rooms: [1, 2], peer: d*}")
    assert load_script(path) == as_json
    path.write_text("")
    assert load_script(path) == FaultScript()
