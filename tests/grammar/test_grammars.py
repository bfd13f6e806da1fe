"""Compiling grammars: what is wrong is said, what takes too much is ended, and what is known is not
compiled again."""

from __future__ import annotations

import errno
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import pd.grammar
from pd.assembly import make_grammars
from pd.core.config import NodeConfig
from pd.core.errors import InvalidRequestError, PDError, QueueFullError, UnavailableError
from pd.core.grammar import Grammar
from pd.embedded import EMBEDDED_MODEL
from pd.grammar.child import Vocabulary
from pd.grammar.compiler import CompileLimits, GrammarCompiler
from pd.grammar.fair_queue import FairQueue
from pd.grammar.grammars import MAX_WAITING, Grammars
from pd.grammar.rules import GrammarRules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
SLOW = nested(180)
LARGE = Grammar("regex", "(a{1,900}b{1,900}){1,900}")
WRONG = [
    (Grammar("regex", "("), "parenthesis"),
    (Grammar("ebnf", 'root ::= "a'), "string literal"),
    (Grammar("json_schema", '{"type": "strin"}'), "strin"),
    (Grammar("json_schema", "{"), "JSON"),
    (Grammar("json_schema", '{"type": "string", "minLength": 3, "maxLength": 2}'), "minLength 3"),
    (Grammar("structural_tag", "{}"), "structural_tag"),
    (Grammar("json_schema", '{"enum": [], "type": "string"}'), "'enum' is empty"),
    (Grammar("json_schema", '{"properties": {"a": {"type": []}}}'), "'type' is empty"),
    (Grammar("json_schema", '{"allOf": []}'), "'allOf' is empty"),
    # xgrammar keeps 32 bits of a number.
    (Grammar("json_schema", '{"type": "array", "minItems": 4294967297}'), "4294967297"),
    (Grammar("json_schema", '{"type": "object", "minProperties": 4294967296}'), "4294967296"),
    (Grammar("ebnf", "root ::= Token(4294967296)"), "the number '4294967296' is too large"),
    (Grammar("ebnf", 'root ::= "a\\"" # "\n  "b"{2,4294967298}'), "'4294967298' is too large"),
    (Grammar("ebnf", f'root ::= "a"{{{"9" * 5000}}}'), "is too large"),
]


@pytest.fixture(scope="module")
def grammars(one_child: None) -> Iterator[Grammars]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pd.grammar.grammars._CHILDREN", 2)
        made = Grammars(VOCABULARY, LIMITS, 1 << 20)
        wanted(made, SMALL)
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


# The second schema of a tag: refused when it is rewritten, and by xgrammar.
WRONG_SCHEMAS = [({"type": "string", "minLength": "x"}, "minLength"), ({"type": "strin"}, "strin")]


@pytest.mark.parametrize(("schema", "words"), WRONG_SCHEMAS)
def test_which_of_several_schemas_is_wrong_is_said(
    grammars: Grammars, schema: dict[str, Any], words: str
) -> None:
    elements = [{"type": "json_schema", "json_schema": each} for each in ({}, schema, {})]
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    error = wanted(grammars, Grammar("structural_tag", json.dumps(tag)))
    assert isinstance(error, InvalidRequestError)
    assert error.param == "structural_tag.format.elements[1].json_schema"
    assert error.message.startswith(f"{error.param}: ")
    assert words in error.message


def test_which_of_several_grammars_has_too_large_a_number_is_said(grammars: Grammars) -> None:
    elements = [{"type": "grammar", "grammar": f"root ::= Token({n})"} for n in (5, 4294967301)]
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    error = wanted(grammars, Grammar("structural_tag", json.dumps(tag)))
    assert isinstance(error, InvalidRequestError)
    assert error.param == "structural_tag.format.elements[1].grammar"
    assert "'4294967301' is too large" in error.message


def test_a_large_number_in_a_text_is_none(grammars: Grammars) -> None:
    rule = 'root ::= "4294967296" | [^"4294967296] | rule4294967296 # 4294967296\n'
    assert not isinstance(
        wanted(grammars, Grammar("ebnf", rule + 'rule4294967296 ::= "a"')), PDError
    )


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


