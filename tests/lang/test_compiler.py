"""Compiled programs do what the interpreter does, with fewer and earlier operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from scripted_backend import ScriptedBackend

import pd.lang as pl
from pd.core.errors import UsageError
from pd.lang.compiler import find_prefix
from pd.lang.transcript import Transcript, make_plain_template

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.lang.ir import GenSettings


def answer(text: str, settings: GenSettings) -> str:
    return f"<{len(text)}|{settings.max_new_tokens}>"


@pl.function
def judge(s: Any, essay: str) -> Any:
    s += "Judge: " + essay
    s += pl.gen("unread") + pl.gen("verdict", 7)
    s += pl.gen("dead")
    return s["verdict"]


@pl.function
def everything(s: Any, first: str, second: str = "default", limit: int = 5) -> Any:
    s += pl.system("Help " + first)
    with s.user():
        s += second
    s += pl.assistant(pl.gen("a", limit))
    s += "Once more: " + s["a"] + pl.select("choice", ["x", "y"])
    with s.var_scope("scope"):
        s += pl.gen("a")
        s += pl.gen("a")
    forks = s.fork(3)
    forks += lambda i: f"Branch {i} of " + s["a"] + pl.gen("b") + pl.gen("never read here")
    forks[1] += "more" + pl.gen("only here")
    grand = forks[0].fork(2)
    grand += pl.gen("g")
    grand.join()
    forks.join()
    for value in s["b"]:
        s += "[" + value + "]"
    s["made"] = {"a": s["a"], "fixed": 3}
    verdict = judge(essay=s["choice"] + s["a"])
    s += "Verdict: " + verdict.ret_value
    return [s["only here"], verdict.ret_value, 7]


def look(state: Any, names: list[str]) -> Any:
    assert state.error() is None
    values = {name: state[name] for name in names}
    return state.text(), state.messages(), values, state.ret_value


NAMES = ["a", "choice", "scope", "b", "g", "only here", "made"]


@pytest.mark.parametrize(
    "arguments", [{"first": "me"}, {"first": "", "second": "again", "limit": 3}]
)
def test_compiled_programs_equal_interpreted_ones(arguments: dict[str, Any]) -> None:
    interpreted, compiled = ScriptedBackend(answer), ScriptedBackend(answer)
    expected = look(everything.run(backend=interpreted, **arguments), NAMES)
    program = everything.compile(backend=compiled)
    assert look(program.run(**arguments), NAMES) == expected
    # Dead operations are not performed.
    asked = set(interpreted.list_texts("gen")) - set(compiled.list_texts("gen"))
    assert len(asked) == 1
    assert len(interpreted.log) == len(compiled.log) + 1


def test_batches_equal_single_runs_and_keep_their_order() -> None:
    backend = ScriptedBackend(answer)
    batch = [{"first": str(i) * i} for i in range(5)]
    program = everything.compile(backend=backend)
    single = [look(everything.run(backend=backend, **each), NAMES) for each in batch]
    for states in (
        program.run_batch(batch),
        everything.run_batch(batch, backend=backend),
        program.run_batch([[each["first"]] for each in batch], generator_style=True),
    ):
        assert [look(state, NAMES) for state in states] == single


def test_an_error_of_a_compiled_program_names_function_and_variable() -> None:
    def fail(text: str, settings: GenSettings) -> str:
        if text.startswith("Judge"):
            raise ValueError("ill")
        return "fine"

    program = everything.compile(backend=ScriptedBackend(fail))
    states = [program.run("x"), *program.run_batch([["x"]])]
    for state in states:
        error = state.error()
        assert error is not None
        assert (error.function, error.variable) == ("judge", "unread")


def test_constants_are_folded_and_dead_branches_dropped() -> None:
    @pl.function
    def program(s: Any, word: str) -> None:
        s += "a"
        s += "b" + "" + pl.gen("x")
        s += ""
        forks = s.fork(2)
        forks += lambda i: str(i)
        forks += pl.gen("unread")
        s += "c"
        s += word

    compiled = program.compile(backend=ScriptedBackend())
    kinds = [node.describe() for node in compiled.nodes]
    assert kinds == ["constant 'ab'", "gen 'x'", "constant 'c'", "argument 'word'"]


def test_a_graph_is_shown_as_text_and_for_graphviz(capsys: pytest.CaptureFixture[str]) -> None:
    @pl.function
    def program(s: Any, word: str) -> None:
        s += 'say "' + word + pl.gen("x")
        forks = s.fork(2)
        forks += pl.gen("y")
        forks.join()
        s += s["y"][1]

    graph = pl.trace(program)
    graph.show()
    assert capsys.readouterr().out.splitlines() == [
        "stream  0: %0 = constant 'say \"'",
        "stream  0: %1 = argument 'word'",
        "stream  0: %2 = gen 'x'",
        "stream  0: %3 = fork into stream 1, stream 2",
        "stream  1: %4 = gen 'y'",
        "stream  2: %5 = gen 'y'",
        "stream  0: %6 = join y",
        "stream  0: %7 = variable 'y'",
    ]
    graph.show("dot")
    dot = capsys.readouterr().out
    assert dot.startswith("digraph program {")
    assert r'n0 [label="constant ' in dot
    for edge in ("n3 -> n4;", "n3 -> n5;", "n5 -> n6 [style=dashed];", "n5 -> n7 [style=dashed];"):
        assert edge in dot


REFUSED: dict[str, Callable[[Any, Any], object]] = {
    "argument 'x'.*__bool__": lambda s, x: "a" if x else "b",
    "argument 'x'.*__eq__": lambda s, x: "a" if x == "a" else "b",
    "argument 'x'.*__len__": lambda s, x: len(x),
    "argument 'x'.*__iter__": lambda s, x: list(x),
    "argument 'x'.*__format__": lambda s, x: f"{x}",
    "argument 'x'.*__str__": lambda s, x: str(x),
    "argument 'x'.*__int__": lambda s, x: int(x),
    "argument 'x'.*.upper": lambda s, x: x.upper(),
    r"argument 'x'\['k'\].*__bool__": lambda s, x: bool(x["k"]),
    "variable 'v'.*__eq__": lambda s, x: s["v"] == "a",
    "variable 'v'.*__hash__": lambda s, x: {"a": 1}[s["v"]],
    "variable 'v'.*__contains__": lambda s, x: "a" in s["v"],
    r"text\(\)": lambda s, x: s.text(),
    r"messages\(\)": lambda s, x: s.messages(),
    r"get_meta_info\('v'\)": lambda s, x: s.get_meta_info("v"),
}


@pytest.mark.parametrize("pattern", REFUSED)
def test_a_body_that_depends_on_values_is_refused_by_name(pattern: str) -> None:
    @pl.function
    def program(s: Any, x: Any) -> None:
        s += "text" + pl.gen("v")
        REFUSED[pattern](s, x)

    with pytest.raises(pl.TracingError, match=pattern) as caught:
        program.compile(backend=ScriptedBackend())
    assert caught.value.function == "program"


def test_a_bound_argument_may_decide() -> None:
    @pl.function
    def program(s: Any, many: int, word: str) -> None:
        for _ in range(many):
            s += word + pl.gen("x")

    with pytest.raises(pl.TracingError, match="argument 'many'"):
        program.compile()
    backend = ScriptedBackend(answer)
    state = program.bind(many=2).compile(backend=backend).run(word="w")
    assert state.text() == program.run(2, "w", backend=backend).text()
    with pytest.raises(UsageError, match="missing a required argument: 'word'"):
        program.bind(many=2).compile(backend=backend).run()


def test_the_prefix_of_a_batch_ends_where_its_arguments_differ() -> None:
    @pl.function
    def program(s: Any, shots: str, question: str) -> None:
        s += pl.system("Answer.")
        s += pl.user_begin() + shots + "Q: " + question
        s += "?" + pl.user_end() + pl.assistant(pl.gen("a"))

    def find(*batch: tuple[str, str]) -> str:
        arguments = [program.body.name_arguments(each) for each in batch]
        return find_prefix(pl.trace(program), arguments, Transcript(make_plain_template())).text

    begin = "system: Answer.\nuser: "
    assert find(("one two ", "what"), ("one three ", "what")) == begin + "one t"
    assert find(("shots ", "what"), ("shots ", "who")) == begin + "shots Q: wh"
    assert find(("shots ", "what")) == begin + "shots Q: what?\nassistant: "


def test_a_batch_sends_its_prefix_first_even_if_the_body_looks_at_values() -> None:
    shared = "A prefix that is long enough that it is worth a request of its own: "

    @pl.function
    def program(s: Any, word: str) -> None:
        s += shared + word
        if word == "never":
            return
        s += pl.gen("a")

    backend = ScriptedBackend()
    program.run_batch([["one"], ["two"]], backend=backend)
    assert backend.log[0] == ("cache", shared)
    backend.log.clear()
    program.cache(backend)
    assert backend.log == [("cache", shared)]
    pl.global_config.enable_precache_with_tracing = False
    try:
        program.run_batch([["one"], ["two"]], backend=backend)
    finally:
        pl.global_config.enable_precache_with_tracing = True
    assert len(backend.list_texts("cache")) == 1


def test_an_argument_may_be_appended_to_all_forks_and_shape_a_generation() -> None:
    @pl.function
    def program(s: Any, word: str, pattern: str, limit: int) -> Any:
        forks = s.fork(2)
        forks += word
        forks += pl.gen("a", limit, regex=pattern)
        return [fork["a"] for fork in forks]

    seen = []

    def note(text: str, settings: GenSettings) -> str:
        seen.append((settings.regex, settings.max_new_tokens))
        return text

    state = program.compile().run("word", "[a-z]+", 9, backend=ScriptedBackend(note))
    assert state.ret_value == ["word", "word"]
    assert seen == [("[a-z]+", 9)] * 2


def test_an_argument_may_shape_a_generation_with_reasoning() -> None:
    @pl.function
    def program(s: Any, limit: int) -> None:
        s += pl.separate_reasoning(pl.gen("a", limit), "qwen3")

    seen = []

    def note(text: str, settings: GenSettings) -> str:
        seen.append(settings.max_new_tokens)
        return "<think>so</think>yes"

    state = program.compile().run(9, backend=ScriptedBackend(note))
    assert (state.error(), state["a"], seen) == (None, "yes", [9])
