"""Programs on servers with OpenAI's API: those of pd, and one that has no log probabilities."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

import pd.lang as pl
from pd.core.errors import UsageError
from pd.lang.openai_backend import choose_by_tokens

Make = Callable[..., pl.OpenAI]


@pytest.fixture
def make(url: str) -> Iterator[Make]:
    """Makes backends on the proxy's OpenAI API."""

    def make(**options: Any) -> pl.OpenAI:
        options.setdefault("base_url", f"{url}/v1")
        backend = pl.OpenAI("embedded", api_key="none", **options)
        pl.set_default_backend(backend)
        return backend

    yield make
    pl.set_default_backend(None)


@pl.function
def ask_twice(s: Any, question: str) -> None:
    s += pl.system("Be brief.")
    s += pl.user(question)
    s += pl.assistant(pl.gen("first", 12))
    s += pl.user("And pd?")
    s += pl.assistant(pl.gen("second", 6))


def test_a_chat_is_that_of_the_native_endpoint(make: Make, endpoint: pl.RuntimeEndpoint) -> None:
    backend = make()
    native = ask_twice.run("What is the KV cache?", backend=endpoint, temperature=0)
    state = ask_twice.run("What is the KV cache?", temperature=0)
    assert state.messages() == native.messages()
    usage = backend.token_usage
    assert (usage.calls, usage.completion_tokens) == (2, 18)
    streamed = ask_twice.run("What is the KV cache?", temperature=0, stream=True)
    assert "".join(streamed.text_iter("first")) == native["first"]
    assert streamed.messages() == native.messages()


@pl.function
def complete(s: Any) -> None:
    s += "Q: What is pd?\nA:" + pl.gen("answer", 12, stop="\n", return_logprob=True)
    s += SUM + pl.gen("number", 4, dtype=int, seed=3) + pl.gen("pair", 2, n=2)
    s += '\nA schema: {"a": 1} ' + pl.gen("json", 40, json_schema=SCHEMA)


SUM = "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n12 + 30 = "
QUESTION = "<|im_start|>user\nWhat is the KV cache?<|im_end|>\n<|im_start|>assistant\n"
CHOICES = [" zebra", " key", " keys and", " keys or"]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}


def test_completions_are_those_of_the_native_endpoint(
    make: Make, endpoint: pl.RuntimeEndpoint
) -> None:
    make(is_chat_model=False)
    native = complete.run(backend=endpoint, temperature=0)
    state = complete.run(temperature=0)
    assert state["answer"] == native["answer"]
    logprobs = state.get_meta_info("answer")["output_token_logprobs"]
    expected = native.get_meta_info("answer")["output_token_logprobs"]
    assert [each[0] for each in logprobs] == pytest.approx([each[0] for each in expected], abs=1e-4)
    assert state["number"] == native["number"] == "42"
    assert len(state["pair"]) == 2
    assert json.loads(state["json"])["a"] in (1, 2)


def test_a_selection_compares_the_first_tokens_that_differ(make: Make) -> None:
    @pl.function
    def program(s: Any) -> None:
        s += QUESTION + "The KV cache holds the" + pl.select("a", CHOICES)

    make(is_chat_model=False)
    state = program.run()
    assert state["a"] == " keys and"
    assert len(state.get_meta_info("a")["top_logprobs"]) > 1


def test_chats_refuse_what_they_cannot_do(make: Make) -> None:
    make()

    def run(body: Callable[[Any], None]) -> str:
        def program(s: Any) -> None:
            s += pl.user("Hello")
            body(s)

        error = pl.function(program).run().error()
        assert error is not None
        return str(error)

    def text_first(s: Any) -> None:
        s += pl.assistant("I say " + pl.gen("a"))

    def with_regex(s: Any) -> None:
        s += pl.assistant(pl.gen("a", regex="a+"))

    def without_role(s: Any) -> None:
        s += pl.gen("a")

    assert "answers whole turns" in run(text_first)
    assert "regex is not part of OpenAI's API" in run(with_regex)
    assert "answers whole turns" in run(without_role)
    with pytest.raises(UsageError, match="does not describe servers"):
        pl.get_server_info()


def test_errors_of_the_server_are_those_of_the_program(make: Make) -> None:
    make(is_chat_model=False, max_retries=0)

    @pl.function
    def program(s: Any) -> None:
        s += "pd" + pl.gen("a", -3)

    error = program.run().error()
    assert error is not None
    assert "max_tokens" in str(error)
    make(base_url="http://127.0.0.1:9/v1", max_retries=0)
    error = ask_twice.run("Hello").error()
    assert error is not None
    assert "127.0.0.1:9" in str(error)


# The likeliest tokens after each text.
TOKENS = {
    "": {"no": -3.0, "ye": -0.1, "": -2.0},
    "ye": {"s!": -0.1, "t": -4.0},
    "a": {".": -0.1, "b": -1.0},
    "d": {"ef": -0.1},
}


@pytest.mark.parametrize(
    ("choices", "chosen"),
    [(["no", "yes", "yet"], "yes"), (["no", "nope"], "no"), (["x", "no"], "no"), (["q"], "q")],
)
def test_choices_are_compared_token_by_token(choices: list[str], chosen: str) -> None:
    tokens = TOKENS | {"no": {".": -0.1, "pe": -0.2}}
    assert choices[choose_by_tokens(choices, tokens.__getitem__, can_continue=True)] == chosen


def test_choices_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(pl.ProgramError, match="cannot tell 'yes', 'yet' apart"):
        choose_by_tokens(["no", "yes", "yet"], TOKENS.__getitem__, can_continue=False)
    with pytest.raises(pl.ProgramError, match="prefers"):
        choose_by_tokens(["a", "b"], TOKENS.__getitem__, can_continue=True)


def test_a_server_without_log_probabilities_is_asked_for_its_token() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        message = {"role": "assistant", "content": "Yes"}
        assert body["max_tokens"] == 1
        return httpx.Response(
            200,
            json={
                "id": "x",
                "object": "chat.completion",
                "created": 0,
                "model": "m",
                "choices": [{"index": 0, "finish_reason": "length", "message": message}],
            },
        )

    client = httpx.Client(transport=httpx.MockTransport(answer))
    backend = pl.OpenAI("m", api_key="none", base_url="http://test/v1", http_client=client)

    @pl.function
    def program(s: Any) -> None:
        s += pl.user("Is it?") + pl.assistant(pl.select("a", ["No", " Yes"]))

    assert program.run(backend=backend)["a"] == " Yes"
