"""Handshakes between a registry and its client, over real HTTP."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import threading
import time

import httpx
import msgspec
import pytest
import recorded_release
from bootstrap_helpers import KV, PrefillNode, changed, info
from patience import FakePatience

from pd.bootstrap import client, handshake
from pd.bootstrap.server import HANDSHAKE_PATH, MAX_BODY_BYTES
from pd.core.errors import (
    HandshakeError,
    InvalidRequestError,
    TransferError,
    UnavailableError,
)
from pd.core.node_info import MAX_ADDRESS_CHARS, MAX_ADDRESS_FIELDS, MAX_BACKENDS, NO_HEAD
from pd.core.release import RELEASE
from pd.net import signed_requests
from pd.net.cluster_key import derive_bootstrap_key
from pd.net.signed_requests import EXPECTED_HEADER

KEY = b"0123456789abcdef"
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def start():
    nodes = []

    def make(*args, **kwargs) -> PrefillNode:
        nodes.append(PrefillNode(*args, **kwargs))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


def shake(node: PrefillNode, own, expected: str = "P", **kwargs):
    return handshake(node.url, own, expected_instance=expected, **kwargs)


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("role", ["decode", "unified"])
def test_a_handshake_tells_both_sides_about_each_other(start, key, role) -> None:
    p = start(key=key)
    own = info("D", role)
    assert shake(p, own, cluster_key=key) == p.registry.own
    assert p.registry.all_peers() == [own]
    assert p.registry.get_peer("D") == own
    assert p.connected == ["D"]


def test_page_sizes_may_differ(start) -> None:
    p = start()
    assert shake(p, info("D", "decode", page_size=64)).kv == KV


OTHER = {
    "model_id": ("model", "other"),
    "num_layers": ("num_layers", 3),
    "num_heads": ("num_heads", 2),
    "head_dim": ("head_dim", 16),
    "dtype": ("dtype", "bfloat16"),
    "vectors": ("vectors", 1),
    "ranks": ("ranks", "first"),
    "layout": ("layout", "page_major"),
    "drafter": ("--speculative-algorithm", "eagle3 0123 (2 KV heads of 8, states of 32, float32)"),
}


@pytest.mark.parametrize("field", OTHER)
def test_incompatible_layouts_are_refused_naming_both_values(start, field) -> None:
    p = start()
    name, theirs = OTHER[field]
    own = info("D", "decode", **{field: theirs})
    places = (p.registry.own, KV, KV.model)
    ours = next(getattr(place, field) for place in places if hasattr(place, field))
    with pytest.raises(HandshakeError) as raised:
        shake(p, own)
    assert f"{name} differs" in str(raised.value)
    assert repr(ours or NO_HEAD) in str(raised.value)
    assert repr(theirs) in str(raised.value)
    assert p.registry.all_peers() == []
    assert p.connected == []
    # The node is as well as before.
    assert shake(p, changed(own, **{field: ours})).instance_id == "P"


def test_no_transfer_backend_in_common_is_refused_naming_both_lists(start) -> None:
    p = start()
    own = info("D", "decode", transfers={"nixl": {}, "mooncake": {}})
    with pytest.raises(HandshakeError, match=r"P offers tcp, decode node D offers nixl, mooncake"):
        shake(p, own)
    assert p.connected == []


def test_the_client_refuses_an_incompatible_prefill_node_too(start) -> None:
    """We do not ask P's registry, because both ends apply the same rule."""
    p = start()
    p.registry.handshake = lambda peer: p.registry.own
    with pytest.raises(HandshakeError, match="transfer backend differs"):
        shake(p, info("D", "decode", transfers={"nixl": {}}))


GPU_A = {"host_id": "b:1:2", "device": "GPU-a", "reachable": "GPU-a,GPU-b"}
GPU_B = GPU_A | {"device": "GPU-b"}


def test_nvlink_alone_is_refused_with_the_reason(start) -> None:
    p = start()
    p.registry.own = changed(p.registry.own, transfers={"nvlink": GPU_A})
    own = info("D", "decode", transfers={"nvlink": GPU_B | {"host_id": "other"}})
    with pytest.raises(HandshakeError, match="nvlink: the nodes are not on one host"):
        shake(p, own)
    assert shake(p, info("D", "decode", transfers={"nvlink": GPU_B})).instance_id == "P"


def test_two_prefill_nodes_do_not_shake_hands(start) -> None:
    with pytest.raises(HandshakeError, match="Q is a prefill node"):
        shake(start(), info("Q", "prefill"))


