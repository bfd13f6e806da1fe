"""We end or refuse grammars whose time to add a token keeps growing."""

from __future__ import annotations

import json
import time
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xgrammar

from pd.core.errors import CostlyGrammarError, InvalidRequestError, UnavailableError
from pd.core.grammar import Grammar
from pd.core.sampling_params import SamplingParams
from pd.embedded import EMBEDDED_MODEL
from pd.engine import rule_budget
from pd.engine.rule_budget import BASE_SECONDS, SECONDS_PER_TOKEN, RuleBudget
from pd.engine.sampling_state import SamplingState
from pd.grammar.compile_jobs import Vocabulary
from pd.grammar.compiler import CompileLimits, GrammarCompiler
from pd.grammar.probe import (
    _visit_beginnings,
    choose_long_tokens,
    find_slow_output,
    find_slow_rule,
    time_masks,
)
from pd.grammar.rules import GrammarRules
from pd.grammar.xgrammar_library import Compiler, make_matcher, read_tokenizer
from pd.scheduling.resumed import restore_sampling

if TYPE_CHECKING:
    from pd.grammar.xgrammar_library import Compiled

VOCAB_SIZE, EOS, TOKENS = 2048, 2, 4000
NAMES = [f"property{number}" for number in range(20)]
TWENTY = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in NAMES},
    "required": NAMES,
}


# The tokens of a vocabulary.
WITH_SPACES = [*map(chr, range(0x20, 0x7F)), *(" " * 2**n for n in range(1, 8)), "</s>"]
# Grammars of which a token of many spaces can be read in ever more ways.
DEEP = 'deep ::= deep deep | deep deep deep | " " | ""'
SPACES = [
    f'root ::= "!" | "B" deep\n{DEEP}',
    f'root ::= "A" | "B" deep\n{DEEP}',
    f'root ::= "A" [!-~]* | "B" [!-~]* | "Z" deep\n{DEEP}',
]


def ambiguous(most: int) -> str:
    """Make a short grammar with more and more ways to parse its output."""
    several = " | ".join(" ".join(["root"] * count) for count in range(2, most + 1))
    return f'root ::= {several} | "a" | ""'


AMBIGUOUS = " | ".join(" ".join(["b"] * count) for count in range(2, 41)) + ' | "a"'
BEHIND_A_CONSTANT = f'root ::= "{"x" * 100}" b\nb ::= {AMBIGUOUS}'
BEHIND_A_BRANCH = (
    "root ::= "
    + " | ".join(f'"key {number}" rest{number}' for number in range(60))
    + "".join(f'\nrest{number} ::= [a-z]* "{number}"' for number in range(59))
    + f'\nrest59 ::= [a-z] " (=(" b\nb ::= {AMBIGUOUS}'
)


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(read_tokenizer(Vocabulary(str(EMBEDDED_MODEL / "tokenizer.json"), 2048, [2])))


@pytest.fixture(scope="module")
def letter(compiler: Compiler) -> int:
    found: int = compiler.info.decoded_vocab.index(b"a")
    return found


def params_of(text: str) -> SamplingParams:
    return SamplingParams(max_tokens=TOKENS, min_tokens=TOKENS, grammar=Grammar("ebnf", text))


def rules_of(compiled: Compiled) -> Any:
    return partial(GrammarRules, compiled, None, None)


def state_of(compiler: Compiler, text: str) -> SamplingState:
    make = rules_of(compiler.compile_text("ebnf", text))
    prompt = np.zeros(1, np.int32)
    return SamplingState(params_of(text), prompt, (EOS,), VOCAB_SIZE, make_rules=make)


@pytest.mark.parametrize("most", [pytest.param(5, marks=pytest.mark.full), 40])
def test_a_request_ends_when_its_tokens_take_too_long(
    compiler: Compiler, letter: int, most: int
) -> None:
    state = state_of(compiler, ambiguous(most))
    began = time.thread_time()
    with pytest.raises(CostlyGrammarError, match=r"^ebnf: masks and \d+ tokens .* took") as caught:
        for _ in range(TOKENS):
            assert state.observe_token(letter) is None
            state.follow_rules()
    assert caught.value.param == "ebnf"
    assert time.thread_time() - began < 4 * (BASE_SECONDS + 100 * SECONDS_PER_TOKEN)


def test_all_choices_of_a_request_have_one_budget(compiler: Compiler, letter: int) -> None:
    first = state_of(compiler, ambiguous(20))
    states = [first, *(first.fork_state(index) for index in range(1, 16))]
    began = time.thread_time()
    with pytest.raises(CostlyGrammarError):
        for _ in range(TOKENS):
            for state in states:
                assert state.observe_token(letter) is None
                state.follow_rules()
    assert time.thread_time() - began < 4 * (BASE_SECONDS + 1000 * SECONDS_PER_TOKEN)


def replayed(compiler: Compiler, letter: int, text: str, count: int) -> Any:
    make = rules_of(compiler.compile_text("ebnf", text))

    def make_resumed(ending: Any) -> GrammarRules:
        rules: GrammarRules = make(ending)
        rules.budget = RuleBudget(is_resumed=True)
        return rules

    return SimpleNamespace(
        num_produced=count,
        params=params_of(text),
        client_prompt=np.zeros(1, np.int32),
        prompt=np.full(count + 1, letter, np.int32),
        make_rules=make_resumed,
        resumed_state=None,
    )


