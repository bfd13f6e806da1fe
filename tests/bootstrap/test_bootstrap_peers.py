"""The decode node's directory of prefill nodes."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest
from bootstrap_helpers import PrefillNode, info

from pd.bootstrap import PeerDirectory, peers
from pd.bootstrap.client import handshake
from pd.core.errors import HandshakeError, PDError, TransferError, UnavailableError

if TYPE_CHECKING:
    from pd.core.node_info import NodeInfo


class Answers:
    """A callback that collects results."""

    def __init__(self) -> None:
        self.results: list[NodeInfo | PDError] = []
        self._came = threading.Condition()

    def __call__(self, result: NodeInfo | PDError) -> None:
        with self._came:
            self.results.append(result)
            self._came.notify_all()

    def wait(self, count: int = 1) -> list[NodeInfo | PDError]:
        with self._came:
            assert self._came.wait_for(lambda: len(self.results) >= count, timeout=20.0)
            return self.results


@pytest.fixture
def p():
    node = PrefillNode()
    yield node
    node.close()


@pytest.fixture
def directory():
    made = PeerDirectory(info("D", "decode"), timeout=5.0)
    yield made
    made.close()


def test_a_peer_is_met_once_and_then_known(p, directory) -> None:
    answers = Answers()
    assert directory.get_peer(p.url, "P") is None
    directory.request_peer(p.url, "P", answers)
    assert answers.wait() == [p.registry.own]
    assert directory.get_peer(p.url, "P") == p.registry.own
    directory.request_peer(p.url, "P", answers)
    assert answers.results == [p.registry.own] * 2
    assert p.connected == ["D"]
    assert directory.all_peers() == [p.registry.own]


def test_requests_at_the_same_time_share_one_handshake(directory) -> None:
    go = threading.Event()
    seen = []

    def connect(peer: NodeInfo) -> None:
        seen.append(peer.instance_id)
        go.wait(10.0)

    node = PrefillNode(connect=connect)
    try:
        answers = Answers()
        for _ in range(20):
            directory.request_peer(node.url, "P", answers)
        go.set()
        assert answers.wait(20) == [node.registry.own] * 20
        assert seen == ["D"]
    finally:
        node.close()


def test_a_request_does_not_wait_for_its_handshake_ahead_of_need(directory) -> None:
    """The link was cut when that handshake began, and is back when the request arrives."""
    began, go = threading.Event(), threading.Event()

    def connect(peer: NodeInfo) -> None:
        if not began.is_set():
            began.set()
            assert go.wait(10.0)
            raise UnavailableError("the link is cut")

    node = PrefillNode(connect=connect)
    try:
        first, second = Answers(), Answers()
        directory.request_peer(node.url, "P", first, ahead=True)
        assert began.wait(10.0)
        directory.request_peer(node.url, "P", second)
        go.set()
        assert isinstance(first.wait()[0], UnavailableError)
        assert second.wait() == [node.registry.own]
    finally:
        node.close()


def test_a_request_does_not_wait_for_any_handshakes_ahead_of_need(p) -> None:
    """Many nodes are unreachable, as after the loss of a switch."""
    began, go = threading.Semaphore(0), threading.Event()

    def shake_hands(url: str, own: NodeInfo, *, expected_instance: str, **options: Any) -> NodeInfo:
        if url != p.url:
            began.release()
            assert go.wait(20.0)
            raise UnavailableError("out of reach")
        return handshake(url, own, expected_instance=expected_instance, **options)

    directory = PeerDirectory(info("D", "decode"), timeout=5.0)
    lost, answers = Answers(), Answers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "handshake", shake_hands)
        for number in range(24):
            directory.request_peer(f"http://lost-{number}", f"X{number}", lost, ahead=True)
        assert began.acquire(timeout=20.0)
        directory.request_peer(p.url, "P", answers)
        assert answers.wait() == [p.registry.own]
        assert lost.results == []
        go.set()
        assert all(isinstance(each, UnavailableError) for each in lost.wait(24))
    directory.close()


def test_a_failure_is_remembered_for_a_moment_and_then_tried_again(
    p, directory, monkeypatch
) -> None:
    p.registry.set_draining()
    answers = Answers()
    directory.request_peer(p.url, "P", answers)
    assert isinstance(answers.wait()[0], UnavailableError)
    p.registry.set_ready()
    monkeypatch.setattr(peers, "FAILURE_SECONDS", 0.0)
    directory.request_peer(p.url, "P", answers)
    assert answers.results[1] is answers.results[0]
    directory._failed.clear()
    directory.request_peer(p.url, "P", answers)
    assert answers.wait(3)[2] == p.registry.own


def test_a_failure_expires_by_itself(p, directory, monkeypatch) -> None:
    monkeypatch.setattr(peers, "FAILURE_SECONDS", 0.0)
    p.registry.set_draining()
    answers = Answers()
    directory.request_peer(p.url, "P", answers)
    answers.wait()
    p.registry.set_ready()
    directory.request_peer(p.url, "P", answers)
    assert answers.wait(2)[1] == p.registry.own


def test_a_demand_without_a_thread_fails_and_the_next_one_shakes_hands(
    p, directory, monkeypatch
) -> None:
    def no_thread(self: object) -> None:
        raise RuntimeError("can't start new thread")

    answers = Answers()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        directory.request_peer(p.url, "P", answers)
    assert len(answers.results) == 1
    assert isinstance(answers.results[0], UnavailableError)
    assert "can't start new thread" in str(answers.results[0])
    directory.request_peer(p.url, "P", answers)
    assert answers.wait(2)[1] == p.registry.own
    assert p.connected == ["D"]


@pytest.mark.parametrize("dead", [1, 12])
def test_dead_nodes_do_not_delay_others(p, directory, dead) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        lost, answers = Answers(), Answers()
        for number in range(dead):
            directory.request_peer(url, f"X{number}", lost)
        directory.request_peer(p.url, "P", answers)
        assert answers.wait() == [p.registry.own]
        assert lost.results == []
    assert all(isinstance(each, UnavailableError) for each in lost.wait(dead))


def test_after_forget_peer_the_next_demand_shakes_hands_again(p, directory) -> None:
    answers = Answers()
    directory.request_peer(p.url, "P", answers)
    answers.wait()
    directory.forget_peer("P")
    assert directory.get_peer(p.url, "P") is None
    directory.request_peer(p.url, "P", answers)
    answers.wait(2)
    assert p.connected == ["D", "D"]


def test_forget_peer_during_a_handshake_discards_its_result(directory) -> None:
    entered, go = threading.Event(), threading.Event()

    def connect(peer: NodeInfo) -> None:
        entered.set()
        go.wait(10.0)

    node = PrefillNode(connect=connect)
    try:
        answers = Answers()
        directory.request_peer(node.url, "P", answers)
        assert entered.wait(10.0)
        directory.forget_peer("P")
        go.set()
        assert answers.wait() == [node.registry.own]
        assert directory.get_peer(node.url, "P") is None
    finally:
        node.close()


def test_a_restarted_node_is_another_peer(p, directory) -> None:
    answers = Answers()
    directory.request_peer(p.url, "P-before", answers)
    error = answers.wait()[0]
    assert isinstance(error, HandshakeError)
    assert "P-before was expected, but P answers" in str(error)
    directory.request_peer(p.url, "P", answers)
    assert answers.wait(2)[1] == p.registry.own


@pytest.mark.parametrize("error", [TransferError("bad address"), RuntimeError("a bug")])
def test_an_error_while_connecting_is_the_result(p, error) -> None:
    def connect(peer: NodeInfo) -> None:
        raise error

    directory = PeerDirectory(info("D", "decode"), connect=connect, timeout=5.0)
    answers = Answers()
    directory.request_peer(p.url, "P", answers)
    result = answers.wait()[0]
    assert isinstance(result, PDError)
    assert str(error) in str(result)
    assert directory.get_peer(p.url, "P") is None
    directory.close()


def test_connect_comes_before_the_answer(p) -> None:
    order: list[str] = []
    directory = PeerDirectory(
        info("D", "decode"), connect=lambda peer: order.append("connect"), timeout=5.0
    )
    answers = Answers()
    directory.request_peer(p.url, "P", lambda result: (order.append("answer"), answers(result)))
    answers.wait()
    assert order == ["connect", "answer"]
    directory.close()


def test_close_answers_waiting_callers(directory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        answers = Answers()
        directory.request_peer(url, "X", answers)
        directory.close()
        assert isinstance(answers.wait()[0], UnavailableError)
        directory.request_peer(url, "X", answers)
        assert isinstance(answers.wait(2)[1], UnavailableError)
