"""What a program sees of a server that is busy, fails, or is not there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

import pd.lang as pl
from pd.core.errors import AuthenticationError, SetupError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    Answer = Callable[[dict[str, Any]], httpx.Response]

META = {"prompt_tokens": 1, "completion_tokens": 1, "finish_reason": {"type": "length"}}
GOOD = {"text": "fine", "meta_info": META}
FACTS = {"/get_model_info": {"model_path": "m"}, "/tokenizer_info": {"chat_template": None}}


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], pl.RuntimeEndpoint]:
    """Makes an endpoint whose server answers ``/generate`` as the test says."""
    real = httpx.Client
    monkeypatch.setattr("pd.lang.endpoint._FIRST_PAUSE", 0.001)

    def connect(answer: Answer) -> pl.RuntimeEndpoint:
        def handle(request: httpx.Request) -> httpx.Response:
            if request.url.path in FACTS:
                return httpx.Response(200, json=FACTS[request.url.path])
            return answer(json.loads(request.content))

        def make_client(**options: Any) -> httpx.Client:
            return real(base_url=options["base_url"], transport=httpx.MockTransport(handle))

        monkeypatch.setattr(httpx, "Client", make_client)
        return pl.RuntimeEndpoint("http://test")

    return connect


@pl.function
def program(s: Any) -> None:
    s += "x" + pl.gen("a")


def fail(status: int, message: str = "no") -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message, "param": None}})


def test_a_busy_server_is_asked_again_under_another_name(connect: Any) -> None:
    answers = [fail(429), fail(503), fail(502), httpx.Response(200, json=GOOD)]
    names = []

    def answer(body: dict[str, Any]) -> httpx.Response:
        names.append(body["rid"])
        return answers.pop(0)

    assert program.run(backend=connect(answer))["a"] == "fine"
    assert len(set(names)) == 4


def test_a_lost_connection_is_asked_again(connect: Any) -> None:
    answers: list[Any] = [httpx.ReadError("reset"), httpx.Response(200, json=GOOD)]

    def answer(body: dict[str, Any]) -> httpx.Response:
        following = answers.pop(0)
        if isinstance(following, Exception):
            raise following
        return following

    assert program.run(backend=connect(answer))["a"] == "fine"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda body: fail(503), "program: 'a': no"),
        (lambda body: fail(400, "wrong"), "program: 'a': wrong"),
        (lambda body: httpx.Response(418, text="tea"), "program: 'a': status 418: tea"),
    ],
)
def test_an_error_that_stays_is_that_of_the_state(
    answer: Answer, message: str, connect: Any
) -> None:
    assert str(program.run(backend=connect(answer)).error()) == message


def test_a_stream_that_fails_is_no_success(connect: Any) -> None:
    event = f"data: {json.dumps(GOOD)}\n\n"
    error = f"data: {json.dumps({'error': {'message': 'the node died'}})}\n\n"
    endings = {
        error: "the node died",
        "": "ended the stream early",
        "data: [DONE]\n\n": None,
    }
    for ending, message in endings.items():
        endpoint = connect(lambda body, text=event + ending: httpx.Response(200, text=text))
        state = program.run(backend=endpoint, stream=True)
        if message is None:
            assert list(state.text_iter("a")) == ["fine"]
        else:
            with pytest.raises(pl.ProgramError, match=message):
                list(state.text_iter("a"))


def test_a_stream_that_is_refused_names_the_reason(connect: Any) -> None:
    state = program.run(backend=connect(lambda body: fail(400, "wrong")), stream=True)
    with pytest.raises(pl.ProgramError, match="wrong"):
        list(state.text_iter("a"))


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(SetupError, match=r"cannot reach the server at http://127\.0\.0\.1:9/"):
        pl.RuntimeEndpoint("http://127.0.0.1:9")
    with pytest.raises(UsageError, match="base_url must be like http://HOST:PORT or https://HOST"):
        pl.RuntimeEndpoint("ftp://host")


def test_a_wrong_key_is_named(connect: Any) -> None:
    endpoint = connect(lambda body: fail(401, "no such key"))
    error = program.run(backend=endpoint).error()
    assert error is not None
    assert isinstance(error.__cause__, AuthenticationError)


def test_streamed_texts_may_contain_line_ends_of_unicode(connect: Any) -> None:
    text = "a\u2028b\x85c\u2029d"
    event = json.dumps({"text": text, "meta_info": META}, ensure_ascii=False)
    content = f"data: {event}\n\ndata: [DONE]\n\n".encode()
    backend = connect(lambda body: httpx.Response(200, content=content))
    state = program.run(backend=backend, stream=True)
    assert list(state.text_iter("a")) == [text]
