"""Compiling grammars: what is wrong is said, what takes too much is ended, and what is known is not
compiled again."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

import pytest

from pd.core.errors import InvalidRequestError, PDError, UnavailableError
from pd.core.grammar import Grammar
from pd.embedded import EMBEDDED_MODEL
from pd.grammar.child import Vocabulary
from pd.grammar.compiler import CompileLimits, GrammarCompiler
from pd.grammar.grammars import Grammars

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd.grammar.grammars import MakeRules

VOCABULARY = Vocabulary(str(EMBEDDED_MODEL / "tokenizer.json"), 2048, [2])
LIMITS = CompileLimits(cpu_seconds=2.0, memory_bytes=256 << 20, max_bytes=1 << 20)
SMALL = Grammar("regex", "[a-c]{3}")


def nested(depth: int) -> Grammar:
    """Objects inside one another."""
    schema = '{"type": "string"}'
    for _ in range(depth):
        schema = f'{{"type": "object", "properties": {{"a": {schema}}}, "required": ["a"]}}'
    return Grammar("json_schema", schema)


LONG = nested(300)
WRONG = [
    (Grammar("regex", "("), "parenthesis"),
    (Grammar("ebnf", 'root ::= "a'), "string literal"),
    (Grammar("json_schema", '{"type": "strin"}'), "strin"),
    (Grammar("json_schema", "{"), "JSON"),
    (Grammar("structural_tag", "{}"), "structural_tag"),
]


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(VOCABULARY, LIMITS, 1 << 20)
    yield made
    made.close()


def wanted(grammars: Grammars, grammar: Grammar) -> MakeRules | PDError:
    found: queue.Queue[MakeRules | PDError] = queue.Queue()
    grammars.want(grammar, found.put)
    return found.get(timeout=120)


def test_a_grammar_is_compiled_once(grammars: Grammars) -> None:
    make = wanted(grammars, SMALL)
    assert not isinstance(make, PDError)
    rules = make([2])
    assert not rules.ended
    at_once: list[MakeRules | PDError] = []
    grammars.want(SMALL, at_once.append)
    assert len(at_once) == 1


@pytest.mark.parametrize(("grammar", "words"), WRONG)
def test_what_is_wrong_is_said(grammars: Grammars, grammar: Grammar, words: str) -> None:
    error = wanted(grammars, grammar)
    assert isinstance(error, InvalidRequestError)
    assert words in str(error)
    assert ".cc" not in str(error)
    assert "\n" not in str(error)
    assert error.param == grammar.kind


def test_what_takes_too_long_is_ended_and_others_are_not(grammars: Grammars) -> None:
    found: queue.Queue[MakeRules | PDError] = queue.Queue()
    grammars.want(LONG, found.put)
    assert not isinstance(wanted(grammars, Grammar("regex", "[d-f]{2}")), PDError)
    error = found.get(timeout=120)
    assert isinstance(error, InvalidRequestError)
    assert "--grammar-" in str(error)
    # Both children serve again.
    for number in range(3):
        assert not isinstance(wanted(grammars, Grammar("regex", f"x{{{number + 1}}}")), PDError)


def test_a_child_that_was_killed_is_no_fault_of_the_grammar() -> None:
    compiler = GrammarCompiler(VOCABULARY, LIMITS._replace(cpu_seconds=60.0))
    try:
        compiler.compile(SMALL)
        child = compiler._child
        assert child is not None
        threading.Timer(0.3, child.kill).start()
        with pytest.raises(UnavailableError, match="was killed"):
            compiler.compile(LONG)
        assert compiler.compile(SMALL)
    finally:
        compiler.close()


def test_what_takes_too_much_memory_is_ended_and_what_is_too_large_refused() -> None:
    large = Grammar("regex", "(a{1,900}b{1,900}){1,900}")
    compiler = GrammarCompiler(VOCABULARY, LIMITS)
    try:
        with pytest.raises(InvalidRequestError, match="compiled it has 7 MiB; at most 1"):
            compiler.compile(large)
        compiler._limits = LIMITS._replace(memory_bytes=4 << 20)
        with pytest.raises(InvalidRequestError, match="more than 4 MiB"):
            compiler.compile(large)
        assert compiler.compile(SMALL)
    finally:
        compiler.close()


def test_memory_of_what_nobody_uses_is_bounded(grammars: Grammars) -> None:
    for number in range(40):
        schema = f'{{"type": "string", "maxLength": {number + 1}}}'
        assert not isinstance(wanted(grammars, Grammar("json_schema", schema)), PDError)
        assert grammars._bytes <= 1 << 20
    assert grammars._bytes == sum(size for _, size in grammars._compiled.values())


def test_without_a_tokenizer_grammars_are_refused() -> None:
    error = wanted(Grammars(None, LIMITS, 0), SMALL)
    assert isinstance(error, InvalidRequestError)
    assert "tokenizer.json" in str(error)


def test_closing_answers_whoever_waits() -> None:
    made = Grammars(VOCABULARY, LIMITS._replace(cpu_seconds=60.0), 1 << 20)
    found: queue.Queue[MakeRules | PDError] = queue.Queue()
    made.want(LONG, found.put)
    threading.Timer(0.2, made.close).start()
    assert isinstance(found.get(timeout=60), UnavailableError)
    assert isinstance(wanted(made, SMALL), UnavailableError)
