"""How requests end before they are finished: aborts, disconnects, deadlines, full queues."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fake_node import wait_until
from proxy_cluster import read_events

from pd.core.messages import Finish
from pd.proxy.dispatch.dispatcher import ABORTED

if TYPE_CHECKING:
    from fake_node import FakeNode
    from proxy_cluster import Cluster

    from pd.proxy.server import ProxyThread

HEAD = "Host: localhost\r\nContent-Type: application/json\r\n"
PATHS = {
    "/v1/completions": {"prompt": [5, 6], "max_tokens": 50},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/generate": {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 50}},
}
paths = pytest.mark.parametrize("path", PATHS)
streaming = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture
def manual(cluster: Cluster) -> tuple[FakeNode, FakeNode, ProxyThread]:
    """A pair that answers only what the test says, and a proxy."""
    prefill, decode = cluster.pair(auto=False)
    return prefill, decode, cluster.proxy()


class Call:
    """A request on a thread."""

    def __init__(self, url: str, path: str, **body: Any) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._future = self._pool.submit(self._post, url, path, PATHS[path] | body)
        self.events: list[Any] = []

    def _post(self, url: str, path: str, body: Any) -> httpx.Response:
        with httpx.Client(timeout=20) as client, client.stream("POST", url + path, json=body) as r:
            if "event-stream" in r.headers["content-type"]:
                self.events = read_events(r)
            else:
                r.read()
            return r

    @property
    def response(self) -> httpx.Response:
        response = self._future.result(timeout=20)
        self._pool.shutdown()
        return response

    def error(self) -> dict[str, Any]:
        """The error, from the body or from the stream's last event."""
        response = self.response
        last: Any = self.events[-1] if self.events else response.json()
        assert last != "DONE", "an error must not look like success"
        error: dict[str, Any] = last["error"]
        return error


def metric(proxy: ProxyThread, line: str) -> float:
    text = httpx.get(proxy.url + "/metrics").text
    found = [row for row in text.splitlines() if row.startswith(line + " ")]
    return float(found[0].rsplit(" ", 1)[1]) if found else 0.0


def both_aborted(prefill: FakeNode, decode: FakeNode, request: Any) -> None:
    for node in (prefill, decode):
        assert node.wait_abort(request.room).to == node.instance_id


@paths
@streaming
def test_a_failure_on_a_node_is_the_clients_error_and_ends_the_other_node(
    manual: tuple[FakeNode, FakeNode, ProxyThread], path: str, stream: bool
) -> None:
    prefill, decode, proxy = manual
    call = Call(proxy.url, path, stream=stream)
    request = prefill.wait_generate()
    prefill.fail(request, "transfer", "the digest differs")
    assert call.error()["message"] == "the digest differs"
    assert call.response.status_code == 502  # nothing was streamed yet
    decode.wait_abort(request.room)


@paths
@streaming
def test_a_failure_after_the_first_token(
    manual: tuple[FakeNode, FakeNode, ProxyThread], path: str, stream: bool
) -> None:
    prefill, decode, proxy = manual
    call = Call(proxy.url, path, stream=stream)
    request = prefill.wait_generate()
    prefill.say(request, [40])
    wait_until(lambda: metric(proxy, "pd_proxy_output_tokens_total") == 1)
    if stream:
        wait_until(lambda: metric(proxy, "pd_proxy_ttft_seconds_count") == 1)
    decode.fail(decode.wait_generate(), "node_failed", "out of memory")
    error = call.error()
    assert (error["message"], error["code"]) == ("out of memory", "node_failed")
    assert call.response.status_code == (200 if stream else 502)
    both_aborted(prefill, decode, request)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("invalid_request", 400),
        ("deadline", 408),
        ("aborted", 499),
        ("node_failed", 502),
        ("handshake", 502),
        ("unavailable", 503),
        ("internal", 500),
        ("something new", 500),
    ],
)
def test_kinds_of_failures_have_their_status(
    manual: tuple[FakeNode, FakeNode, ProxyThread], kind: str, status: int
) -> None:
    prefill, _, proxy = manual
    call = Call(proxy.url, "/v1/completions")
    prefill.fail(prefill.wait_generate(), kind)
    assert call.response.status_code == status