def test_owners_do_not_wait_behind_one_another() -> None:
    queued: FairQueue[str] = FairQueue()
    for owner, item in [*(("a", f"a{i}") for i in range(4)), ("b", "b0"), ("c", "c0"), ("b", "b1")]:
        queued.put(owner, item)
    assert queued.count("a") == 4
    order = [queued.get() for _ in range(len(queued))]
    assert order == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]
    with pytest.raises(KeyError):
        queued.get()


def test_what_another_asked_for_first_is_compiled_in_ones_own_turn() -> None:
    made = Grammars(VOCABULARY, LIMITS._replace(cpu_seconds=60.0), 1 << 20)
    order: list[str] = []
    is_done = threading.Event()

    def note(name: str) -> Callable[[object], None]:
        def done(_: object) -> None:
            order.append(name)
            is_done.set()

        return done

    try:
        for number in range(40):
            made.want(nested(100 + number), note(f"flood {number}"), "flood")
        made.want(SMALL, note("flood, small"), "flood")
        made.want(SMALL, note("small"), "other")
        assert is_done.wait(120)
        while "small" not in order:
            is_done.clear()
            assert is_done.wait(120)
        assert order.index("small") < 10
        assert made.waiting > 10
        assert made.outcomes.total() >= len(order)
    finally:
        made.close()


def test_many_may_wait_for_the_same_grammar() -> None:
    made = Grammars(VOCABULARY, LIMITS, 1 << 20)
    found: queue.Queue[MakeRules | PDError] = queue.Queue()
    try:
        for number in range(3 * MAX_WAITING):
            made.want(SMALL, found.put, f"owner {number % 2}")
        answers = [found.get(timeout=60) for _ in range(3 * MAX_WAITING)]
        assert not [answer for answer in answers if isinstance(answer, PDError)]
        assert made.waiting == 0
        assert made.num_compiled == 1
    finally:
        made.close()


def test_one_owner_cannot_keep_another_from_the_queue() -> None:
    made = Grammars(VOCABULARY, LIMITS._replace(cpu_seconds=60.0), 1 << 20)
    found: queue.Queue[MakeRules | PDError] = queue.Queue()
    try:
        for number in range(MAX_WAITING + 3):
            made.want(nested(60 + number), found.put, "flood")
        assert isinstance(found.get(timeout=60), QueueFullError)
        assert not isinstance(wanted(made, SMALL), PDError)
        assert made.outcomes["unavailable"] > 0
    finally:
        made.close()


def test_a_child_starts_without_what_it_does_not_need() -> None:
    """The process has stand-ins for torch and transformers, and is replaced while it is idle."""
    compiler = GrammarCompiler(VOCABULARY, LIMITS)
    try:
        compiler.compile(SMALL)
        before = compiler._child
        assert before is not None
        maps = Path(f"/proc/{before.pid}/maps").read_text()
        assert "libtorch" not in maps
        assert "xgrammar" in maps
        before.kill()
        with pytest.raises(UnavailableError):
            compiler.compile(SMALL)
        assert compiler._child not in (None, before)
        assert not compiler.compile(SMALL).error
    finally:
        compiler.close()


def test_a_child_that_was_killed_is_no_fault_of_the_grammar() -> None:
    compiler = GrammarCompiler(VOCABULARY, LIMITS._replace(cpu_seconds=60.0))
    try:
        compiler.compile(SMALL)
        child = compiler._child
        assert child is not None
        threading.Timer(0.3, child.kill).start()
        with pytest.raises(UnavailableError, match="was killed"):
            compiler.compile(LONG)
        assert not compiler.compile(SMALL).error
    finally:
        compiler.close()


@pytest.mark.full
def test_a_child_leaves_signals_to_its_node() -> None:
    """A terminal and a service manager send them to all processes, and the node drains first."""
    compiler = GrammarCompiler(VOCABULARY, CompileLimits(60.0, 1 << 30, 64 << 20))

    def signal_all() -> None:
        child = compiler._child
        assert child is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            child.send_signal(number)

    try:
        compiler.start()
        signal_all()
        compiler.compile(SMALL)
        first = compiler._child
        threading.Timer(0.3, signal_all).start()
        assert compiler.compile(SLOW).cpu_seconds > 0.3
        assert compiler._child is first
    finally:
        compiler.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_ends_a_child_is_no_fault_of_the_grammar(number: signal.Signals) -> None:
    compiler = GrammarCompiler(VOCABULARY, LIMITS)
    # A shell may have had this process ignore the signal, which a child inherits.
    child = subprocess.Popen(
        ["sleep", "600"], preexec_fn=lambda: signal.signal(number, signal.SIG_DFL)
    )
    try:
        child.send_signal(number)
        child.wait(60)
        assert isinstance(compiler._died(child, SMALL), UnavailableError)
    finally:
        compiler.close()


