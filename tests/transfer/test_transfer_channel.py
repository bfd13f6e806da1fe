"""The side channel: messages both ways, and what its end proves."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import struct
import threading
import time

import msgspec
import pytest
from relay import Relay
from transfer_helpers import stop_process, wait_until, watch_limit

from pd.transfer.wire.channel import MAX_MESSAGE_BYTES, Channel
from pd.transfer.wire.greeting import greet_peer
from pd.transfer.wire.hub import ChannelHub


class Ping(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    number: int
    padding: bytes = b""


class Pong(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    number: int


DECODER = msgspec.msgpack.Decoder(Ping | Pong)


class Side:
    """A hub whose owner remembers everything."""

    def __init__(self, instance: str, key: bytes | None = None, service: str = "test") -> None:
        self.channel: Channel | None = None
        self.messages: list[object] = []
        self.ends: list[tuple[str, bool]] = []
        self.errors: list[tuple[str, bool]] = []
        self.answers = False
        self.raises: Exception | None = None
        self.hub = ChannelHub(service, instance, "127.0.0.1", key, DECODER, self._accept)

    def dial(self, other: Side, peer: str, port: int = 0):
        return self.hub.dial_peer(peer, ("127.0.0.1", port or other.hub.port), self)

    def _accept(self, channel: Channel) -> Side:
        self.channel = channel
        return self

    def on_opened(self, channel: Channel) -> None:
        self.channel = channel

    def on_unreachable(self, error, final: bool) -> None:
        self.errors.append((str(error), final))

    def on_message(self, channel: Channel, message) -> None:
        if self.raises is not None:
            raise self.raises
        self.messages.append(message)
        if self.answers:
            channel.send(Pong(message.number))

    def on_ended(self, channel: Channel, reason: str, proof: bool) -> None:
        self.ends.append((reason, proof))


@pytest.fixture
def make():
    sides = []

    def side(*args, **kwargs) -> Side:
        sides.append(Side(*args, **kwargs))
        return sides[-1]

    yield side
    for one in sides:
        one.hub.close()


@pytest.fixture
def pair(make):
    p, d = make("P", b"k" * 16), make("D", b"k" * 16)
    p.dial(d, "D")
    wait_until(lambda: p.channel and d.channel, "the channel")
    return p, d


def test_messages_keep_their_order_both_ways(pair) -> None:
    p, d = pair
    d.answers = True
    assert (d.channel.peer, d.channel.inbound) == ("P", True)
    assert (p.channel.peer, p.channel.inbound) == ("D", False)
    for number in range(500):
        p.channel.send(Ping(number, bytes(number * 10)))
    wait_until(lambda: len(p.messages) == 500, "the answers")
    assert p.messages == [Pong(number) for number in range(500)]
    assert [m.number for m in d.messages] == list(range(500))


def test_many_threads_may_send(pair) -> None:
    p, d = pair

    def send(first: int) -> None:
        for number in range(first, first + 200):
            p.channel.send(Ping(number, bytes(1000)))

    threads = [threading.Thread(target=send, args=(n * 1000,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: len(d.messages) == 800, "all messages")
    for n in range(4):
        own = [m.number for m in d.messages if m.number // 1000 == n]
        assert own == list(range(n * 1000, n * 1000 + 200))


def test_a_close_of_the_prefill_side_is_proof(pair) -> None:
    p, d = pair
    p.channel.close()
    wait_until(lambda: d.ends, "the end")
    assert d.ends == [("closed by the peer", True)]
    assert p.ends == []


def test_a_half_close_asks_and_the_close_answers(pair) -> None:
    p, d = pair
    d.channel.half_close()
    wait_until(lambda: p.ends, "the request")
    # P still drains, and may still say something about it.
    p.channel.send(Ping(1))
    d.channel.send(Pong(1))
    assert d.ends == []
    p.channel.close()
    wait_until(lambda: d.ends, "the answer")
    assert d.ends == [("closed by the peer", True)]
    assert p.messages == []


def test_only_the_decode_side_may_half_close(pair) -> None:
    p, _ = pair
    with pytest.raises(AssertionError, match="FIN"):
        p.channel.half_close()


def _child(port: int, instance: str, pipe) -> None:
    side = Side(instance, b"k" * 16)
    side.hub.dial_peer("D", ("127.0.0.1", port), side)
    wait_until(lambda: side.channel is not None, "the channel")
    pipe.send(True)
    signal.pause()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_death_of_the_process_is_proof(make, how) -> None:
    d = make("D", b"k" * 16)
    pipe, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_child, args=(d.hub.port, "P", theirs), daemon=True)
    process.start()
    assert pipe.poll(30.0)
    wait_until(lambda: d.channel is not None, "the channel")
    os.kill(process.pid, how)
    wait_until(lambda: d.ends, "the end")
    assert [proof for _, proof in d.ends] == [True]
    process.join()


def test_a_stopped_process_proves_nothing_until_it_goes_on(make) -> None:
    d = make("D", b"k" * 16)
    pipe, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_child, args=(d.hub.port, "P", theirs), daemon=True)
    process.start()
    assert pipe.poll(30.0)
    wait_until(lambda: d.channel is not None, "the channel")
    stop_process(process.pid)
    d.channel.half_close()
    # Time enough for an answer of its kernel, which takes the FIN.
    time.sleep(0.3)
    assert d.ends == []
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: d.ends, "the end")
    assert d.ends == [("closed by the peer", True)]
    process.join()


class _Broken:
    """A socket whose connection the kernel gave up."""

    def __init__(self, sock: socket.socket, error: OSError) -> None:
        self._sock, self._error = sock, error

    def recv(self, size: int) -> bytes:
        error, self._error = self._error, None
        if error is None:
            return b""
        raise error

    def send(self, data: bytes) -> int:
        self.recv(0)
        raise BrokenPipeError

    def __getattr__(self, name: str):
        return getattr(self._sock, name)


@pytest.mark.parametrize("first", ["recv", "send"])
def test_a_time_out_proves_nothing_whoever_sees_it_first(pair, first) -> None:
    p, d = pair
    channel = d.channel
    channel.sock = _Broken(channel.sock, TimeoutError(110, "Connection timed out"))
    if first == "send":
        channel.send(Pong(1))
    p.channel.send(Ping(1))
    wait_until(lambda: d.ends, "the end")
    assert d.ends == [("Connection timed out", False)]


def raw(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=10.0)
    greet_peer(sock, "test", "P", "D", None)
    return sock


BAD = [
    (struct.pack("<I", MAX_MESSAGE_BYTES + 1), f"a message of {MAX_MESSAGE_BYTES + 1} bytes"),
    (struct.pack("<I", 3) + b"\xc1\xc1\xc1", "it sent an invalid message"),
    (struct.pack("<I", 1) + b"\x01", "Expected `object`, got `int`"),
]


@pytest.mark.parametrize(("data", "reason"), BAD)
def test_what_is_no_message_ends_the_channel_and_proof_may_follow(
    make, caplog, data, reason
) -> None:
    d = make("D")
    with raw(d.hub.port) as sock:
        wait_until(lambda: d.channel is not None, "the channel")
        sock.sendall(data)
        wait_until(lambda: d.ends, "the end")
        assert reason in d.ends[0][0]
        assert not d.ends[0][1]
        assert "gave up the test channel of P (127.0.0.1:" in caplog.text
        # D asks for the close, and drops what comes before it.
        assert sock.recv(1) == b""
        sock.sendall(data)
        assert len(d.ends) == 1
    wait_until(lambda: len(d.ends) == 2, "the proof")
    assert d.ends[1][1]


def test_an_owner_that_fails_loses_its_channel_only(pair, make, caplog) -> None:
    p, d = pair
    d.raises = RuntimeError("a CUDA error")
    p.channel.send(Ping(1))
    wait_until(lambda: d.ends and p.ends, "the end")
    assert d.ends == [("a CUDA error", False)]
    other = make("Q", b"k" * 16)
    d.raises = None
    other.dial(d, "D")
    wait_until(lambda: other.channel is not None, "the other channel")
    other.channel.send(Ping(2))
    wait_until(lambda: d.messages, "the message")


@pytest.mark.parametrize("end", ["P", "D"])
def test_a_channel_that_cannot_be_watched_is_closed_and_the_next_one_is_read(
    make, caplog, end
) -> None:
    """By the end that watches it. P tries again by itself; on D it ends before it is anybody's."""
    p, d = make("P"), make("D")
    limited = p if end == "P" else d
    watch_limit(limited.hub._selector, lambda data: isinstance(data, Channel))
    p.dial(d, "D")
    if end == "D":
        wait_until(lambda: p.ends, "the end")
        assert d.channel is None
        p.channel = None
        p.dial(d, "D")
    wait_until(lambda: p.channel is not None, "the channel")
    p.channel.send(Ping(1))
    wait_until(lambda: d.messages, "the message")
    assert "No space left on device" in caplog.text