def test_the_first_error_wins_and_after_a_finish_nothing_counts(
    manual: tuple[FakeNode, FakeNode, ProxyThread],
) -> None:
    prefill, decode, proxy = manual
    call = Call(proxy.url, "/v1/completions")
    request = decode.wait_generate()
    decode.fail(request, "node_failed", "first")
    decode.fail(request, "transfer", "second")
    prefill.say(prefill.wait_generate(), [40])
    assert call.error()["message"] == "first"

    call = Call(proxy.url, "/v1/completions")
    first, second = prefill.wait_generate(2), decode.wait_generate(2)
    prefill.say(first, [40])
    decode.say(second, [40, 41], finish=Finish("length"))
    decode.say(second, [42], position=2)
    decode.fail(second, "internal")
    assert call.response.status_code == 200


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        ([([40], 0), ([42], 2)], "missing"),
        ([([40], 0), ([99, 41], 0)], "disagree"),
        ([([40], 0), ([5000], 1)], "vocabulary"),
        ([([40], 0), ([41] * 50, 1)], "at most 50"),
    ],
)
def test_tokens_that_make_no_sense_fail_the_request(
    manual: tuple[FakeNode, FakeNode, ProxyThread], outputs: Any, says: str
) -> None:
    prefill, decode, proxy = manual
    call = Call(proxy.url, "/v1/completions")
    first, second = prefill.wait_generate(), decode.wait_generate()
    prefill.say(first, outputs[0][0])
    wait_until(lambda: metric(proxy, "pd_proxy_output_tokens_total") == 1)
    decode.say(second, outputs[1][0], position=outputs[1][1])
    assert says in call.error()["message"]
    both_aborted(prefill, decode, first)


def test_messages_for_unknown_rooms_and_choices_are_ignored(
    manual: tuple[FakeNode, FakeNode, ProxyThread],
) -> None:
    prefill, decode, proxy = manual
    call = Call(proxy.url, "/v1/completions")
    first, second = prefill.wait_generate(), decode.wait_generate()
    prefill.say(first, [40], index=7)
    stranger = prefill.wait_generate()
    stranger_room = type(stranger)(**{f: getattr(stranger, f) for f in stranger.__struct_fields__})
    stranger_room.room = b"x" * 16
    prefill.say(stranger_room, [41])
    prefill.fail(stranger_room, "internal")
    prefill.say(first, [40])
    decode.say(second, [40, 41], finish=Finish("length"))
    body = call.response.json()
    assert body["usage"]["completion_tokens"] == 2


def test_the_decode_node_may_speak_first(manual: tuple[FakeNode, FakeNode, ProxyThread]) -> None:
    prefill, decode, proxy = manual
    call = Call(proxy.url, "/v1/completions", stream=True)
    first, second = prefill.wait_generate(), decode.wait_generate()
    decode.say(second, [40, 41])
    wait_until(lambda: metric(proxy, "pd_proxy_output_tokens_total") == 2)
    prefill.say(first, [40])
    decode.say(second, [42], position=2, finish=Finish("length"))
    assert call.response.status_code == 200
    assert call.events[-1] == "DONE"


class TestAbort:
    @streaming
    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    def test_openai_requests_end_with_499(
        self, manual: tuple[FakeNode, FakeNode, ProxyThread], path: str, stream: bool
    ) -> None:
        prefill, decode, proxy = manual
        call = Call(proxy.url, path, rid="mine", stream=stream)
        request = prefill.wait_generate()
        answer = httpx.post(proxy.url + "/abort_request", json={"rid": "mine"})
        assert answer.json() == {"aborted": 1}
        assert call.response.status_code == 499
        assert call.error()["code"] == "aborted"
        both_aborted(prefill, decode, request)

    @streaming
    def test_generate_returns_what_there_was(
        self, manual: tuple[FakeNode, FakeNode, ProxyThread], stream: bool
    ) -> None:
        prefill, decode, proxy = manual
        call = Call(proxy.url, "/generate", rid="mine", stream=stream)
        request = prefill.wait_generate()
        prefill.say(request, [40])
        wait_until(lambda: metric(proxy, "pd_proxy_output_tokens_total") == 1)
        httpx.post(proxy.url + "/abort_request", json={"abort_all": True})
        assert call.response.status_code == 200
        body = call.events[-2] if stream else call.response.json()
        assert body["output_ids"] == [40]
        assert body["meta_info"]["finish_reason"] == {"type": "abort", "message": ABORTED}
        if stream:
            assert call.events[-1] == "DONE"
        both_aborted(prefill, decode, request)

    def test_one_prompt_of_a_batch(self, manual: tuple[FakeNode, FakeNode, ProxyThread]) -> None:
        prefill, _, proxy = manual
        asked = {"input_ids": [[5], [6]], "rid": ["a", "b"]}
        call = Call(proxy.url, "/generate", **asked, sampling_params={"max_new_tokens": 1})
        prefill.wait_generate(2)
        assert httpx.post(proxy.url + "/abort_request", json={"rid": "b"}).json()["aborted"] == 1
        other = next(g for g in prefill.generates if g.rid == "a")
        prefill.say(other, [40], finish=Finish("length"))
        reasons = [r["meta_info"]["finish_reason"]["type"] for r in call.response.json()]
        assert reasons == ["length", "abort"]


