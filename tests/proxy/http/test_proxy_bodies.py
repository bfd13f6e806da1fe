"""Bodies are counted before they are parsed, and taken within budgets."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fake_node import wait_until
from hypothesis import given
from hypothesis import strategies as st

from pd.proxy.http.background import INLINE_TEXT_BYTES, Background
from pd.proxy.http.bodies import FREE_BYTES, RawBody, count_json, estimate_text_bytes
from pd.proxy.requests.common import RequestFields
from pd.proxy.requests.request_model import RequestModel
from pd.proxy.text.chat_template import ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy_cluster import Cluster

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a"\\,[{é'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='k"\\:,'), inner),
)


def commas(value: Any) -> int:
    """Commas between the members of lists and objects."""
    if not isinstance(value, list | dict):
        return 0
    members = list(value.values()) if isinstance(value, dict) else value
    return max(0, len(members) - 1) + sum(map(commas, members))


def parts(value: Any) -> int:
    """Lists, objects and strings, keys included."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(parts, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(parts, value))
    return int(isinstance(value, str))


@given(VALUES, st.booleans())
def test_values_and_parts_are_counted_without_parsing(value: Any, ascii_only: bool) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert count_json(data) == (commas(value), parts(value))


def test_blocks_are_counted_as_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"a": ["x,y", '"[{', "\\"], "b": [[], {}, [1, 2, 3]]}
    data = json.dumps(value).encode()
    for block in range(1, len(data) + 1):
        monkeypatch.setattr("pd.proxy.http.bodies._BLOCK", block)
        assert count_json(data) == (commas(value), parts(value))


def runs_at_once(
    body: bytes, *, text: int | None = None, parse: bool = False, may_be_long: bool = False
) -> bool:
    """Whether work on a body is done on the event loop's thread."""
    threads: list[int] = []

    class Model(RequestModel):
        @classmethod
        def parse(cls, body: bytes) -> Model:
            threads.append(threading.get_ident())
            return cls()

    async def work() -> None:
        background = Background()
        if parse:
            await RawBody(body, background).parse(Model)
        else:
            tokenize = RawBody(body, background).run_tokenizing
            await tokenize(Model.parse, b"", text_bytes=text, may_be_long=may_be_long)
        background.close()

    asyncio.run(work())
    return threads == [threading.get_ident()]