def test_a_replayed_output_does_not_count_against_the_request(
    compiler: Compiler, letter: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passed on a faster node. But it must not occupy this one for ever."""
    text = ambiguous(5)
    monkeypatch.setattr(rule_budget, "BASE_SECONDS", 0.01)
    request = replayed(compiler, letter, text, 60)
    restore_sampling(request, (EOS,), VOCAB_SIZE)
    budget = request.resumed_state.rules.budget
    assert budget.seconds > rule_budget.BASE_SECONDS
    monkeypatch.setattr(rule_budget, "SECONDS_PER_TOKEN", 1e-4)
    request = replayed(compiler, letter, text, TOKENS - 1)
    began = time.thread_time()
    with pytest.raises(UnavailableError, match=r"^ebnf: masks and \d+ tokens .* took"):
        restore_sampling(request, (EOS,), VOCAB_SIZE)
    assert request.resumed_state is None
    assert time.thread_time() - began < 20.0


def test_an_ordinary_output_of_any_length_is_far_below_the_limit(
    compiler: Compiler, letter: int
) -> None:
    state = state_of(compiler, 'root ::= ("a" | "b" | [c-z] root)*')
    for _ in range(TOKENS - 1):
        assert state.observe_token(letter) is None
        state.follow_rules()
    assert state.rules is not None
    assert state.rules.budget.seconds < state.rules.budget.max_seconds / 4


class TestProbe:
    @pytest.mark.parametrize(
        "text",
        [
            pytest.param(ambiguous(20), marks=pytest.mark.full),
            pytest.param(ambiguous(100), marks=pytest.mark.full),
            f'root ::= "b: " deep | "c"\n{ambiguous(40).replace("root", "deep")}',
        ],
    )
    def test_such_grammars_are_refused_before_a_node_knows_them(self, text: str) -> None:
        limits = CompileLimits(cpu_seconds=10.0, memory_bytes=256 << 20, max_bytes=1 << 20)
        vocabulary = Vocabulary(str(EMBEDDED_MODEL / "tokenizer.json"), VOCAB_SIZE, [EOS])
        made = GrammarCompiler(vocabulary, limits)
        try:
            with pytest.raises(InvalidRequestError, match=r"^ebnf: adding \d+ characters"):
                made.compile_grammar(Grammar("ebnf", text))
            assert made.compile_grammar(Grammar("ebnf", 'root ::= "a" root | "b"')).error == ""
        finally:
            made.close()

    @pytest.mark.parametrize(
        "text", [BEHIND_A_CONSTANT, BEHIND_A_BRANCH], ids=["constant", "branch"]
    )
    def test_rules_are_tried_wherever_they_are(self, compiler: Compiler, text: str) -> None:
        compiled = compiler.compile_text("ebnf", text)
        assert find_slow_output(compiled) is None
        found = find_slow_rule(compiled, compiler)
        assert found is not None and found.startswith("adding ")

    @pytest.mark.parametrize(
        "constant", ["", pytest.param("x" * 100, marks=pytest.mark.full), "äöü" * 40]
    )
    def test_masks_are_tried_behind_constants(self, compiler: Compiler, constant: str) -> None:
        text = f'root ::= "{constant}" ({"[a-z]? " * 30})*'
        compiled = compiler.compile_text("ebnf", text)
        assert time_masks(compiled, compiler.info.decoded_vocab) > 1e-3

    @pytest.mark.parametrize(
        "text", [SPACES[0], *(pytest.param(text, marks=pytest.mark.full) for text in SPACES[1:])]
    )
    def test_so_are_those_of_which_one_long_token_takes_too_long(self, text: str) -> None:
        info = xgrammar.TokenizerInfo(WITH_SPACES, stop_token_ids=[len(WITH_SPACES) - 1])
        tokens = choose_long_tokens(info.decoded_vocab)
        found = find_slow_output(Compiler(info).compile_text("ebnf", text), tokens)
        assert found is not None and found.startswith(f"adding a token of {len(tokens[-1])} bytes")

    def test_the_longest_tokens_are_tried_the_shortest_of_them_first(self) -> None:
        tokens = (
            [b"ab" * n for n in range(1, 9)] + [b" " * n for n in range(1, 200)] + [b" x" * 150]
        )
        assert choose_long_tokens(tokens) == [b"ab" * 8, b" " * 199, b" x" * 150]
        many = [bytes((first,)) * (9 + first) for first in range(256)]
        assert len(choose_long_tokens(many)) <= 32

    def test_an_output_is_as_it_was_behind_each_beginning(self, compiler: Compiler) -> None:
        text = 'root ::= "1" "1" | "2" "2" | "A" "A" | "B" "B" | [a-z] "z"'
        state = make_matcher(compiler.compile_text("ebnf", text).free)
        kinds = [
            [each for each in "12ABz" if state.accept_string(each) and not state.rollback(1)]
            for _ in _visit_beginnings(state)
        ]
        assert kinds == [["1", "2", "A", "B", "z"], ["1"], ["2"], ["A"], ["B"], ["z"]]
        assert state.accept_string("AA")

    @pytest.mark.parametrize(
        ("kind", "text"),
        [
            ("json_schema", json.dumps(TWENTY)),
            ("json_schema", '{"type": "object"}'),
            ("json_schema", '{"type": "string", "maxLength": 2000}'),
            ("regex", "[名后]+"),
            ("regex", "(a|aa|aaa|aaaa)*"),
            ("ebnf", "root ::= " + " ".join('("a" | "b")?' for _ in range(200))),
        ],
    )
    def test_ordinary_grammars_take_it_a_few_milliseconds(
        self, compiler: Compiler, kind: str, text: str
    ) -> None:
        compiled = compiler.compile_text(kind, text)
        began = time.thread_time()
        assert (
            find_slow_output(compiled, [" ".join(["word"] * n).encode() for n in range(2, 34)])
            is None
        )
        assert find_slow_rule(compiled, compiler) is None
        took = time.thread_time() - began
        print(f"{1e3 * took:.1f} ms")
        assert took < 0.2  # many times as much as on an idle processor