class TestDisconnect:
    def send(self, proxy: ProxyThread, path: str, **body: Any) -> socket.socket:
        """A raw request whose connection the test holds."""
        url = httpx.URL(proxy.url)
        connection = socket.create_connection((url.host, url.port))
        content = json.dumps(PATHS[path] | body).encode()
        head = f"POST {path} HTTP/1.1\r\n{HEAD}Content-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        return connection

    @paths
    @streaming
    @pytest.mark.parametrize("stage", ["before the first token", "while decoding"])
    def test_a_client_that_goes_away_frees_both_nodes(
        self, manual: tuple[FakeNode, FakeNode, ProxyThread], path: str, stream: bool, stage: str
    ) -> None:
        prefill, decode, proxy = manual
        connection = self.send(proxy, path, stream=stream)
        request = prefill.wait_generate()
        if stage == "while decoding":
            prefill.say(request, [40])
            wait_until(lambda: metric(proxy, "pd_proxy_output_tokens_total") == 1)
            if stream:
                assert connection.recv(10)
        connection.close()
        both_aborted(prefill, decode, request)
        wait_until(lambda: metric(proxy, "pd_proxy_running_requests") == 0)
        assert metric(proxy, 'pd_proxy_aborts_total{reason="disconnect"}') == 1
        line = f'pd_proxy_requests_total{{endpoint="{path}",outcome="disconnect"}}'
        assert metric(proxy, line) == 1

    def test_a_client_that_goes_away_before_its_body_is_complete(
        self, manual: tuple[FakeNode, FakeNode, ProxyThread]
    ) -> None:
        prefill, _, proxy = manual
        url = httpx.URL(proxy.url)
        connection = socket.create_connection((url.host, url.port))
        connection.sendall(
            f"POST /generate HTTP/1.1\r\n{HEAD}Content-Length: 99\r\n\r\n{{".encode()
        )
        connection.close()
        assert httpx.get(proxy.url + "/health").status_code == 200
        assert prefill.generates == []

    def test_a_client_that_stops_reading_is_cut_off(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pd.proxy.dispatch.job.MAX_UNREAD_TOKENS", 200)
        huge = {"context_length": 1 << 20, "pages": {"total": 1 << 20}}
        prefill, decode = cluster.pair(auto=False, **huge)
        proxy = cluster.proxy()
        sampling = {"max_new_tokens": 100_000}
        url = httpx.URL(proxy.url)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((url.host, url.port))
        body = {"input_ids": [5], "sampling_params": sampling, "stream": True}
        content = json.dumps(body).encode()
        head = f"POST /generate HTTP/1.1\r\n{HEAD}Content-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        first, second = prefill.wait_generate(), decode.wait_generate()
        prefill.say(first, [40])
        stop = threading.Event()

        def flood() -> None:
            # Events are cumulative, so they soon fill every buffer on the way.
            for position in range(0, 99_000, 50):
                decode.say(second, [40] * 50, position=position)
                if stop.wait(0.001):
                    return

        thread = threading.Thread(target=flood)
        thread.start()
        both_aborted(prefill, decode, first)
        stop.set()
        thread.join()
        wait_until(lambda: metric(proxy, "pd_proxy_running_requests") == 0)
        assert metric(proxy, 'pd_proxy_aborts_total{reason="slow_reader"}') == 1
        # What was under way may still be read, but it does not end as if it were complete.
        rest = b""
        try:
            while data := connection.recv(1 << 16):
                rest += data
        except ConnectionResetError:
            pass
        assert b"[DONE]" not in rest
        connection.close()

    def test_a_client_slower_than_the_model_gets_larger_events(
        self, manual: tuple[FakeNode, FakeNode, ProxyThread]
    ) -> None:
        prefill, decode, proxy = manual
        call = Call(proxy.url, "/generate", stream=True, incremental=True)
        first, second = prefill.wait_generate(), decode.wait_generate()
        # All outputs of one message arrive at once.
        prefill.say(first, [40])
        for position in range(49):
            decode.say(second, [40, 40], position=position)
        decode.say(second, [40], position=49, finish=Finish("length"))
        assert call.response.status_code == 200
        tokens = [t for e in call.events[:-1] for t in e["output_ids"]]
        assert tokens == [40] * 50


class TestDeadline:
    @paths
    @streaming
    def test_before_the_first_token_it_is_408(
        self, manual: tuple[FakeNode, FakeNode, ProxyThread], path: str, stream: bool
    ) -> None:
        prefill, decode, proxy = manual
        call = Call(proxy.url, path, stream=stream, timeout=0.2)
        request = prefill.wait_generate()
        assert request.timeout == 0.2
        assert call.response.status_code == 408
        assert "0.2 s" in call.error()["message"]
        both_aborted(prefill, decode, request)

    @paths
    def test_a_stream_that_began_ends_with_an_error_event(
        self, manual: tuple[FakeNode, FakeNode, ProxyThread], path: str
    ) -> None:
        prefill, decode, proxy = manual
        call = Call(proxy.url, path, stream=True, timeout=0.4)
        request = prefill.wait_generate()
        prefill.say(request, [40])
        assert call.response.status_code == 200
        assert call.error()["code"] == "deadline"
        both_aborted(prefill, decode, request)

    def test_the_shorter_of_both_deadlines_counts(self, cluster: Cluster) -> None:
        prefill, _ = cluster.pair(auto=False)
        proxy = cluster.proxy(request_timeout=0.3)
        call = Call(proxy.url, "/generate", timeout=100)
        assert prefill.wait_generate().timeout == 0.3
        assert call.response.status_code == 408


class TestQueue:
    def test_a_full_queue_is_429_and_opens_again(self, cluster: Cluster) -> None:
        prefill, _ = cluster.pair(auto=False)
        proxy = cluster.proxy(max_queue=2)
        call = Call(proxy.url, "/generate", input_ids=[[5], [6]])
        prefill.wait_generate(2)
        for path, body in PATHS.items():
            response = httpx.post(proxy.url + path, json=body)
            assert response.status_code == 429
            assert int(response.headers["Retry-After"]) >= 1
            assert response.json()["error"]["type"] == "rate_limit_error"
        httpx.post(proxy.url + "/abort_request", json={"abort_all": True})
        assert call.response.status_code == 200
        again = Call(proxy.url, "/generate", sampling_params={"max_new_tokens": 1})
        prefill.say(prefill.wait_generate(3), [40], finish=Finish("length"))
        assert again.response.status_code == 200

    def test_a_batch_that_can_never_fit_is_refused_for_good(self, cluster: Cluster) -> None:
        cluster.pair()
        client = cluster.client(max_queue=2)
        response = client.post("/generate", json={"input_ids": [[5], [6], [7]]})
        assert response.status_code == 400
        assert "queue of 2" in response.json()["error"]["message"]
        params = {"n": 3, "temperature": 1.0}
        response = client.post("/generate", json={"input_ids": [5], "sampling_params": params})
        assert response.status_code == 400
        assert "3 prompts times `n`" in response.json()["error"]["message"]


def test_draining_finishes_what_runs_and_takes_nothing_new(
    manual: tuple[FakeNode, FakeNode, ProxyThread],
) -> None:
    prefill, decode, proxy = manual
    call = Call(proxy.url, "/v1/completions", stream=True)
    first, second = prefill.wait_generate(), decode.wait_generate()
    drained: list[bool] = []

    def drain() -> None:
        assert proxy.proxy is not None
        drained.append(proxy.run(proxy.proxy.drain(10)))

    thread = threading.Thread(target=drain)
    thread.start()
    wait_until(lambda: httpx.get(proxy.url + "/readiness").status_code == 503)
    response = httpx.post(proxy.url + "/generate", json=PATHS["/generate"])
    assert response.status_code == 503
    prefill.say(first, [40])
    decode.say(second, [40, 41], finish=Finish("length"))
    assert call.response.status_code == 200
    assert call.events[-1] == "DONE"
    thread.join()
    assert drained == [True]


def test_stopping_tells_clients_and_nodes(cluster: Cluster) -> None:
    prefill, decode = cluster.pair(auto=False)
    proxy = cluster.proxy()
    call = Call(proxy.url, "/v1/completions")
    request = prefill.wait_generate()
    assert proxy.proxy is not None
    proxy.run(proxy.proxy.stop())
    assert call.response.status_code == 503
    both_aborted(prefill, decode, request)