def test_another_instance_than_expected_is_refused_on_both_sides(start) -> None:
    p = start()
    with pytest.raises(HandshakeError, match=r"P-before was expected, but P answers.*restarted"):
        shake(p, info("D", "decode"), expected="P-before")
    assert p.connected == []


def test_a_new_instance_at_the_same_endpoint_replaces_the_old_one(start) -> None:
    order = []
    p = start(connect=lambda peer: order.append(("connect", peer.instance_id)))
    p.registry._on_replaced = lambda old: order.append(("replaced", old))
    shake(p, info("D-1", "decode", endpoint="tcp://a"))
    shake(p, info("E", "decode", endpoint="tcp://b"))
    shake(p, info("D-2", "decode", endpoint="tcp://a"))
    assert order == [("connect", "D-1"), ("connect", "E"), ("replaced", "D-1"), ("connect", "D-2")]
    assert sorted(peer.instance_id for peer in p.registry.all_peers()) == ["D-2", "E"]


def test_the_same_instance_may_shake_hands_again(start) -> None:
    p = start()
    for _ in range(2):
        shake(p, info("D", "decode"))
    assert p.connected == ["D", "D"]
    assert p.replaced == []
    p.registry.forget_peer("D")
    assert p.registry.all_peers() == []
    shake(p, info("D", "decode"))
    assert len(p.registry.all_peers()) == 1


def test_an_unreachable_peer_is_not_recorded(start) -> None:
    def fail(peer) -> None:
        raise TransferError(f"{peer.instance_id} published a bad data address")

    p = start(connect=fail)
    with pytest.raises(UnavailableError, match="D published a bad data address"):
        shake(p, info("D", "decode"))
    assert p.registry.all_peers() == []


@pytest.mark.parametrize("key", [None, KEY])
def test_an_unexpected_error_is_signed_and_logged(start, key, caplog) -> None:
    def fail(peer) -> None:
        raise RuntimeError("no such wire")

    p = start(connect=fail, key=key)
    told = r"cannot shake hands now: POST /bootstrap/handshake failed: RuntimeError: no such wire"
    with pytest.raises(UnavailableError, match=told):
        shake(p, info("D", "decode"), cluster_key=key)
    assert p.registry.all_peers() == []
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("state", ["starting", "draining"])
def test_503_with_retry_after_until_ready_and_while_draining(start, state) -> None:
    p = start(ready=False)
    if state == "draining":
        p.registry.set_ready()
        p.registry.set_draining()
    body = msgspec.json.encode(info("D", "decode"))
    response = httpx.post(p.url + HANDSHAKE_PATH, content=body, headers=JSON)
    assert response.status_code == 503
    assert int(response.headers["Retry-After"]) >= 1
    with pytest.raises(UnavailableError, match=f"P is {state}"):
        shake(p, info("D", "decode"))
    p.registry.set_ready()
    assert shake(p, info("D", "decode")).instance_id == "P"


def test_only_handshakes_are_answered(start) -> None:
    p = start()
    shake(p, info("D", "decode"))
    for path in ("/", "/bootstrap", "/bootstrap/peers"):
        assert httpx.get(p.url + path).status_code == 404, path
    assert httpx.get(p.url + HANDSHAKE_PATH).status_code == 405


def test_the_restarted_prefill_node_is_met_again_on_the_same_port(start) -> None:
    p = start()
    own = info("D", "decode")
    shake(p, own)
    port = p.port
    p.close()
    with pytest.raises(UnavailableError):
        shake(p, own, timeout=1.0)
    again = start("P-2", port=port)
    assert shake(again, own, expected="P-2").instance_id == "P-2"


@pytest.mark.parametrize("host", ["", "a" * 300, "xn--a", "é..x", "127.0.0.1/%"])
def test_an_unreachable_registry_is_unavailable(host: str) -> None:
    with pytest.raises(UnavailableError, match="no handshake with prefill node P"):
        handshake(f"http://{host}", info("D", "decode"), expected_instance="P", timeout=0.2)


# ---- bad requests


