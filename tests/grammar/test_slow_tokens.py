"""Grammars for which adding a token to the output takes longer and longer are ended or refused."""

from __future__ import annotations

import json
import time
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xgrammar

from pd.core.errors import InvalidRequestError
from pd.core.grammar import Grammar
from pd.core.sampling_params import SamplingParams
from pd.embedded import EMBEDDED_MODEL
from pd.engine.sampling_state import SamplingState
from pd.engine.token_rules import most_seconds
from pd.grammar.child import Vocabulary
from pd.grammar.compiler import CompileLimits, GrammarCompiler
from pd.grammar.probe import _beginnings, long_tokens, slow_output
from pd.grammar.rules import GrammarRules
from pd.grammar.xgrammar_library import Compiler, matcher, tokenizer_info
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
    """A grammar of a few lines whose output may be read in ever more ways."""
    several = " | ".join(" ".join(["root"] * count) for count in range(2, most + 1))
    return f'root ::= {several} | "a" | ""'


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(tokenizer_info(Vocabulary(str(EMBEDDED_MODEL / "tokenizer.json"), 2048, [2])))


@pytest.fixture(scope="module")
def letter(compiler: Compiler) -> int:
    found: int = compiler.info.decoded_vocab.index(b"a")
    return found


def params_of(text: str) -> SamplingParams:
    return SamplingParams(max_tokens=TOKENS, min_tokens=TOKENS, grammar=Grammar("ebnf", text))


def rules_of(compiled: Compiled) -> Any:
    return partial(GrammarRules, compiled, None, None)


@pytest.mark.parametrize("most", [5, 40])
def test_a_request_ends_when_its_tokens_take_too_long(
    compiler: Compiler, letter: int, most: int
) -> None:
    text = ambiguous(most)
    make = rules_of(compiler.compile("ebnf", text))
    prompt = np.zeros(1, np.int32)
    state = SamplingState(params_of(text), prompt, (EOS,), VOCAB_SIZE, make_rules=make)
    began = time.thread_time()
    with pytest.raises(InvalidRequestError, match=r"^ebnf: adding \d+ tokens .* took") as caught:
        for _ in range(TOKENS):
            assert state.observe(letter) is None
    assert caught.value.param == "ebnf"
    assert time.thread_time() - began < 4 * most_seconds(100)


def test_so_does_one_whose_output_is_replayed(compiler: Compiler, letter: int) -> None:
    text = ambiguous(5)
    request: Any = SimpleNamespace(
        num_produced=TOKENS - 1,
        params=params_of(text),
        client_prompt=np.zeros(1, np.int32),
        prompt=np.full(TOKENS, letter, np.int32),
        make_rules=rules_of(compiler.compile("ebnf", text)),
        resumed=None,
    )
    began = time.thread_time()
    with pytest.raises(InvalidRequestError, match=r"^ebnf: adding \d+ tokens .* took"):
        restore_sampling(request, (EOS,), VOCAB_SIZE)
    assert request.resumed is None
    assert time.thread_time() - began < 4 * most_seconds(100)


def test_an_ordinary_output_of_any_length_is_far_below_the_limit(
    compiler: Compiler, letter: int
) -> None:
    text = 'root ::= ("a" | "b" | [c-z] root)*'
    make = rules_of(compiler.compile("ebnf", text))
    prompt = np.zeros(1, np.int32)
    state = SamplingState(params_of(text), prompt, (EOS,), VOCAB_SIZE, make_rules=make)
    for _ in range(TOKENS - 1):
        assert state.observe(letter) is None
    assert state.advance_seconds < most_seconds(TOKENS) / 4


class TestProbe:
    @pytest.mark.parametrize(
        "text",
        [
            ambiguous(20),
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
                made.compile(Grammar("ebnf", text))
            assert made.compile(Grammar("ebnf", 'root ::= "a" root | "b"')).error == ""
        finally:
            made.close()

    @pytest.mark.parametrize(
        "text", [SPACES[0], *(pytest.param(text, marks=pytest.mark.full) for text in SPACES[1:])]
    )
    def test_so_are_those_of_which_one_long_token_takes_too_long(self, text: str) -> None:
        info = xgrammar.TokenizerInfo(WITH_SPACES, stop_token_ids=[len(WITH_SPACES) - 1])
        tokens = long_tokens(info.decoded_vocab)
        found = slow_output(Compiler(info).compile("ebnf", text), tokens)
        assert found is not None and found.startswith(f"adding a token of {len(tokens[-1])} bytes")

    def test_the_longest_tokens_are_tried_the_shortest_of_them_first(self) -> None:
        tokens = (
            [b"ab" * n for n in range(1, 9)] + [b" " * n for n in range(1, 200)] + [b" x" * 150]
        )
        assert long_tokens(tokens) == [b"ab" * 8, b" " * 199, b" x" * 150]
        many = [bytes((first,)) * (9 + first) for first in range(256)]
        assert len(long_tokens(many)) <= 32

    def test_an_output_is_as_it_was_behind_each_beginning(self, compiler: Compiler) -> None:
        text = 'root ::= "1" "1" | "2" "2" | "A" "A" | "B" "B" | [a-z] "z"'
        state = matcher(compiler.compile("ebnf", text).free)
        kinds = [
            [each for each in "12ABz" if state.accept_string(each) and not state.rollback(1)]
            for _ in _beginnings(state)
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
        compiled = compiler.compile(kind, text)
        began = time.thread_time()
        assert (
            slow_output(compiled, [" ".join(["word"] * n).encode() for n in range(2, 34)]) is None
        )
        took = time.thread_time() - began
        print(f"{1e3 * took:.1f} ms")
        assert took < 0.2  # many times as much as on an idle processor
