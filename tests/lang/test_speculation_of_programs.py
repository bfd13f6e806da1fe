"""API speculation: fewer calls and the same results."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from scripted_backend import ScriptedBackend

import pd.lang as pl
from pd.core.errors import UsageError

if TYPE_CHECKING:
    from pd.lang.ir import GenSettings

SENTENCE = "Anna Berg is a nurse from Oslo and is 33 years old."


def extract(s: Any) -> None:
    s += pl.user(f"Extract name, city, job as JSON: {SENTENCE}")
    with s.assistant():
        s += '{"name": "' + pl.gen("name", stop='"')
        s += '", "city": "' + pl.gen("city", stop='"')
        s += '", "job": "' + pl.gen("job", stop='"') + '"}'


FOUND = {"name": "Anna Berg", "city": "Oslo", "job": "nurse"}


def test_three_fields_come_with_one_call(endpoint: pl.RuntimeEndpoint) -> None:
    usage = endpoint.token_usage
    spent = []
    for function in (pl.function(extract), pl.function(extract, num_api_spec_tokens=64)):
        usage.reset()
        state = function.run(backend=endpoint, temperature=0)
        assert {name: state[name] for name in FOUND} == FOUND
        assert state.error() is None
        spent.append((usage.calls, usage.prompt_tokens, state.text()))
    (calls, tokens, text), (fewer_calls, fewer_tokens, same_text) = spent
    assert (calls, fewer_calls) == (3, 1)
    assert fewer_tokens <= 0.4 * tokens
    assert text == same_text


def test_a_turn_of_a_chat_model_comes_with_one_call(url: str) -> None:
    backend = pl.OpenAI("embedded", base_url=f"{url}/v1", api_key="none")
    state = pl.function(extract, num_api_spec_tokens=64).run(backend=backend, temperature=0)
    assert {name: state[name] for name in FOUND} == FOUND
    assert state.messages()[-1]["content"].endswith('"job": "nurse"}')
    assert backend.token_usage.calls == 1


LETTERS = "ab\n."


def continue_text(text: str, settings: GenSettings) -> str:
    """A model of texts: greedy, one character a token, so any prompt has one continuation."""
    said = ""
    while len(said) < (settings.max_new_tokens or 0):
        rng = random.Random(text + said)
        if rng.random() < 0.1:
            break
        said += rng.choice(LETTERS)
    return said


@pytest.mark.parametrize("seed", range(40))
def test_results_are_those_without_speculation(seed: int) -> None:
    rng = random.Random(seed)
    steps = [
        (
            rng.choice(["a", "b", "\n", ".", "\na"]),
            rng.choice([None, "\n", ".", ["b", "\n"]]),
            rng.randrange(1, 9),
        )
        for _ in range(6)
    ]

    def body(s: Any) -> None:
        for number, (text, stop, limit) in enumerate(steps):
            s += pl.gen(f"v{number}", limit, stop=stop) + text

    plain, fewer = ScriptedBackend(continue_text), ScriptedBackend(continue_text)
    expected = pl.function(body).run(backend=plain)
    state = pl.function(body, num_api_spec_tokens=20).run(backend=fewer)
    assert state.text() == expected.text()
    for number in range(len(steps)):
        assert state[f"v{number}"] == expected[f"v{number}"]


def test_a_mismatch_calls_again_and_is_right() -> None:
    def answer(text: str, settings: GenSettings) -> str:
        return "Bob\nAge: 9\nCity: Rome\n" if text == "Name: " else "Paris\n"

    @pl.function(num_api_spec_tokens=32)
    def program(s: Any) -> None:
        s += "Name: " + pl.gen("name", stop="\n")
        s += "\nAge: " + pl.gen("age", stop="\n")
        s += "\nTown: " + pl.gen("town", stop="\n")

    backend = ScriptedBackend(answer)
    state = program.run(backend=backend)
    assert [state[name] for name in ("name", "age", "town")] == ["Bob", "9", "Paris"]
    assert backend.list_texts("gen") == ["Name: ", "Name: Bob\nAge: 9\nTown: "]


@pl.function(num_api_spec_tokens=32)
def fill_turn(s: Any) -> None:
    s += pl.user("Who?")
    s += pl.assistant("Name: " + pl.gen("name", stop=",") + ", city: " + pl.gen("city"))


def test_a_chat_model_is_asked_again_until_it_keeps_the_form() -> None:
    answers = iter(["Sure! Name: Bob", "Name: Bob, town: Rome", "Name: Bob, city: Rome"])
    backend = ScriptedBackend(lambda text, settings: next(answers), is_chat_model=True)
    state = fill_turn.run(backend=backend)
    assert (state["name"], state["city"]) == ("Bob", "Rome")
    assert state.messages()[-1]["content"] == "Name: Bob, city: Rome"
    assert backend.prompts[-1].messages == ({"role": "user", "content": "Who?"},)


def test_a_chat_model_that_never_keeps_the_form_is_an_error() -> None:
    backend = ScriptedBackend(lambda text, settings: "Sure!", is_chat_model=True)
    state = fill_turn.run(backend=backend)
    assert "did not answer in the form of the program in 3 attempts" in str(state.error())
    with pytest.raises(pl.ProgramError, match="'Sure!'"):
        state["city"]


def test_speculation_cannot_be_streamed() -> None:
    with pytest.raises(UsageError, match="cannot be combined"):
        fill_turn.run(backend=ScriptedBackend(), stream=True)