def test_a_peer_that_does_not_read_is_given_up_without_blocking_anybody(make) -> None:
    d = make("D")
    with raw(d.hub.port) as sock:
        wait_until(lambda: d.channel is not None, "the channel")
        for number in range(200):
            d.channel.send(Ping(number, bytes(100_000)))
        wait_until(lambda: d.ends, "the end")
        assert d.ends == [("it does not read its messages", False)]
        while sock.recv(1 << 20):
            pass
    wait_until(lambda: len(d.ends) == 2, "the proof")


def test_another_key_another_service_and_another_instance_are_refused(make) -> None:
    d = make("D", b"k" * 16)
    for side, peer, why in [
        (make("P", b"x" * 16), "D", "did not prove that it has the cluster key"),
        (make("P", None), "D", "the cluster keys of the two nodes differ"),
        (make("P", b"k" * 16, "other"), "D", "it runs another transfer backend"),
        (make("P", b"k" * 16), "E", "another instance listens there"),
    ]:
        side.dial(d, peer)
        wait_until(lambda side=side: side.errors, "the refusal")
        message, final = side.errors[0]
        assert why in message
        assert final
    assert d.channel is None
    assert "kkkk" not in message


def test_dialling_goes_on_until_somebody_listens(make) -> None:
    p, d = make("P"), make("D")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    p.dial(d, "D", port)
    wait_until(lambda: p.errors, "the first failure")
    assert p.errors[0] == ("node D is gone: nobody listens at its address", False)
    relay = Relay(d.hub.port, at=port)
    wait_until(lambda: p.channel is not None, "the channel")
    relay.close()


def test_a_dial_for_which_no_thread_can_start_begins_later(make, monkeypatch) -> None:
    p, d = make("P"), make("D")
    refused: list[threading.Thread] = []

    def no_thread(self: threading.Thread) -> None:
        refused.append(self)
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        p.dial(d, "D")
        wait_until(lambda: len(refused) > 1, "another try")
    wait_until(lambda: p.channel is not None, "the channel")
    assert p.errors == []


def test_a_cancelled_dial_stops(make) -> None:
    p, d = make("P"), make("D")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    dial = p.dial(d, "D", port)
    wait_until(lambda: p.errors, "the first failure")
    dial.cancel()
    wait_until(lambda: not any(t.name == "pd-dial-test" for t in threading.enumerate()), "the end")


def test_strangers_are_turned_away(make, caplog) -> None:
    d = make("D")
    with socket.create_connection(("127.0.0.1", d.hub.port), timeout=10.0) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n".ljust(181))
        assert sock.recv(1) == b""
    assert d.hub.refused == 1
    assert "it began with b'GET / HT', not with a hello" in caplog.text