GOOD = msgspec.to_builtins(info("D", "decode"))
BAD_BODIES = {
    "empty": b"",
    "not JSON": b"{",
    "not UTF-8": b"\xff\xfe",
    "a list": b"[]",
    "a field too few": json.dumps({k: v for k, v in GOOD.items() if k != "endpoint"}).encode(),
    "a field too many": json.dumps(GOOD | {"more": 1}).encode(),
    "a wrong type": json.dumps(GOOD | {"instance_id": 7}).encode(),
    "an unknown role": json.dumps(GOOD | {"role": "proxy"}).encode(),
    "a nested wrong type": json.dumps(GOOD | {"transfers": {"tcp": {"port": 1}}}).encode(),
    "too many backends": json.dumps(
        GOOD | {"transfers": {str(n): {} for n in range(MAX_BACKENDS + 1)}}
    ).encode(),
    "a long backend name": json.dumps(GOOD | {"transfers": {"x" * 33: {}}}).encode(),
    "a long address": json.dumps(
        GOOD | {"transfers": {"tcp": {"host": "h" * (MAX_ADDRESS_CHARS + 1)}}}
    ).encode(),
    "a wide address": json.dumps(
        GOOD | {"transfers": {"tcp": {str(n): "" for n in range(MAX_ADDRESS_FIELDS + 1)}}}
    ).encode(),
}


@pytest.mark.parametrize("body", BAD_BODIES)
def test_a_bad_body_is_answered_400_and_changes_nothing(start, body) -> None:
    p = start()
    response = httpx.post(p.url + HANDSHAKE_PATH, content=BAD_BODIES[body], headers=JSON)
    assert response.status_code == 400
    assert "not a NodeInfo" in response.json()["message"]
    assert shake(p, info("D", "decode")).instance_id == "P"


def test_a_body_over_64_kib_is_answered_413(start) -> None:
    p = start()
    content = b" " * (MAX_BODY_BYTES + 1)
    response = httpx.post(p.url + HANDSHAKE_PATH, content=content, headers=JSON)
    assert response.status_code == 413
    assert shake(p, info("D", "decode")).instance_id == "P"


# ---- cluster key


@pytest.mark.parametrize("theirs", [None, b"another key 1234"])
def test_without_the_cluster_key_nothing_is_answered(start, theirs) -> None:
    p = start(key=KEY)
    with pytest.raises(HandshakeError, match="cluster key"):
        shake(p, info("D", "decode"), cluster_key=theirs)
    body = msgspec.json.encode(info("D", "decode"))
    assert httpx.post(p.url + HANDSHAKE_PATH, content=body).status_code == 401
    assert p.registry.all_peers() == []


def test_a_prefill_node_without_the_key_is_refused(start) -> None:
    with pytest.raises(HandshakeError, match="did not prove that it has the cluster key"):
        shake(start(), info("D", "decode"), cluster_key=KEY)


def signed(body: bytes, *, path: str = HANDSHAKE_PATH, expected: str = "P") -> dict[str, str]:
    key = derive_bootstrap_key(KEY)
    assert key is not None
    authorization, _ = signed_requests.sign_request(key, "POST", path, expected, body)
    return {"Authorization": authorization, EXPECTED_HEADER: "P"}


def test_a_recorded_request_cannot_be_replayed(start) -> None:
    p = start(key=KEY)
    body = msgspec.json.encode(info("D", "decode"))
    headers = signed(body)
    assert httpx.post(p.url + HANDSHAKE_PATH, content=body, headers=headers).status_code == 200
    answer = httpx.post(p.url + HANDSHAKE_PATH, content=body, headers=headers)
    assert (answer.status_code, answer.json()["message"]) == (401, "the request was seen before")


def test_an_old_request_is_refused(start, monkeypatch) -> None:
    p = start(key=KEY)
    body = msgspec.json.encode(info("D", "decode"))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 2 * signed_requests.WINDOW_SECONDS)
    headers = signed(body)
    monkeypatch.undo()
    answer = httpx.post(p.url + HANDSHAKE_PATH, content=body, headers=headers)
    assert answer.status_code == 401
    assert "120 s ago" in answer.json()["message"]


@pytest.mark.parametrize("part", ["body", "path", "expected", "garbage", "not finite"])
def test_a_request_changed_on_the_way_is_refused(start, part) -> None:
    p = start(key=KEY)
    body = msgspec.json.encode(info("D", "decode"))
    headers = {
        "body": lambda: signed(body + b" "),
        "path": lambda: signed(body, path="/bootstrap"),
        "expected": lambda: signed(body, expected=""),
        "garbage": lambda: {"Authorization": "PD-HMAC a b c"},
        "not finite": lambda: {"Authorization": "PD-HMAC nan b c"},
    }[part]()
    answer = httpx.post(p.url + HANDSHAKE_PATH, content=body, headers=headers)
    assert answer.status_code == 401
    assert p.registry.all_peers() == []