def test_what_is_tokenized_on_the_loop_is_short() -> None:
    body = b"x" * 6000
    ids: list[str | list[int]] = [[7] * 1000]
    short: list[str | list[int]] = ["a" * (INLINE_TEXT_BYTES // 2)]
    assert runs_at_once(body, text=estimate_text_bytes(ids))
    assert runs_at_once(body, text=estimate_text_bytes(short))
    assert not runs_at_once(body, text=estimate_text_bytes(short * 2))
    assert not runs_at_once(body, text=estimate_text_bytes(["漢" * (INLINE_TEXT_BYTES // 2)]))
    assert not runs_at_once(body, text=estimate_text_bytes(["a"] * 100))
    assert not runs_at_once(body)
    assert not runs_at_once(body * 2, text=estimate_text_bytes(ids))
    assert runs_at_once(b"x" * INLINE_TEXT_BYTES)
    assert not runs_at_once(b"x", may_be_long=True)


def test_what_is_parsed_on_the_loop_is_small() -> None:
    assert runs_at_once(b'{"prompt":"%b"}' % (b"a" * 8000), parse=True)
    assert runs_at_once(b'{"prompt":[%b1]}' % (b"12," * 2600), parse=True)
    assert not runs_at_once(b'{"prompt":[%b[1]]}' % (b"[1]," * 1000), parse=True)
    assert not runs_at_once(b'{"prompt":"%b"}' % (b"a" * 9000), parse=True)


def many(item: str, count: int) -> bytes:
    return b"[" + ",".join([item] * count).encode() + b"]"


@pytest.mark.parametrize(
    ("limit", "value", "path", "body", "says"),
    [
        ("http.bodies.MAX_VALUES", 10_000, "/generate", b'{"input_ids":%b}' % many("1", 10_002),
         "10001 values; at most 10000"),
        ("http.bodies.MAX_PARTS", 5000, "/generate", b'{"input_ids":%b}' % many("[1]", 5000),
         "5003 lists, objects and strings; at most 5000"),
        ("requests.messages.MAX_MESSAGES", 2, "/v1/chat/completions",
         b'{"messages":%b}' % many('{"role":"user","content":"a"}', 3), "3 messages; at most 2"),
        ("api.prompts.MAX_REQUEST_TOKENS", 200, "/v1/completions",
         b'{"prompt":%b,"max_tokens":1}' % many(f"[{'1,' * 100}1]", 2), "202 tokens or more"),
        ("api.prompts.MAX_PROMPT_LOGPROBS", 9000, "/v1/completions",
         b'{"prompt":%b,"echo":true,"logprobs":20,"n":5}' % many("40", 100), "10500 log prob"),
        ("api.prompts.MAX_PROMPT_LOGPROBS", 9000, "/generate",
         b'{"input_ids":[%b,%b],"return_logprob":true,"logprob_start_len":50,"top_logprobs_num":19,'
         b'"sampling_params":{"n":5}}' % (many("40", 100), many("40", 100)), "10000 log prob"),
        ("text.tokenizer.MAX_TEXT_TOKENS", 10, "/tokenize", b'{"prompt":"one two three four five"}',
         "tokens or more; at most 10"),
        ("api.tokens_api.MAX_TEXT_TOKENS", 10, "/detokenize", b'{"tokens":%b}' % many("40", 11),
         "11 token ids; at most 10"),
        ("api.tokens_api.MAX_TEXT_CHARACTERS", 10, "/detokenize", b'{"tokens":%b}' % many("40", 11),
         "may have 11 characters (at most 10"),
        ("http.bodies.MAX_ADMIN_BODY_BYTES", 10, "/abort_request", b'{"rid":"somebody"}',
         "18 bytes; at most 10"),
    ],
)  # fmt: skip
def test_what_is_too_much_of_anything_is_refused(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    value: int,
    path: str,
    body: bytes,
    says: str,
) -> None:
    monkeypatch.setattr(f"pd.proxy.{limit}", value)
    cluster.pair()
    headers = {"Content-Type": "application/json"}
    response = cluster.client().post(path, content=body, headers=headers)
    assert response.status_code == 400, response.text
    assert says in response.json()["error"]["message"]


@pytest.mark.one_process("reads the bytes that the proxy holds")
@pytest.mark.parametrize("slow_seconds", [60.0, 0.0], ids=["in time", "too slow"])
def test_bodies_in_flight_are_bounded_and_slow_ones_give_way(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, slow_seconds: float
) -> None:
    monkeypatch.setattr("pd.proxy.http.bodies.MAX_BODIES_BYTES", 300_000)
    monkeypatch.setattr("pd.proxy.http.bodies.SLOW_SECONDS", slow_seconds)
    cluster.node("unified")
    proxy = cluster.proxy()
    assert proxy.proxy is not None
    bodies = proxy.proxy._service.bodies
    body = b'{"prompt":"hello"' + b" " * 250_000 + b"}"
    headers = {"Content-Type": "application/json"}
    go_on = threading.Event()

    def slow() -> Any:
        yield body[:-1]
        go_on.wait(20)
        yield body[-1:]

    def post(content: Any) -> httpx.Response:
        return httpx.post(f"{proxy.url}/tokenize", content=content, headers=headers, timeout=30)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, slow())
        wait_until(lambda: bodies.held > 180_000)
        second = post(body)
        # Small ones are not concerned.
        assert post(b'{"prompt":"hello"}').status_code == 200
        go_on.set()
        answers = [first.result(), second]
        taken, refused = answers if slow_seconds else reversed(answers)
        assert taken.status_code == 200
        assert refused.status_code == 429
        assert refused.headers["retry-after"]
        assert "try again later" in refused.json()["error"]["message"]
    assert bodies.held == 0
    assert post(body).status_code == 200


@pytest.mark.one_process("looks for objects of the proxy")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/invocations", {"prompt": "hello"}),
        ("/invocations", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/generate", {"text": "hello"}),
        ("/generate", {"text": "hello", "choices": ["a", "b"]}),
    ],
)
def test_a_proxy_drops_a_body_before_its_answer_is_computed(
    cluster: Cluster, path: str, body: dict[str, Any]
) -> None:
    """An answer may take hours, and a body may have megabytes."""
    node = cluster.node("unified", auto=False)
    proxy = cluster.proxy()
    assert proxy.proxy is not None
    padding = {"metadata": {"long": "x" * (4 * FREE_BYTES)}}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, proxy.url + path, json=body | padding, timeout=30)
        node.wait_generate()
        assert proxy.proxy._service.bodies.held == 0
        # The thread that tokenized the prompt may drop its reference a moment later.
        wait_until(lambda: not any(isinstance(each, RequestFields) for each in gc.get_objects()))
        for request in node.generates:
            node.reply(request)
        node.auto = True
        assert answer.result().status_code == 200


def test_prompts_in_the_system_are_bounded_in_tokens(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd.proxy.dispatch.admission.MAX_TOKENS", 100)
    (node,) = (cluster.node("unified", auto=False),)
    proxy = cluster.proxy()
    body = {"input_ids": [5] * 60, "sampling_params": {"max_new_tokens": 2}}

    def post() -> httpx.Response:
        return httpx.post(f"{proxy.url}/generate", json=body, timeout=30)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(post)
        node.wait_generate()
        refused = post()
        assert refused.status_code == 429
        assert "60 tokens are in the system, at most 100" in refused.json()["error"]["message"]
        node.reply(node.generates[0])
        assert first.result().status_code == 200
    node.auto = True
    assert post().status_code == 200


LOGPROB_BODY = {
    "input_ids": [5] * 60,
    "return_logprob": True,
    "logprob_start_len": 10,
    "top_logprobs_num": 9,
    "sampling_params": {"max_new_tokens": 10},
}


@pytest.mark.one_process("reads the ledger of the process")
def test_log_probabilities_in_the_system_are_bounded_until_their_answer_is_given(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy keeps the answer to the first of two prompts until the second is answered."""
    monkeypatch.setattr("pd.proxy.dispatch.admission.MAX_LOGPROBS", 1300)
    node = cluster.node("unified", auto=False)
    proxy = cluster.proxy()
    assert proxy.proxy is not None
    ledger = proxy.proxy._dispatcher.admission._ledger

    def post(body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{proxy.url}/generate", json=body, timeout=30)

    with ThreadPoolExecutor(1) as pool:
        batch = LOGPROB_BODY | {"input_ids": [[5] * 60] * 2}
        first = pool.submit(post, batch)
        node.wait_generate(2)
        node.reply(node.generates[0])
        wait_until(lambda: ledger.prompts == 1)
        refused = post(LOGPROB_BODY)
        assert refused.status_code == 429
        said = refused.json()["error"]["message"]
        assert "may hold 1200 log probabilities are in the system, at most 1300 may be" in said
        node.auto = True
        assert post({"input_ids": [5] * 60}).status_code == 200
        node.reply(node.generates[1])
        assert first.result().status_code == 200
    assert post(LOGPROB_BODY).status_code == 200
    refused = post(LOGPROB_BODY | {"sampling_params": {"max_new_tokens": 10, "n": 3}})
    assert refused.status_code == 400
    assert "1800 log probabilities; at most 1300" in refused.json()["error"]["message"]


PROMPT_IDS, NOISE, BODY_BYTES = 1511, 40_013, 200_021
PROMPT = b"[" + b",".join([b"7"] * PROMPT_IDS) + b"]"
TEXT = b'"' + b"a" * PROMPT_IDS + b'"'
PROMPTS_OF_ENDPOINTS = {
    "/v1/completions": b'"prompt":[%b]' % PROMPT,
    "/v1/chat/completions": b'"messages":[{"role":"user","content":%b}]' % TEXT,
    "/generate": b'"input_ids":%b' % PROMPT,
}


def in_parts(fields: bytes) -> Iterator[bytes]:
    """A body of BODY_BYTES with these fields and a long list that no endpoint knows.

    Only the proxy ever has it in one piece.
    """
    head = b'{"stream":true,' + fields + b',"noise":['
    noise = [b"1.5,"] * (NOISE - 1) + [b"1.5]"]
    rest = BODY_BYTES - len(head) - sum(map(len, noise)) - 1
    yield head
    for start in range(0, NOISE, 5000):
        yield b"".join(noise[start : start + 5000])
    yield b" " * rest + b"}"


def remains() -> list[str]:
    """What the process still holds of the bodies that :func:`in_parts` makes."""
    gc.collect()
    objects = gc.get_objects()
    found = [type(o).__name__ for o in objects if issubclass(type(o), RequestModel)]
    lists = [o for o in objects if type(o) is list and len(o) in (PROMPT_IDS, NOISE)]
    found += ["list" for each in lists if set(map(str, each)) in ({"7"}, {"1.5"})]
    # Bytes and strings are not among the collector's objects themselves.
    texts = [o for o in gc.get_referents(*objects) if type(o) in (bytes, str)]
    return found + ["text" for text in texts if is_of_body(text)]


def is_of_body(text: bytes | str) -> bool:
    """Whether it is the chat's message, or the whole body."""
    if isinstance(text, str):
        return len(text) == PROMPT_IDS and set(text) == {"a"}
    return len(text) == BODY_BYTES and text.startswith(b'{"stream":true')


@pytest.mark.parametrize(
    "path",
    [
        path if "chat" in path else pytest.param(path, marks=pytest.mark.full)
        for path in PROMPTS_OF_ENDPOINTS
    ],
)
def test_a_request_under_way_holds_nothing_of_its_body(cluster: Cluster, path: str) -> None:
    prefill, decode = cluster.pair(
        auto=False, context_length=4000, pages={"total": 1000, "free": 1000}
    )
    proxy = cluster.proxy()
    headers = {"Content-Type": "application/json"}

    def send() -> int:
        body = in_parts(PROMPTS_OF_ENDPOINTS[path])
        url = proxy.url + path
        return httpx.post(url, content=body, headers=headers, timeout=30).status_code

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(send)
        try:
            prefill.wait_generate()
            # NOTE: the node may have the request before the proxy has let go of its body.
            wait_until(lambda: not remains())
        finally:
            decode.fail(decode.wait_generate(), "node_failed")
        assert answer.result() == 502


@pytest.mark.one_process("replaces a function of the proxy")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_templates_with_variables_of_clients_are_rendered_on_another_thread(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """They may count to a number that the client chose."""
    threads: list[str] = []
    render = ChatTemplate.render

    def noted(template: ChatTemplate, *args: Any, **options: Any) -> str:
        threads.append(threading.current_thread().name)
        return render(template, *args, **options)

    monkeypatch.setattr(ChatTemplate, "render", noted)
    cluster.pair()
    client = cluster.client()
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
    if path != "/tokenize":
        asked["max_tokens"] = 2
    for variables in (None, {"n": 5}):
        response = client.post(path, json=asked | {"chat_template_kwargs": variables})
        assert response.status_code == 200, response.text
    at_once, later = threads
    assert not at_once.startswith("background")
    assert later.startswith("background")
