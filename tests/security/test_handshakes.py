"""Handshakes that somebody without the cluster key records, sends again, reflects or forges.

``tests/bootstrap`` and ``tests/transfer`` have the rest: other keys, changed bodies, old requests.
"""

from __future__ import annotations

import http.server
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest
from bootstrap.bootstrap_helpers import PrefillNode, info

from pd.bootstrap import handshake
from pd.bootstrap.server import HANDSHAKE_PATH
from pd.core.errors import HandshakeError
from pd.net.cluster_key import derive_bootstrap_key
from pd.net.signed_requests import EXPECTED_HEADER, SCHEME, SIGNATURE_HEADER, RequestVerifier
from pd.transfer.wire.greeting import IncomingGreeting, PeerRefusedError, greet_peer, transfer_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Answer = Callable[[dict[str, str], bytes], tuple[int, dict[str, str], bytes]]

KEY = b"0123456789abcdef"
OWN = info("D", "decode")


@contextmanager
def stranger(answer: Answer) -> Iterator[str]:
    """An HTTP server at the prefill node's address that does not know the key; its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, headers, content = answer(dict(self.headers.items()), body)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def shake(url: str, expected: str = "P") -> Any:
    return handshake(url, OWN, expected_instance=expected, cluster_key=KEY)


def relay(node: PrefillNode, headers: dict[str, str], body: bytes) -> httpx.Response:
    """What somebody between the two hosts does with a request."""
    passed = {name: headers[name] for name in ("Authorization", EXPECTED_HEADER)}
    return httpx.post(node.url + HANDSHAKE_PATH, content=body, headers=passed)


@pytest.fixture
def node() -> Iterator[PrefillNode]:
    made = PrefillNode(key=KEY)
    yield made
    made.close()


def test_a_recorded_answer_is_refused_in_the_next_handshake(node: PrefillNode) -> None:
    recorded: list[tuple[int, dict[str, str], bytes]] = []

    def answer(headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        if not recorded:
            genuine = relay(node, headers, body)
            signature = {SIGNATURE_HEADER: genuine.headers[SIGNATURE_HEADER]}
            recorded.append((genuine.status_code, signature, genuine.content))
        return recorded[0]

    with stranger(answer) as url:
        assert shake(url).instance_id == "P"  # only passed on
        with pytest.raises(HandshakeError, match="did not prove that it has the cluster key"):
            shake(url)


@pytest.mark.parametrize("what", ["the request's own proof", "no proof", "not ASCII"])
def test_a_reflected_or_forged_answer_is_refused(what: str) -> None:
    claim = msgspec.json.encode(info("P", "prefill"))

    def answer(headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        proof = headers["Authorization"].split(" ")[-1]
        forged = {"the request's own proof": proof, "no proof": "", "not ASCII": "\xe9" * 64}
        return 200, {SIGNATURE_HEADER: forged[what]}, claim

    with (
        stranger(answer) as url,
        pytest.raises(HandshakeError, match="did not prove that it has the cluster key"),
    ):
        shake(url)


def test_a_request_for_one_instance_is_refused_by_another(node: PrefillNode) -> None:
    """The prefill node was restarted, or the request is sent on to a node beside it."""
    beside = PrefillNode("Q", key=KEY)
    seen: list[httpx.Response] = []

    def answer(headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        seen.append(relay(beside, headers, body))
        # With the header for the other instance the proof no longer fits.
        seen.append(relay(beside, headers | {EXPECTED_HEADER: "Q"}, body))
        seen.append(relay(node, headers, body))
        seen.append(relay(node, headers, body))
        return 503, {}, b""

    try:
        with stranger(answer) as url, pytest.raises(HandshakeError):
            shake(url)
        assert [response.status_code for response in seen] == [409, 401, 200, 401]
        assert seen[-1].json()["message"] == "the request was seen before"
        assert beside.registry.all_peers() == []
    finally:
        beside.close()


def test_unsigned_requests_take_no_memory_for_nonces() -> None:
    key = derive_bootstrap_key(KEY)
    assert key is not None
    verifier = RequestVerifier(key)
    for number in range(1000):
        forged = f"{SCHEME} 1 {number:032x} {'0' * 64}"
        assert verifier.verify_request(forged, "POST", HANDSHAKE_PATH, "P", b"")[1]
    assert not verifier._seen


# ---- connections for KV


def welcomed(first: bytes, proof: Callable[[bytes], bytes]) -> str:
    """What D says to a connection that begins with ``first`` and proves itself with
    ``proof(D's answer)``: why it is refused, or the peer's name."""
    welcome = IncomingGreeting("tcp", "D", transfer_key(KEY))
    answer, reason = welcome.feed_bytes(first)
    if not reason:
        _, reason = welcome.feed_bytes(proof(answer)[: welcome.needs])
    return reason or welcome.peer


def recorded_greeting() -> tuple[bytes, bytes]:
    """Both messages of a prefill node's genuine greeting."""
    p, d = socket.socketpair()
    with p, d:
        thread = threading.Thread(target=greet_peer, args=(p, "tcp", "P", "D", transfer_key(KEY)))
        thread.start()
        welcome = IncomingGreeting("tcp", "D", transfer_key(KEY))
        parts = []
        while welcome.needs:
            parts.append(d.recv(welcome.needs, socket.MSG_WAITALL))
            d.sendall(welcome.feed_bytes(parts[-1])[0])
        thread.join()
    assert welcome.peer == "P"
    return parts[0], parts[1]


def test_a_recorded_or_reflected_greeting_opens_no_connection() -> None:
    hello, proof = recorded_greeting()
    assert "did not prove" in welcomed(hello, lambda _: proof)
    # D's own proof, which ends its answer, sent back to it.
    assert "did not prove" in welcomed(hello, lambda answer: answer[-len(proof) :])
    # Another connection of D is asked to answer in P's place: it signs under another label.
    other = IncomingGreeting("tcp", "D", transfer_key(KEY))
    borrowed, _ = other.feed_bytes(hello)
    assert "did not prove" in welcomed(hello, lambda _: borrowed[-len(proof) :])


def test_a_listener_without_the_key_is_not_greeted_back() -> None:
    p, stranger_end = socket.socketpair()
    with p, stranger_end:
        keyless = IncomingGreeting("tcp", "D", transfer_key(b"another key 1234"))

        def listen() -> None:
            hello = stranger_end.recv(keyless.needs, socket.MSG_WAITALL)
            stranger_end.sendall(keyless.feed_bytes(hello)[0])

        thread = threading.Thread(target=listen)
        thread.start()
        p.settimeout(5)
        with pytest.raises(PeerRefusedError, match="did not prove that it has the cluster key"):
            greet_peer(p, "tcp", "P", "D", transfer_key(KEY))
        thread.join()