@pytest.fixture
def clocks(monkeypatch) -> dict[str, float]:
    """Offsets of the two ends' clocks from the real one, in seconds."""
    ahead = {"signer": 0.0, "verifier": 0.0, "passed": 0.0}
    real, monotonic = time.time, time.monotonic
    monkeypatch.setattr(time, "time", lambda: real() + ahead["passed"] + ahead["verifier"])
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + ahead["passed"])
    return ahead


class Signer:
    """A member of the cluster whose clock is one of ``clocks``."""

    def __init__(self, clocks: dict[str, float]) -> None:
        key = derive_bootstrap_key(KEY)
        assert key is not None
        self._key, self._clocks = key, clocks
        self.verifier = signed_requests.RequestVerifier(key)

    def sign(self) -> str:
        own = self._clocks["verifier"]
        self._clocks["verifier"] = self._clocks["signer"]
        authorization, _ = signed_requests.sign_request(self._key, "GET", "/", "P", b"")
        self._clocks["verifier"] = own
        return authorization

    def refusal(self, authorization: str) -> str:
        return self.verifier.verify_request(authorization, "GET", "/", "P", b"")[1]


@pytest.mark.parametrize("step", [3600.0, -3600.0, 90.0, -90.0, 1e9, -1e9])
def test_a_clock_step_allows_no_replay_and_refuses_no_good_peer(clocks, step) -> None:
    """We set the clock of the verifier's host to another time, and later back again."""
    signer = Signer(clocks)
    recorded = [signer.sign()]
    assert signer.refusal(recorded[0]) == ""
    for then in (step, 0.0, step, 0.0):
        clocks["verifier"] = then
        for _ in range(2):  # a wrong clock is no reason, and nor is the time that passes
            clocks["passed"] += 100.0
            recorded.append(signer.sign())
            assert signer.refusal(recorded[-1]) == ""
            assert all(signer.refusal(old) for old in recorded)


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_all_clocks_may_be_corrected_together(clocks, step) -> None:
    """Hosts start with a wrong time, and get the right one."""
    signer = Signer(clocks)
    first = signer.sign()
    assert signer.refusal(first) == ""
    clocks["verifier"] = clocks["signer"] = step
    assert signer.refusal(signer.sign()) == ""
    assert signer.refusal(first)


def test_setting_a_clock_back_allows_no_forgotten_request(clocks, monkeypatch) -> None:
    monkeypatch.setattr(signed_requests, "_MAX_NONCES", 4)
    signer = Signer(clocks)
    recorded = []
    for _ in range(10):
        clocks["passed"] += 50.0
        recorded.append(signer.sign())
        assert signer.refusal(recorded[-1]) == ""
    assert len(signer.verifier._seen) == 4
    for past in range(-500, 1, 50):
        clocks["verifier"] = past
        assert all(signer.refusal(old) for old in recorded)


# ---- prefill nodes that do not answer properly


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", UnavailableError),
        (b"\x00\x01garbage\r\n\r\n", UnavailableError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", HandshakeError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}", UnavailableError),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 2\r\n\r\nno", UnavailableError),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", HandshakeError),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (2 * MAX_BODY_BYTES), UnavailableError),
    ],
)
def test_a_malformed_answer_is_a_handshake_error(answer, error) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        thread = threading.Thread(target=answer_once, args=(server, answer))
        thread.start()
        with pytest.raises(error):
            handshake(url, info("D", "decode"), expected_instance="P", timeout=2.0)
        thread.join()


def answer_once(server: socket.socket, answer: bytes) -> None:
    sock, _ = server.accept()
    with sock:
        sock.recv(65536)
        with contextlib.suppress(OSError):
            sock.sendall(answer)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):
                pass


def test_a_silent_or_trickling_node_does_not_outlast_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UnavailableError):
            handshake(url, info("D", "decode"), expected_instance="P", timeout=0.2)
    with socket.create_server(("127.0.0.1", 0)) as slow:
        url = f"http://127.0.0.1:{slow.getsockname()[1]}"
        done = threading.Event()
        thread = threading.Thread(target=trickle, args=(slow, done))
        thread.start()
        with pytest.raises(UnavailableError, match=r"not complete after 0\.3 s"):
            handshake(url, info("D", "decode"), expected_instance="P", timeout=0.3)
        done.set()
        thread.join()


@pytest.mark.parametrize("key", [None, KEY])
def test_a_starved_node_may_answer_late(start, key) -> None:
    held = threading.Event()
    p = start(key=key, connect=lambda peer: held.wait(10))
    patience = FakePatience()
    threading.Timer(1.0, held.set).start()
    own = info("D", "decode")
    answer = shake(p, own, cluster_key=key, timeout=0.2, patience=patience)
    assert answer == p.registry.own
    assert patience.asked == {(0.1, "P")}