def test_a_system_without_room_for_a_process_or_a_thread_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_process(*args: Any, **options: Any) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def no_thread(self: object) -> None:
        raise RuntimeError("can't start new thread")

    made = Grammars(VOCABULARY, LIMITS, 1 << 20)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            error = wanted(made, SMALL)
        assert isinstance(error, UnavailableError) and "new thread" in error.message
        with monkeypatch.context() as patch:
            patch.setattr("pd.grammar.compiler.subprocess.Popen", no_process)
            error = wanted(made, SMALL)
        assert isinstance(error, UnavailableError) and "try again" in error.message
        assert not isinstance(wanted(made, SMALL), PDError)
    finally:
        made.close()


def test_a_request_that_cannot_take_its_grammar_costs_no_other_one_its_answer() -> None:
    made = Grammars(VOCABULARY, LIMITS, 1 << 20)
    found: queue.Queue[MakeRules | PDError] = queue.Queue()

    def broken(_: object) -> None:
        raise RuntimeError("can't start new thread")

    try:
        # More often than there are threads that compile.
        for number in range(4):
            grammar = Grammar("regex", f"x{{{number + 1}}}")
            made.want(grammar, broken)
            made.want(grammar, found.put)
            assert not isinstance(found.get(timeout=60), PDError)
    finally:
        made.close()


