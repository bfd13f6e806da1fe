"""Message sockets: what comes in is bounded, checked and attributed to whoever sent it."""

from __future__ import annotations

import logging
import random
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq
from cluster import random_prompts, wait_until
from raw_peer import RawPeer, proxy_of
from requests_for_tests import make_generate
from tiny import tiny_cluster, tiny_model, tiny_node

from pd import assembly
from pd.core.config import NodeConfig
from pd.core.errors import SetupError
from pd.core.messages import (
    Abort,
    Commit,
    Failed,
    NodeHeartbeat,
    ProxyHeartbeat,
    StepOutputs,
    encode_message,
)
from pd.node import control
from pd.node.control import ControlLink, ControlThread
from pd.scheduling.handlers import Handlers
from pd.util.numbering import SentNumbers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.launch import NodeServer

KEY = b"0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def unified() -> Iterator[NodeServer]:
    server = tiny_node("unified")
    yield server
    server.stop()


def generate_to(server: NodeServer, sender: str, **fields: Any) -> Any:
    return make_generate(range(10), to=server.instance_id, sender=sender, **fields)


def malformed_frames(rng: random.Random) -> list[bytes]:
    good = encode_message(ProxyHeartbeat(to="", sender="raw-proxy"))
    mistyped = {"type": "Abort", "to": "x", "sender": "raw-proxy", "room": 7}
    return [
        b"",
        b"\x00",
        good[:-3],
        good + b"\x00",
        rng.randbytes(100),
        rng.randbytes(100_000),
        b"\x91" * 5000,  # arrays in arrays
        msgspec.msgpack.encode({"type": "Nonsense", "to": "x", "sender": "raw-proxy"}),
        msgspec.msgpack.encode({"type": "ProxyHeartbeat", "to": "x"}),
        msgspec.msgpack.encode(mistyped),
        msgspec.msgpack.encode(mistyped | {"room": b"r" * 16, "extra": 1}),
        msgspec.msgpack.encode({"type": "Abort", "to": b"\xff", "sender": 1, "room": b""}),
    ]


def test_malformed_frames_are_dropped_and_the_node_lives(unified: NodeServer, seed: int) -> None:
    rng = random.Random(seed)
    with proxy_of(unified) as peer:
        for frame in malformed_frames(rng):
            peer.send_bytes(frame)
        peer.send_bytes(b"several", b"frames", b"at once")
        peer.beat()
        assert peer.receive(NodeHeartbeat).ready
        peer.send(generate_to(unified, peer.name))
        peer.receive(StepOutputs)


def test_a_message_for_another_instance_is_dropped(unified: NodeServer) -> None:
    with proxy_of(unified) as peer:
        message = make_generate(range(4), to="an-earlier-life", sender=peer.name)
        peer.send(message)
        peer.beat()
        peer.receive(NodeHeartbeat)
        assert all(isinstance(answer, NodeHeartbeat) for answer in peer.seen)
    assert message.room not in unified.node.requests


def test_a_message_that_claims_another_sender_is_dropped(unified: NodeServer) -> None:
    with proxy_of(unified) as peer:
        message = generate_to(unified, "somebody-else")
        peer.send(message)
        peer.beat()
        peer.receive(NodeHeartbeat)
    assert message.room not in unified.node.requests


def test_a_socket_without_identity_cannot_speak_for_anybody(unified: NodeServer) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(unified.node.endpoint)
        socket.send(encode_message(ProxyHeartbeat(to="", sender="")))
        assert not socket.poll(300)


def test_a_message_for_another_role_is_dropped(
    unified: NodeServer, caplog: pytest.LogCaptureFixture
) -> None:
    with proxy_of(unified) as peer, caplog.at_level(logging.WARNING):
        to, room = unified.instance_id, b"r" * 16
        commit = Commit(to=to, sender=peer.name, room=room, epoch=1, num_bytes=0, first_tokens=[])
        peer.send(commit)
        peer.beat()
        peer.receive(NodeHeartbeat)
    assert "Commit: not for a unified node" in caplog.text


