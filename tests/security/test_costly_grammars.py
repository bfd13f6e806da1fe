"""Grammars of a few lines whose masks, or whose tokens, take a node seconds."""

from __future__ import annotations

import queue
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pd.core.errors import CostlyGrammarError, InvalidRequestError, UnavailableError
from pd.core.grammar import Grammar
from pd.core.sampling_params import SamplingParams
from pd.embedded import EMBEDDED_MODEL
from pd.engine import rule_budget, token_rules
from pd.engine.token_rules import MASK_SECONDS
from pd.grammar import owner_shares
from pd.grammar.compile_jobs import Vocabulary
from pd.grammar.compiler import CompileLimits, GrammarCompiler
from pd.grammar.grammars import Grammars, MakeRules
from pd.grammar.owner_shares import OwnerShares

sys.path.insert(0, str(Path(__file__).parents[1] / "grammar"))

from grammar_model import EOS as EOS_OF_MODEL
from grammar_model import make_model
from grammar_nodes import JSON, PROMPTS, ask, cluster_of, share_grammars

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCAB_SIZE, EOS = 2048, 2
LIMITS = CompileLimits(cpu_seconds=30.0, memory_bytes=1 << 30, max_bytes=64 << 20)
CHOICES = 64


def optional(letters: int) -> str:
    """With 45 letters each mask takes a hundredth of a second or more, with 120 a tenth."""
    return f"root ::= ({'[a-z]? ' * letters})*"


def ambiguous(letter: str, most: int = 40, constant: str = "x" * 100) -> Grammar:
    """Output behind a constant that may be read in ever more ways."""
    several = " | ".join(" ".join(["b"] * count) for count in range(2, most + 1))
    return Grammar("ebnf", f'root ::= "{constant}" b\nb ::= {several} | "{letter}"')


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    vocabulary = Vocabulary(str(EMBEDDED_MODEL / "tokenizer.json"), VOCAB_SIZE, [EOS])
    made = Grammars(vocabulary, LIMITS, 1 << 26)
    yield made
    made.close()


def compiled(grammars: Grammars, grammar: Grammar, owner: str = "", **options: Any) -> Any:
    found: queue.Queue[Any] = queue.Queue()
    grammars.request_rules(grammar, found.put, owner, **options)
    return found.get(timeout=300)


@pytest.mark.parametrize(
    ("letters", "limit"),
    [
        (12, 0.05),
        pytest.param(45, MASK_SECONDS, marks=pytest.mark.full),
        pytest.param(120, MASK_SECONDS, marks=pytest.mark.full),
    ],
)
def test_masks_that_take_long_are_refused_for_many_choices(
    grammars: Grammars, letters: int, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_rules, "MASK_SECONDS", limit)
    grammar = Grammar("ebnf", optional(letters))
    make = compiled(grammars, grammar)
    assert isinstance(make, MakeRules)
    words = f"s of processor time for each of {CHOICES} choices"
    for choices in (1, CHOICES):
        refusal = make.check_choices(SamplingParams(max_tokens=9, n=choices, grammar=grammar))
        assert (refusal is None) == (choices == 1)
        assert refusal is None or words in str(refusal)
    ordinary = Grammar("json_schema", '{"type": "object"}')
    params = SamplingParams(max_tokens=9, n=CHOICES, grammar=ordinary)
    assert compiled(grammars, ordinary).check_choices(params) is None


def test_an_owner_of_refused_grammars_has_less_for_the_next_whatever_it_is(
    grammars: Grammars,
) -> None:
    for count, letter in enumerate("acd"):
        assert grammars.shares.get_share("attacker") == 0.5**count
        error = compiled(grammars, ambiguous(letter, 40 + count), "attacker")
        assert isinstance(error, CostlyGrammarError)
        assert "adding" in error.message
    assert grammars.shares.get_share("other") == 1.0
    assert isinstance(compiled(grammars, Grammar("regex", "[ab]c*"), "attacker"), MakeRules)
    # What is wrong is no attack.
    assert isinstance(compiled(grammars, Grammar("regex", "("), "other"), InvalidRequestError)
    assert grammars.shares.get_share("other") == 1.0


def test_shares_shrink_to_a_part_and_grow_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shares, now = OwnerShares(), [1000.0]
    monkeypatch.setattr(owner_shares.time, "monotonic", lambda: now[0])
    for _ in range(20):
        shares.halve_share("attacker")
    assert shares.get_share("attacker") == 1 / 32
    now[0] += 125.0
    assert shares.get_share("attacker") == 1 / 8
    now[0] += 600.0
    assert shares.get_share("attacker") == 1.0