@pytest.mark.parametrize("what", ["a process", "the library"])
def test_what_compiles_grammars_is_prepared_again_where_that_failed(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests have the error as their answer meanwhile."""

    def no_start(self: object) -> None:
        raise RuntimeError("out of memory")

    made = Grammars(VOCABULARY, LIMITS, 1 << 20)
    try:
        with monkeypatch.context() as patch:
            if what == "a process":
                patch.setattr(GrammarCompiler, "start", no_start)
            else:
                patch.delattr(pd.grammar, "xgrammar_library", raising=False)
                patch.setitem(sys.modules, "pd.grammar.xgrammar_library", None)
            for _ in range(3):
                assert isinstance(wanted(made, SMALL), UnavailableError)
        assert not isinstance(wanted(made, SMALL), PDError)
    finally:
        made.close()


@pytest.mark.parametrize(
    ("limits", "grammar", "words"),
    [
        ({"max_bytes": 4 << 10}, LARGE, r"compiled it has \d+ KiB; at most 4"),
        ({"memory_bytes": 4 << 20, "cpu_seconds": 60.0}, LONG, "more than 4 MiB"),
    ],
)
def test_what_takes_too_much_memory_is_refused(
    limits: dict[str, Any], grammar: Grammar, words: str
) -> None:
    compiler = GrammarCompiler(VOCABULARY, LIMITS._replace(**limits))
    try:
        with pytest.raises(InvalidRequestError, match=words):
            compiler.compile(grammar)
        assert not compiler.compile(SMALL).error
    finally:
        compiler.close()


@pytest.mark.full
def test_what_took_a_process_longer_is_handed_over_and_then_learned() -> None:
    made = Grammars(VOCABULARY, LIMITS._replace(max_bytes=16 << 20), 1 << 20)
    slow, mask = nested(120), np.zeros(2048 // 32, np.int32)
    try:
        rules = wanted(made, slow)
        assert not isinstance(rules, PDError)
        rules([2]).fill_mask(mask)
        again = mask.copy()
        GrammarRules(made._own.compile(slow.kind, slow.text), None, None, [2]).fill_mask(again)
        assert (mask == again).all()
        assert mask.any()
    finally:
        made.close()


def test_many_strings_with_lengths_are_handed_over_as_they_are_written() -> None:
    """JSON of what was compiled would take 4 GiB and half a minute."""
    string = {"type": "string", "minLength": 5, "maxLength": 40}
    properties = {f"field_{number}": string for number in range(60)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    grammar = Grammar("json_schema", json.dumps(schema))
    compiler = GrammarCompiler(VOCABULARY, LIMITS._replace(cpu_seconds=5.0, max_bytes=16 << 20))
    made = Grammars(VOCABULARY, LIMITS, 64 << 20)
    try:
        result = compiler.compile(grammar)
        assert len(result.compiled) < 8 << 20
        wanted(made, SMALL)  # so that it has the tokens
        compiled = made._load(result, grammar, compiler.tokens)
        rules = GrammarRules(compiled, made._characters, None, [2])
        mask = np.zeros(2048 // 32, np.int32)
        rules.fill_mask(mask)
        assert mask.any()
    finally:
        made.close()
        compiler.close()


@pytest.mark.full
def test_what_took_long_is_handed_over_each_time() -> None:
    """Though a process that remembered its parts would compile it quickly again, nothing could end
    that in a node, which may not remember them."""
    compiler = GrammarCompiler(VOCABULARY, CompileLimits(60.0, 1 << 30, 64 << 20))
    text = SLOW.text
    try:
        first = compiler.compile(SLOW)
        assert first.cpu_seconds > 0.3
        assert first.compiled
        for number in range(2):
            again = text.replace("{", f'{{"description": "{number}", ', 1)
            found = compiler.compile(Grammar("json_schema", again))
            assert found.compiled
        for _ in range(2):
            assert not compiler.compile(SMALL).compiled
    finally:
        compiler.close()


def test_what_xgrammar_says_of_a_grammar_is_not_in_the_log(
    capfd: pytest.CaptureFixture[str],
) -> None:
    made = Grammars(VOCABULARY, LIMITS, 1 << 20)
    try:
        for text in ("a^b", r"\q", "ab"):
            assert not isinstance(wanted(made, Grammar("regex", text)), PDError)
    finally:
        made.close()
    assert capfd.readouterr().err == ""


def test_memory_of_what_nobody_uses_is_bounded(grammars: Grammars) -> None:
    for number in range(40):
        schema = f'{{"type": "string", "maxLength": {number + 1}}}'
        assert not isinstance(wanted(grammars, Grammar("json_schema", schema)), PDError)
        assert grammars._bytes <= 1 << 20
    assert grammars._bytes == sum(size for _, size in grammars._compiled.values())


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("xgrammar", "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"),
        ("none", "--grammar"),
    ],
)
def test_without_a_vocabulary_grammars_are_refused_with_what_to_do(
    tmp_path: Path, backend: str, words: str
) -> None:
    """As beside a sentencepiece model without ``tokenizer.json``."""
    config = NodeConfig(role="unified", model=tmp_path, grammar_backend=backend)
    engine: Any = SimpleNamespace(model_config=SimpleNamespace(eos_token_ids=[2], vocab_size=9))
    error = wanted(make_grammars(config, engine), SMALL)
    assert isinstance(error, InvalidRequestError)
    assert error.param == "regex"
    assert words in error.message


def test_closing_answers_whoever_waits() -> None:
    made = Grammars(VOCABULARY, LIMITS._replace(cpu_seconds=60.0), 1 << 20)
    found: queue.Queue[MakeRules | PDError] = queue.Queue()
    made.want(LONG, found.put)
    threading.Timer(0.2, made.close).start()
    assert isinstance(found.get(timeout=60), UnavailableError)
    assert isinstance(wanted(made, SMALL), UnavailableError)


def test_the_grammars_of_requests_have_a_limit_together() -> None:
    """What requests use is not in the cache, or need not be; it is counted all the same."""
    limits = LIMITS._replace(max_bytes=256 << 10)
    made = Grammars(VOCABULARY, limits, 1 << 10)
    try:
        used: list[MakeRules] = []
        for number in range(300):
            found = wanted(made, Grammar("regex", f"[a-z]{{{number + 1}}}"))
            if isinstance(found, PDError):
                break
            used.append(found)
        assert isinstance(found, QueueFullError)
        assert "--grammar-cache" in found.message
        assert len(used) > 2
        assert made.living_bytes < 2 * limits.max_bytes
        used.clear()
        assert not isinstance(wanted(made, SMALL), PDError), "those of ended requests are not"
    finally:
        made.close()
