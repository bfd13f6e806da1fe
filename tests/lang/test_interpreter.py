"""How states perform operations: order, waiting, forks, scopes and errors."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from scripted_backend import ScriptedBackend

import pd.lang as pl
from pd.core.errors import UsageError
from pd.proxy.text.chat_template import ChatTemplate

if TYPE_CHECKING:
    from pd.lang.ir import GenSettings


def count_calls(text: str, settings: GenSettings) -> str:
    """An answer that tells prompts apart."""
    return f"<{len(text)}>"


def test_text_and_answers_come_in_the_order_of_the_program() -> None:
    @pl.function
    def program(s: Any, word: str) -> str:
        s += "One " + pl.gen("a") + " two "
        s += word
        s += pl.gen("b")
        return "returned"

    state = program.run("three", backend=ScriptedBackend(count_calls))
    assert state.text() == "One <4> two three<17>"
    assert (state["a"], state["b"], state.ret_value) == ("<4>", "<17>", "returned")


@pytest.mark.parametrize("use_thread", [True, False])
def test_generations_wait_only_when_threads_are_used(use_thread: bool) -> None:
    may_answer = threading.Event()
    waited = []

    def answer(text: str, settings: GenSettings) -> str:
        waited.append(may_answer.wait(0.2))
        return "late"

    @pl.function
    def program(s: Any) -> None:
        s += pl.gen("a")
        may_answer.set()
        assert s["a"] == "late"

    program.run(backend=ScriptedBackend(answer), use_thread=use_thread)
    assert waited == [use_thread]


def test_a_variable_that_is_set_again_is_read_after_its_last_generation() -> None:
    @pl.function
    def program(s: Any) -> list[str]:
        read = []
        for _ in range(3):
            s += "." + pl.gen("a")
            read.append(s["a"])
        return read

    state = program.run(backend=ScriptedBackend(count_calls))
    assert state.ret_value == ["<1>", "<5>", "<9>"]


def test_missing_variables_are_key_errors_and_not_in_the_state() -> None:
    @pl.function
    def program(s: Any) -> None:
        s += pl.gen("a")
        assert "a" in s
        assert "b" not in s
        s["b"] = 7
        assert "b" in s

    state = program.run(backend=ScriptedBackend())
    assert state["b"] == 7
    with pytest.raises(KeyError, match="c"):
        state["c"]


def test_forks_run_at_the_same_time_after_their_prefix_was_sent() -> None:
    all_there = threading.Barrier(3)

    def answer(text: str, settings: GenSettings) -> str:
        if text.startswith("Start<5>") and "main" not in text:
            all_there.wait(5)
        return count_calls(text, settings)

    @pl.function
    def program(s: Any) -> list[str]:
        s += "Start" + pl.gen("a")
        forks = s.fork(3)
        forks += lambda i: "b" * i + pl.gen("b")
        s += "main" + pl.gen("c")
        forks.join()
        return [fork.text() for fork in forks.states]

    backend = ScriptedBackend(answer)
    state = program.run(backend=backend)
    assert state["b"] == ["<8>", "<9>", "<10>"]
    assert state.ret_value == ["Start<5><8>", "Start<5>b<9>", "Start<5>bb<10>"]
    assert state.text() == "Start<5>main<12>"
    assert backend.log[:2] == [("gen", "Start"), ("cache", "Start<5>")]


def test_a_fork_knows_the_variables_of_its_parent_from_the_beginning() -> None:
    may_answer = threading.Event()

    def answer(text: str, settings: GenSettings) -> str:
        assert may_answer.wait(5)
        return "answer"

    @pl.function
    def program(s: Any) -> tuple[bool, bool]:
        s += pl.gen("a")
        forks = s.fork(2)
        threading.Timer(0.05, may_answer.set).start()
        return "a" in forks[1], "b" in forks[1]

    assert program.run(backend=ScriptedBackend(answer)).ret_value == (True, False)


def test_join_gathers_new_variables_only() -> None:
    @pl.function
    def program(s: Any) -> None:
        s += pl.gen("kept")
        with s.copy() as one:
            one += "x" + pl.gen("one")
        forks = s.fork(2)
        forks += [pl.gen("first"), "." + pl.gen("second")]
        forks[0] += "again" + pl.gen("kept")
        forks.join()

    state = program.run(backend=ScriptedBackend(count_calls))
    assert state["kept"] == "<0>"
    assert state["one"] == ["<4>"]
    assert (state["first"], state["second"]) == (["<3>"], ["<4>"])


def test_a_scope_is_the_text_within_it() -> None:
    @pl.function
    def program(s: Any) -> None:
        s += "before "
        with s.var_scope("inner"):
            s += "a" + pl.gen("a") + "b"
        s += " after"

    assert program.run(backend=ScriptedBackend())["inner"] == "aanswerb"


def test_several_answers_are_a_list_and_the_first_goes_on() -> None:
    @pl.function
    def program(s: Any) -> None:
        s += pl.gen("a", n=2) + "."

    state = program.run(backend=ScriptedBackend())
    assert (state["a"], state.text()) == (["answer", "answer"], "answer.")


def test_an_error_names_function_and_variable_and_ends_the_state() -> None:
    def answer(text: str, settings: GenSettings) -> str:
        if text == "x":
            raise ValueError("the model is ill")
        return "fine"

    @pl.function
    def program(s: Any) -> None:
        s += pl.gen("good") + "x"[:0]
        s += pl.gen("other")

    @pl.function
    def failing(s: Any) -> None:
        s += "x" + pl.gen("bad") + pl.gen("never")

    backend = ScriptedBackend(answer)
    assert program.run(backend=backend).error() is None
    state = failing.run(backend=backend)
    error = state.error()
    assert error is not None
    assert (error.function, error.variable) == ("failing", "bad")
    assert str(error) == "failing: 'bad': the model is ill"
    assert isinstance(error.__cause__, ValueError)
    for name in ("bad", "never"):
        with pytest.raises(pl.ProgramError, match="the model is ill"):
            state[name]
    assert backend.list_texts("gen")[-1] == "x"


def test_an_error_of_a_parent_is_that_of_its_forks() -> None:
    def answer(text: str, settings: GenSettings) -> str:
        raise ValueError("ill")

    @pl.function
    def program(s: Any) -> None:
        s += pl.gen("a")
        forks = s.fork(2)
        forks += pl.gen("b")
        forks.join()

    with pytest.raises(pl.ProgramError, match="program: 'a': ill"):
        program.run(backend=ScriptedBackend(answer))


def test_a_body_that_raises_raises_from_run_and_is_the_error_of_a_batch() -> None:
    @pl.function
    def program(s: Any, x: int) -> float:
        s += pl.gen("a")
        return 1 / x

    backend = ScriptedBackend()
    with pytest.raises(ZeroDivisionError):
        program.run(0, backend=backend)
    states = program.run_batch([{"x": 1}, {"x": 0}, (2,)], backend=backend)
    errors = [state.error() for state in states]
    assert errors[0] is errors[2] is None
    assert str(errors[1]) == "program: ZeroDivisionError: division by zero"
    assert [state.ret_value for state in states] == [1.0, None, 0.5]


def test_batches_keep_their_order_and_generators_yield_early() -> None:
    gate = threading.Event()

    def answer(text: str, settings: GenSettings) -> str:
        if text == "3":
            assert gate.wait(5)
        return text * 2

    @pl.function
    def program(s: Any, x: int = 0) -> None:
        s += str(x) + pl.gen("a")

    backend = ScriptedBackend(answer)
    states = program.run_batch(
        [[i] for i in range(5)], backend=backend, generator_style=True, num_threads=2
    )
    early = [next(iter(states))["a"], next(iter(states))["a"]]
    gate.set()
    assert early + [state["a"] for state in states] == ["00", "11", "22", "33", "44"]
    assert program.run_batch([], backend=backend) == []
    with pytest.raises(UsageError, match="do not fit the parameters"):
        program.run_batch([[1, 2]], backend=backend)


def test_streams_yield_text_as_it_comes() -> None:
    @pl.function
    def program(s: Any) -> None:
        s += "say: " + pl.gen("a") + "."

    backend = ScriptedBackend(lambda text, settings: "word")
    state = program.run(backend=backend, stream=True)
    assert "".join(state.text_iter()) == "say: word."
    assert list(program.run(backend=backend, stream=True).text_iter("a")) == list("word")
    # Without streaming, everything comes at the end.
    assert list(program.run(backend=backend).text_iter("a")) == ["word"]

    async def collect() -> list[Any]:
        state = program.run(backend=backend, stream=True)
        return [each async for each in state.text_async_iter("a", return_meta_data=True)]

    pieces = asyncio.run(collect())
    assert [(text, meta["output_token_logprobs"]) for text, meta in pieces] == [
        (letter, [letter]) for letter in "word"
    ]


def test_a_stream_ends_with_the_error_of_its_program() -> None:
    @pl.function
    def program(s: Any) -> None:
        s += "text"
        raise ValueError("wrong")

    state = program.run(backend=ScriptedBackend(), stream=True)
    with pytest.raises(pl.ProgramError, match="program: ValueError: wrong"):
        list(state.text_iter())


def test_a_streamed_variable_is_whole_although_a_later_one_fails() -> None:
    def answer(text: str, settings: GenSettings) -> str:
        if text:
            raise ValueError("ill")
        return "word"

    @pl.function
    def program(s: Any) -> None:
        s += pl.gen("a") + pl.gen("b")

    state = program.run(backend=ScriptedBackend(answer), stream=True)
    assert state.error() is not None
    assert "".join(state.text_iter("a")) == "word"
    with pytest.raises(pl.ProgramError, match="ill"):
        list(state.text_iter("b"))


def test_settings_of_a_generation_override_those_of_the_run() -> None:
    seen = []

    def answer(text: str, settings: GenSettings) -> str:
        seen.append((settings.max_new_tokens, settings.temperature, settings.stop))
        return ""

    @pl.function
    def program(s: Any) -> None:
        s += pl.gen("a") + pl.gen("b", 5, temperature=0.5, stop="x")

    program.run(backend=ScriptedBackend(answer), temperature=0, stop=["y"])
    assert seen == [(128, 0, ("y",)), (5, 0.5, "x")]


def test_bound_arguments_hold_for_every_run() -> None:
    @pl.function
    def program(s: Any, a: str, b: str = "?") -> None:
        s += a + b

    bound = program.bind(b="!")
    assert bound.run("x", backend=ScriptedBackend()).text() == "x!"
    with pytest.raises(UsageError, match="no parameter 'c'"):
        program.bind(c=1)


REFUSED = {
    "image": lambda: pl.image("picture.png"),
    "video": lambda: pl.video("film.mp4", 8),
    "Runtime": lambda: pl.Runtime(model_path="x"),
    "temperature 1.0": lambda: pl.select("a", ["x"], temperature=1.0),
    "needs choices": lambda: pl.select("a"),
    "select needs choices": lambda: pl.gen("a", choices=[]),
    "no backend": lambda: _append(None).run(),
}


def _append(value: Any) -> Any:
    @pl.function
    def program(s: Any) -> None:
        s += value

    return program


@pytest.mark.parametrize("name", REFUSED)
def test_refused_words_are_named(name: str) -> None:
    pl.set_default_backend(None)
    with pytest.raises(UsageError, match=name):
        REFUSED[name]()


def test_wrong_values_are_named() -> None:
    backend = ScriptedBackend()
    with pytest.raises(TypeError, match="cannot append NoneType"):
        _append(None).run(backend=backend)
    with pytest.raises(ValueError, match="invalid dtype"):
        pl.gen("a", dtype=list)
    with pytest.raises(ValueError, match="both constrain"):
        pl.gen("a", dtype=int, regex="a")
    with pytest.raises(UsageError, match="first parameter"):
        pl.function(lambda x: x)  # type: ignore[arg-type]

    @pl.function
    def joins(s: Any) -> None:
        s.fork(2).join("concate_and_append")

    with pytest.raises(UsageError, match="concate_and_append"):
        joins.run(backend=backend)


def test_reasoning_is_kept_apart() -> None:
    template = ChatTemplate(
        "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
        {},
    )
    backend = ScriptedBackend(lambda text, settings: "<think>hm</think>Yes.", template=template)

    @pl.function
    def program(s: Any) -> None:
        s += pl.user("Is it?")
        s += pl.assistant(pl.separate_reasoning("Well: " + pl.gen("a", n=2) + pl.gen("b")))
        s += pl.assistant(pl.separate_reasoning(pl.gen("c"), model_type="deepseek_r1"))

    for state in (program.run(backend=backend), program.compile(backend=backend).run()):
        assert state["a"] == ["Yes.", "Yes."]
        assert state["a_reasoning_content"] == ["hm", "hm"]
        assert (state["b"], state["b_reasoning_content"]) == ("Yes.", "hm")
        assert state["c_reasoning_content"] == "hm"
        assert state.messages()[1]["content"] == "Well: Yes.Yes."


def test_reasoning_without_known_tags_is_refused() -> None:
    @pl.function
    def program(s: Any, family: str | None) -> None:
        s += pl.separate_reasoning(pl.gen("a"), family)

    for family, message in (
        (None, "name a model_type"),
        ("other", "no reasoning tags for 'other'"),
    ):
        error = program.run(family, backend=ScriptedBackend()).error()
        assert error is not None
        assert message in str(error)
    assert pl.separate_reasoning().items == ()  # type: ignore[attr-defined]


def test_a_compiled_program_passes_arguments_to_settings_and_choices() -> None:
    @pl.function
    def program(s: Any, ends: list[str], options: list[str], shots: dict[str, list[str]]) -> None:
        s += shots["few"][1] + pl.gen("a", stop=ends) + pl.select("b", options)

    backend = ScriptedBackend(lambda text, settings: "one.two")
    arguments = {"ends": ["."], "options": ["x", "y"], "shots": {"few": ["no", "yes"]}}
    compiled = program.compile(backend=backend).run(**arguments)
    assert compiled.text() == program.run(backend=backend, **arguments).text()
    assert compiled["a"] == "one"

    @pl.function
    def refused(s: Any) -> None:
        s += pl.gen("a")
        s += pl.gen("b", stop=s["a"])

    with pytest.raises(pl.TracingError, match="variable 'a' is used by the settings of gen"):
        refused.compile()


def test_choices_that_are_not_texts_are_refused() -> None:
    with pytest.raises(UsageError, match="choice 2 is not a text"):
        pl.select("a", ["one", 2])  # type: ignore[list-item]