def test_wrong_messages_are_logged_warnings(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd.util.warning_limit.SECONDS", 60.0)
    server = tiny_node("unified")
    try:
        with (
            proxy_of(server) as peer,
            RawPeer(server.node.endpoint, "other") as other,
            caplog.at_level(logging.WARNING),
        ):
            to, room = server.instance_id, b"r" * 16
            foreign = encode_message(ProxyHeartbeat(to="", sender="somebody"))
            commit = Commit(
                to=to, sender=peer.name, room=room, epoch=1, num_bytes=0, first_tokens=[]
            )
            request = generate_to(server, peer.name, params={"max_tokens": 900})
            for _ in range(5):
                peer.send_bytes(b"malformed")
                peer.send_bytes(foreign)
                peer.send_bytes(
                    b"no number", encode_message(ProxyHeartbeat(to="", sender=peer.name))
                )
                peer.send(commit)
                peer.send(request)
            peer.receive(StepOutputs)
            for _ in range(5):
                other.send(Abort(to=to, sender="other", room=request.room))
            other.beat()
            other.receive(NodeHeartbeat)
    finally:
        server.stop()
    warned = sorted(r.name for r in caplog.records if r.name.startswith("pd.node."))
    assert warned == ["pd.node.control", "pd.node.intake", "pd.node.node"], caplog.text


def test_nobody_speaks_in_the_name_of_a_connected_prefill_node(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with tiny_cluster() as cluster:
        prefill, decode = cluster.pair
        cluster.client.generate(range(9), cluster.pair).tokens()
        with RawPeer(decode.node.endpoint, prefill.instance_id) as liar:
            liar.send(Abort(to=decode.instance_id, sender=prefill.instance_id, room=b"r" * 16))
            wait_until(lambda: "claims another sender" in caplog.text, 5)
        assert not decode.node.requests.has_tombstone(b"r" * 16)
        cluster.client.generate(range(9), cluster.pair).tokens()


def test_a_prefill_node_cannot_speak_in_the_name_of_another() -> None:
    heard: list[tuple[bytes, Any]] = []

    class Handler:
        def on_message(self, link: ControlLink, message: Any) -> None:
            assert link.dialled
            heard.append((link.identity, message))

        def on_tick(self) -> None: ...

        def on_poll(self) -> bool:
            return False

    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        control = ControlThread("decode", "127.0.0.1", None)
        control.start_serving(Handler())
        endpoint = f"tcp://127.0.0.1:{port}"
        control.call_soon(lambda: control.connect_node(b"prefill-1", endpoint))
        control.post_to_prefill(b"prefill-1", ProxyHeartbeat(to="", sender="decode"))
        identity = router.recv_multipart()[0]
        for sender in ("prefill-2", "prefill-1"):
            message = Abort(to="decode", sender=sender, room=b"r" * 16)
            router.send_multipart([identity, encode_message(message)])
        wait_until(lambda: heard, 5)
        assert [(name, message.sender) for name, message in heard] == [(b"prefill-1", "prefill-1")]
        control.call_soon(lambda: control.disconnect_node(b"prefill-1"))
        control.stop()


@pytest.mark.parametrize("key", [None, b"fedcba9876543210fedcba9876543210"])
def test_without_the_cluster_key_nobody_is_heard(key: bytes | None) -> None:
    server = tiny_node("unified", cluster_key=KEY)
    try:
        with RawPeer(server.node.endpoint, "stranger", key, node=server.instance_id) as stranger:
            stranger.beat()
            assert not stranger.answers(NodeHeartbeat, 0.5)
        with proxy_of(server) as peer:
            peer.beat()
            peer.receive(NodeHeartbeat)
            peer.send(generate_to(server, peer.name))
            peer.receive(StepOutputs)
    finally:
        server.stop()


def test_a_pair_with_a_cluster_key_works() -> None:
    prefill, decode = (tiny_node(role, cluster_key=KEY) for role in ("prefill", "decode"))
    (prompt,) = random_prompts(0, [20])
    room = b"a" * 16
    try:
        with proxy_of(prefill, "one") as first, proxy_of(decode, "one") as second:
            fields = {"room": room, "sender": "one"}
            bootstrap = {"peer": prefill.instance_id, "peer_bootstrap": prefill.bootstrap_url}
            first.send(
                make_generate(prompt, to=prefill.instance_id, peer=decode.instance_id, **fields)
            )
            second.send(make_generate(prompt, to=decode.instance_id, **bootstrap, **fields))
            assert first.receive(StepOutputs).outputs[0].position == 0
            assert second.receive(StepOutputs).outputs[0].transferred_bytes > 0
    finally:
        prefill.stop()
        decode.stop()


def test_a_peer_that_speaks_is_not_forgotten_for_those_that_came_after(
    unified: NodeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next message would be taken for one behind a gap, and all of its requests be given up."""
    monkeypatch.setattr(control, "_MAX_STREAMS", 4)
    gaps: list[ControlLink] = []
    monkeypatch.setattr(unified.node.control._handler, "on_gap", gaps.append)
    numbers = SentNumbers()
    with proxy_of(unified) as known:
        abort = Abort(to=unified.instance_id, sender=known.name, room=b"r" * 16)
        known.send_bytes(numbers.number_message(counts=True), encode_message(abort))

        def speak() -> None:
            beat = ProxyHeartbeat(to="", sender=known.name)
            known.send_bytes(numbers.number_message(counts=False), encode_message(beat))
            known.receive(NodeHeartbeat)

        speak()
        for _ in range(8):
            with proxy_of(unified) as other:
                beat = ProxyHeartbeat(to="", sender=other.name)
                other.send_bytes(SentNumbers().number_message(counts=False), encode_message(beat))
                other.receive(NodeHeartbeat)
            speak()
    assert gaps == []


def test_a_handler_that_fails_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    server = tiny_node("unified")
    try:
        handlers = server.node.handlers
        server.node.handlers = Handlers()
        server.node.handlers.add_handler(Abort, lambda identity, message: 1 / 0)
        server.node.handlers.add_handler(ProxyHeartbeat, server.node._on_proxy_heartbeat)
        with proxy_of(server) as peer:
            peer.send(Abort(to=server.instance_id, sender=peer.name, room=b"r" * 16))
            peer.beat()
            peer.receive(NodeHeartbeat)
        assert "ZeroDivisionError" in caplog.text
        server.node.handlers = handlers
    finally:
        server.stop()


def test_what_is_posted_before_the_stop_is_sent_and_later_calls_do_nothing() -> None:
    server = tiny_node("unified")
    with proxy_of(server) as peer:
        peer.beat()
        peer.receive(NodeHeartbeat)
        peer.send(generate_to(server, peer.name, params={"max_tokens": 1000}))
        peer.receive(StepOutputs)
        server.stop()
        assert "stopped" in peer.receive(Failed).error.message
    # The descriptors that the thread had may belong to others now; it must not write to them.
    before = threading.active_count()
    for _ in range(100):
        server.node.control.call_soon(lambda: None)
    assert threading.active_count() == before
    assert server.node.control._waker.fileno() == -1


@pytest.mark.parametrize("key", [None, KEY])
def test_a_node_that_cannot_be_assembled_leaves_no_sockets(
    monkeypatch: pytest.MonkeyPatch, key: bytes | None
) -> None:
    """The interpreter would wait for them when it collects their context, for ever."""
    made: list[ControlThread] = []

    def control(*args: Any, **kwargs: Any) -> ControlThread:
        made.append(ControlThread(*args, **kwargs))
        return made[-1]

    def no_drafter(*args: Any) -> None:
        raise SetupError("there is no such drafter")

    monkeypatch.setattr(assembly, "ControlThread", control)
    monkeypatch.setattr(assembly, "make_drafter", no_drafter)
    config = NodeConfig(
        role="decode", model=tiny_model(), load_format="dummy", device="cpu", cluster_key=key
    )
    with pytest.raises(SetupError, match="no such drafter"):
        assembly.assemble_node(config, "d", "")
    (thread,) = made
    assert thread._context.closed


def test_an_address_that_cannot_be_had_leaves_no_threads() -> None:
    before = threading.active_count()
    for key in (None, KEY):
        with pytest.raises(SetupError, match=r"cannot listen on 203\.0\.113\.1"):
            ControlThread("x", "203.0.113.1", key)
    wait_until(lambda: threading.active_count() <= before, 5)