def test_a_silent_node_is_given_up_if_nobody_is_starved(no_node) -> None:
    patience = FakePatience()
    threading.Timer(1.0, lambda: setattr(patience, "starved", False)).start()
    with pytest.raises(UnavailableError, match="no handshake"):
        handshake(
            no_node, info("D", "decode"), expected_instance="P", timeout=0.2, patience=patience
        )


def test_little_delay_extends_a_handshake_by_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any machine threads lack a CPU for a moment. We must still give up a dead node in time."""
    patience, attempts = FakePatience(), []

    def times_out(url, own, expected, key, timeout):
        attempts.append(timeout)
        patience.starved = len(attempts) < 3
        raise httpx.ReadTimeout("timed out")

    monkeypatch.setattr(client, "_ask_once", times_out)
    monkeypatch.setattr(patience, "is_over", lambda *_: not patience.starved)
    monkeypatch.setattr(
        patience, "compute_extension", lambda *_: 0.01 if len(attempts) == 1 else 3.0
    )
    with pytest.raises(UnavailableError, match="no handshake"):
        handshake("", info("D", "decode"), expected_instance="P", timeout=4.0, patience=patience)
    assert attempts == [4.0, 1.0, 6.0]


@pytest.mark.parametrize("times", [1, 3, 100])
def test_an_unreachable_host_is_tried_again_within_the_timeout(
    start, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    p = start()
    post, failures = client._post_body, []

    def reach(*args):
        if len(failures) == times:
            return post(*args)
        failures.append(time.monotonic())
        try:
            raise OSError(errno.EHOSTUNREACH, "No route to host")
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error

    monkeypatch.setattr(client, "_post_body", reach)
    own, began = info("D", "decode"), time.monotonic()
    if times < 100:
        assert shake(p, own, timeout=4.0) == p.registry.own
        return
    with pytest.raises(UnavailableError, match="No route to host"):
        shake(p, own, timeout=2.0)
    assert failures[-1] - began < 2.0, "an attempt began after the timeout"
    assert len(failures) > 3


@pytest.fixture
def no_node():
    """Yield a URL that accepts connections and answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield f"http://127.0.0.1:{silent.getsockname()[1]}"


def trickle(server: socket.socket, done: threading.Event) -> None:
    sock, _ = server.accept()
    with sock:
        sock.recv(65536)
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n")
        while not done.wait(0.05):
            try:
                sock.sendall(b" ")
            except OSError:
                return


@pytest.mark.parametrize("url", ["http://", "nonsense", "ftp://x", "http://127.0.0.1:1"])
def test_an_invalid_url_is_unavailable(url) -> None:
    with pytest.raises(UnavailableError):
        handshake(url, info("D", "decode"), expected_instance="P", timeout=0.5)


# ---- other releases


@pytest.mark.parametrize(
    ("added", "theirs"),
    [
        ({}, "an earlier pd, which does not state its version"),
        ({"release": "9.0 (protocol 7)", "more": {"of": 1}, "kv": 5}, "pd 9.0 (protocol 7)"),
    ],
)
def test_a_decode_node_of_another_release_is_refused_naming_both(start, added, theirs) -> None:
    p = start()
    body = recorded_release.node_info("decode", **added)
    response = httpx.post(p.url + HANDSHAKE_PATH, content=body, headers=JSON)
    assert response.status_code == 409
    message = response.json()["message"]
    assert f"version differs: prefill node P runs pd {RELEASE}, 'old' runs {theirs}" in message
    assert "run the same release of pd on all nodes and proxies" in message
    assert p.connected == []


def test_a_prefill_node_of_another_release_is_refused_naming_both(start) -> None:
    p = start()
    p.registry.handshake = lambda peer: changed(p.registry.own, release="9.0 (protocol 7)")
    with pytest.raises(HandshakeError, match=r"decode node D runs pd .*, 'P' runs pd 9.0 \(prot"):
        shake(p, info("D", "decode"))


def test_the_refusal_of_an_unknown_field_names_the_release(start) -> None:
    """Such a release only complains about the field."""
    p = start()

    def unknown(peer: object) -> None:
        raise InvalidRequestError("the body is not a NodeInfo: Object contains unknown field")

    p.registry.handshake = unknown
    with pytest.raises(HandshakeError, match=r"unknown field \(if it runs another release than"):
        shake(p, info("D", "decode"))