def test_what_one_owner_may_not_compile_another_may(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal by less than the limit is nobody else's."""
    shares: list[float] = []
    compile_grammar = GrammarCompiler.compile_grammar

    def compile_less(self: GrammarCompiler, grammar: Grammar, share: float, **options: Any) -> Any:
        shares.append(share)
        if share < 1.0:
            raise CostlyGrammarError("it takes too long")
        return compile_grammar(self, grammar, share, **options)

    monkeypatch.setattr(GrammarCompiler, "compile_grammar", compile_less)
    grammars.shares.halve_share("poor")
    for text in ("[ab]d*", "[ab]e*"):
        assert isinstance(compiled(grammars, Grammar("regex", text), "poor"), CostlyGrammarError)
        assert isinstance(compiled(grammars, Grammar("regex", text), "rich"), MakeRules)
    assert shares == [0.5, 1.0, 0.25, 1.0]


def test_a_grammar_is_compiled_once_for_an_owner_whatever_was_refused_before(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that was refused halves the limits, and what is refused by less is remembered, too."""

    def compile_nothing(*_: Any, **__: Any) -> Any:
        raise CostlyGrammarError("it takes too much memory")

    monkeypatch.setattr(GrammarCompiler, "compile_grammar", compile_nothing)
    before = grammars.num_compiled
    for count, text in enumerate(("[ab]g*", "[ab]h*", "[ab]i*"), start=1):
        for _ in range(3):
            error = compiled(grammars, Grammar("regex", text), "again")
            assert isinstance(error, CostlyGrammarError)
        assert grammars.num_compiled == before + count
    assert grammars.shares.get_share("again") == 1 / 8


def test_a_stream_that_passed_elsewhere_is_not_refused_for_what_its_grammar_takes_here(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With four times the limit, and without a look at its outputs; and if that does not do, the
    request may go on at another node."""
    hidden = ambiguous("e")
    assert isinstance(compiled(grammars, hidden, "begun"), CostlyGrammarError)
    make = compiled(grammars, hidden, "begun", is_resumed=True)
    assert isinstance(make, MakeRules)
    assert isinstance(compiled(grammars, hidden, "begun"), CostlyGrammarError)

    def compile_nothing(*_: Any, **__: Any) -> Any:
        raise CostlyGrammarError("it takes too long")

    monkeypatch.setattr(GrammarCompiler, "compile_grammar", compile_nothing)
    error = compiled(grammars, ambiguous("f"), "begun", is_resumed=True)
    assert isinstance(error, UnavailableError)


@pytest.mark.parametrize("kind", ["unified", pytest.param("split", marks=pytest.mark.full)])
@pytest.mark.timeout(300)
def test_hostile_choices_end_and_others_go_on(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nothing looked at the grammar before: a plain stream and one of another key are what
    they are without it."""
    compile_grammar = GrammarCompiler.compile_grammar

    def compile_untried(self: GrammarCompiler, grammar: Grammar, share: float, **_: Any) -> Any:
        return compile_grammar(self, grammar, share, is_tried=False)

    monkeypatch.setattr(GrammarCompiler, "compile_grammar", compile_untried)
    monkeypatch.setattr(rule_budget, "BASE_SECONDS", 0.3)
    model = make_model(tmp_path)
    with share_grammars(model) as made, cluster_of(model, kind) as cluster:
        known = ask(cluster, PROMPTS[0], grammar=JSON).tokens()
        hostile = [
            ask(
                cluster,
                PROMPTS[1],
                grammar=ambiguous(letter, constant="x" * 20),
                n=4,
                temperature=1.0,
                max_tokens=900,
                logit_bias={EOS_OF_MODEL: -100.0},
                owner="attacker",
            )
            for letter in "ab"
        ]
        stream = ask(cluster, PROMPTS[2], max_tokens=300, ignore_eos=True)
        good = ask(cluster, PROMPTS[0], grammar=JSON, owner="good")
        assert good.tokens() == known
        assert len(stream.tokens()) == 300
        for pending in hostile:
            with pytest.raises(InvalidRequestError, match="tokens of the output took") as caught:
                pending.result(200)
            assert caught.value.param == "ebnf"
        assert made.shares.get_share("attacker") == 0.25
        assert made.shares.get_share("good") == 1.0
        # Of the two, that one is refused for everybody which had all of the limit.
        refused = [made._refused[ambiguous(letter, constant="x" * 20)].share for letter in "ab"]
        assert sorted(refused) == [0.5, 1.0]
        assert ask(cluster, PROMPTS[0], grammar=JSON, owner="attacker").tokens() == known
        cluster.wait_idle(30.0)
