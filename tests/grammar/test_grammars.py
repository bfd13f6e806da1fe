"""Compiling grammars: we explain wrong ones, end costly ones, and do not compile known ones
again."""

from __future__ import annotations

import errno
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
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
from pd.grammar.compile_jobs import Vocabulary
from pd.grammar.compiler import (
    _CHECK_SECONDS,
    CompileLimits,
    GrammarCompiler,
    _read_resident_bytes,
)
from pd.grammar.grammars import MAX_WAITING, Grammars
from pd.grammar.rules import GrammarRules
from pd.util.fair_queue import FairQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd.grammar.grammars import MakeRules

VOCABULARY = Vocabulary(str(EMBEDDED_MODEL / "tokenizer.json"), 2048, [2])
LIMITS = CompileLimits(cpu_seconds=2.0, memory_bytes=256 << 20, max_bytes=1 << 20)
SMALL = Grammar("regex", "[a-c]{3}")


def nested(depth: int) -> Grammar:
    """Make a schema of nested objects."""
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
        made = Grammars(VOCABULARY, LIMITS._replace(cpu_seconds=0.7), 1 << 20)
        wanted(made, SMALL)
    yield made
    made.close()


def wanted(grammars: Grammars, grammar: Grammar) -> MakeRules | PDError:
    found: queue.Queue[MakeRules | PDError] = queue.Queue()
    grammars.request_rules(grammar, found.put)
    return found.get(timeout=120)


def test_a_grammar_is_compiled_once(grammars: Grammars) -> None:
    make = wanted(grammars, SMALL)
    assert not isinstance(make, PDError)
    rules = make([2])
    assert not rules.has_ended
    at_once: list[MakeRules | PDError] = []
    grammars.request_rules(SMALL, at_once.append)
    assert len(at_once) == 1


@pytest.mark.parametrize(("grammar", "words"), WRONG)
def test_the_error_says_why_a_grammar_is_wrong(
    grammars: Grammars, grammar: Grammar, words: str
) -> None:
    error = wanted(grammars, grammar)
    assert isinstance(error, InvalidRequestError)
    assert words in str(error)
    assert ".cc" not in str(error)
    assert "\n" not in str(error)
    assert error.param == grammar.kind


# The second schema of a tag: refused when it is rewritten, and by xgrammar.
WRONG_SCHEMAS = [({"type": "string", "minLength": "x"}, "minLength"), ({"type": "strin"}, "strin")]


@pytest.mark.parametrize(("schema", "words"), WRONG_SCHEMAS)
def test_the_error_names_the_wrong_one_of_several_schemas(
    grammars: Grammars, schema: dict[str, Any], words: str
) -> None:
    elements = [{"type": "json_schema", "json_schema": each} for each in ({}, schema, {})]
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    error = wanted(grammars, Grammar("structural_tag", json.dumps(tag)))
    assert isinstance(error, InvalidRequestError)
    assert error.param == "structural_tag.format.elements[1].json_schema"
    assert error.message.startswith(f"{error.param}: ")
    assert words in error.message


def test_the_error_names_the_grammar_with_too_large_a_number(grammars: Grammars) -> None:
    elements = [{"type": "grammar", "grammar": f"root ::= Token({n})"} for n in (5, 4294967301)]
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    error = wanted(grammars, Grammar("structural_tag", json.dumps(tag)))
    assert isinstance(error, InvalidRequestError)
    assert error.param == "structural_tag.format.elements[1].grammar"
    assert "'4294967301' is too large" in error.message


def test_a_large_number_inside_a_text_is_allowed(grammars: Grammars) -> None:
    rule = 'root ::= "4294967296" | [^"4294967296] | rule4294967296 # 4294967296\n'
    assert not isinstance(
        wanted(grammars, Grammar("ebnf", rule + 'rule4294967296 ::= "a"')), PDError
    )


def test_a_slow_compilation_is_ended_and_others_succeed(grammars: Grammars) -> None:
    found: queue.Queue[MakeRules | PDError] = queue.Queue()
    grammars.request_rules(LONG, found.put)
    assert not isinstance(wanted(grammars, Grammar("regex", "[d-f]{2}")), PDError)
    error = found.get(timeout=120)
    assert isinstance(error, InvalidRequestError)
    assert "--grammar-" in str(error)
    # Both children serve again.
    for number in range(3):
        assert not isinstance(wanted(grammars, Grammar("regex", f"x{{{number + 1}}}")), PDError)


def test_owners_take_turns() -> None:
    queued: FairQueue[str] = FairQueue()
    for owner, item in [*(("a", f"a{i}") for i in range(4)), ("b", "b0"), ("c", "c0"), ("b", "b1")]:
        queued.put_item(owner, item)
    assert queued.count_items("a") == 4
    order = [queued.take_item() for _ in range(len(queued))]
    assert order == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]
    with pytest.raises(KeyError):
        queued.take_item()


def test_a_grammar_queued_by_another_is_compiled_in_the_owner_s_own_turn() -> None:
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
            made.request_rules(nested(100 + number), note(f"flood {number}"), "flood")
        made.request_rules(SMALL, note("flood, small"), "flood")
        made.request_rules(SMALL, note("small"), "other")
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
            made.request_rules(SMALL, found.put, f"owner {number % 2}")
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
            made.request_rules(nested(60 + number), found.put, "flood")
        assert isinstance(found.get(timeout=60), QueueFullError)
        assert not isinstance(wanted(made, SMALL), PDError)
        assert made.outcomes["unavailable"] > 0
    finally:
        made.close()


def test_a_child_starts_without_torch_and_transformers() -> None:
    """The child has stand-ins for torch and transformers, and we replace it while it is idle."""
    compiler = GrammarCompiler(VOCABULARY, LIMITS)
    try:
        compiler.compile_grammar(SMALL)
        before = compiler._child
        assert before is not None
        maps = Path(f"/proc/{before.pid}/maps").read_text()
        assert "libtorch" not in maps
        assert "xgrammar" in maps
        before.kill()
        with pytest.raises(UnavailableError):
            compiler.compile_grammar(SMALL)
        assert compiler._child not in (None, before)
        assert not compiler.compile_grammar(SMALL).error
    finally:
        compiler.close()


def test_killing_a_child_does_not_refuse_its_grammar() -> None:
    compiler = GrammarCompiler(VOCABULARY, LIMITS._replace(cpu_seconds=60.0))
    try:
        compiler.compile_grammar(SMALL)
        child = compiler._child
        assert child is not None
        threading.Timer(0.3, child.kill).start()
        with pytest.raises(UnavailableError, match="was killed"):
            compiler.compile_grammar(LONG)
        assert not compiler.compile_grammar(SMALL).error
    finally:
        compiler.close()


@pytest.mark.full
def test_a_child_ignores_signals_to_its_node() -> None:
    """Terminals and service managers signal all processes, and the node must drain first."""
    compiler = GrammarCompiler(VOCABULARY, CompileLimits(60.0, 1 << 30, 64 << 20))

    def signal_all() -> None:
        child = compiler._child
        assert child is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            child.send_signal(number)

    try:
        compiler.start()
        signal_all()
        compiler.compile_grammar(SMALL)
        first = compiler._child
        threading.Timer(0.3, signal_all).start()
        assert compiler.compile_grammar(SLOW).cpu_seconds > 0.3
        assert compiler._child is first
    finally:
        compiler.close()


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(each, marks=pytest.mark.full) for each in (signal.SIGINT, signal.SIGHUP)),
    ],
)
def test_a_signal_to_a_child_does_not_refuse_its_grammar(number: signal.Signals) -> None:
    compiler = GrammarCompiler(VOCABULARY, LIMITS)
    # A shell may have had this process ignore the signal, which a child inherits.
    child = subprocess.Popen(
        ["sleep", "600"], preexec_fn=lambda: signal.signal(number, signal.SIG_DFL)
    )
    try:
        child.send_signal(number)
        child.wait(60)
        assert isinstance(compiler._describe_death(child, SMALL), UnavailableError)
    finally:
        compiler.close()


def test_starting_a_process_or_thread_is_tried_again(
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


def test_a_failing_callback_does_not_affect_other_requests() -> None:
    made = Grammars(VOCABULARY, LIMITS, 1 << 20)
    found: queue.Queue[MakeRules | PDError] = queue.Queue()

    def broken(_: object) -> None:
        raise RuntimeError("can't start new thread")

    try:
        # More often than there are threads that compile.
        for number in range(4):
            grammar = Grammar("regex", f"x{{{number + 1}}}")
            made.request_rules(grammar, broken)
            made.request_rules(grammar, found.put)
            assert not isinstance(found.get(timeout=60), PDError)
    finally:
        made.close()


@pytest.mark.parametrize("what", ["a process", "the library"])
def test_a_failed_preparation_is_tried_again(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile requests get the error."""

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
        ({"max_bytes": 4 << 10}, LARGE, r"compiled size: \d+ KiB \(limit 4"),
        ({"memory_bytes": 4 << 20, "cpu_seconds": 60.0}, LONG, "more than 4 MiB"),
    ],
)
def test_a_grammar_over_the_memory_limit_is_refused(
    limits: dict[str, Any], grammar: Grammar, words: str
) -> None:
    compiler = GrammarCompiler(VOCABULARY, LIMITS._replace(**limits))
    try:
        with pytest.raises(InvalidRequestError, match=words):
            compiler.compile_grammar(grammar)
        assert not compiler.compile_grammar(SMALL).error
    finally:
        compiler.close()


@pytest.mark.full
def test_a_slow_grammar_is_transferred_and_then_compiled_in_the_node() -> None:
    made = Grammars(VOCABULARY, LIMITS._replace(max_bytes=16 << 20), 1 << 20)
    slow, mask = nested(120), np.zeros(2048 // 32, np.int32)
    try:
        rules = wanted(made, slow)
        assert not isinstance(rules, PDError)
        rules([2]).fill_mask(mask)
        again = mask.copy()
        GrammarRules(made._own.compile_text(slow.kind, slow.text), None, None, [2]).fill_mask(again)
        assert (mask == again).all()
        assert mask.any()
    finally:
        made.close()


def test_many_strings_with_lengths_are_transferred_as_source_text() -> None:
    """JSON of the compiled grammar would take 4 GiB and half a minute."""
    string = {"type": "string", "minLength": 5, "maxLength": 40}
    properties = {f"field_{number}": string for number in range(60)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    grammar = Grammar("json_schema", json.dumps(schema))
    compiler = GrammarCompiler(VOCABULARY, LIMITS._replace(cpu_seconds=5.0, max_bytes=16 << 20))
    made = Grammars(VOCABULARY, LIMITS, 64 << 20)
    try:
        result = compiler.compile_grammar(grammar)
        assert len(result.compiled) < 8 << 20
        wanted(made, SMALL)  # so that it has the tokens
        compiled = made._load_result(result, grammar, compiler.tokens)
        rules = GrammarRules(compiled, made._characters, None, [2])
        mask = np.zeros(2048 // 32, np.int32)
        rules.fill_mask(mask)
        assert mask.any()
    finally:
        made.close()
        compiler.close()


@pytest.mark.full
def test_a_very_slow_grammar_is_transferred_each_time() -> None:
    """A child with cached parts would compile it quickly again, but the node may lack these parts,
    and nothing could end a compilation there."""
    compiler = GrammarCompiler(VOCABULARY, CompileLimits(60.0, 1 << 30, 64 << 20))
    text = LONG.text
    try:
        first = compiler.compile_grammar(LONG)
        assert first.cpu_seconds > 1.0
        assert first.compiled
        for number in range(2):
            again = text.replace("{", f'{{"description": "{number}", ', 1)
            found = compiler.compile_grammar(Grammar("json_schema", again))
            assert found.compiled
        for _ in range(2):
            assert not compiler.compile_grammar(SMALL).compiled
    finally:
        compiler.close()


def test_output_of_xgrammar_does_not_reach_the_log(
    capfd: pytest.CaptureFixture[str],
) -> None:
    made = Grammars(VOCABULARY, LIMITS, 1 << 20)
    try:
        for text in ("a^b", r"\q", "ab"):
            assert not isinstance(wanted(made, Grammar("regex", text)), PDError)
    finally:
        made.close()
    assert capfd.readouterr().err == ""


def test_the_memory_of_unused_grammars_is_bounded(grammars: Grammars) -> None:
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
def test_without_a_vocabulary_grammars_are_refused_with_a_remedy(
    tmp_path: Path, backend: str, words: str
) -> None:
    """A sentencepiece model may come without ``tokenizer.json``."""
    config = NodeConfig(role="unified", model=tmp_path, grammar_backend=backend)
    engine: Any = SimpleNamespace(model_config=SimpleNamespace(eos_token_ids=[2], vocab_size=9))
    error = wanted(make_grammars(config, engine), SMALL)
    assert isinstance(error, InvalidRequestError)
    assert error.param == "regex"
    assert words in error.message


def test_close_answers_waiting_requests() -> None:
    made = Grammars(VOCABULARY, LIMITS._replace(cpu_seconds=60.0), 1 << 20)
    found: queue.Queue[MakeRules | PDError] = queue.Queue()
    made.request_rules(LONG, found.put)
    threading.Timer(0.2, made.close).start()
    assert isinstance(found.get(timeout=60), UnavailableError)
    assert isinstance(wanted(made, SMALL), UnavailableError)


def test_the_memory_of_all_requests_grammars_is_bounded() -> None:
    """We count grammars in use, whether or not they are in the cache."""
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


@pytest.mark.parametrize("limits", [{"memory_bytes": 48 << 20, "cpu_seconds": 60.0}])
def test_the_error_names_the_memory_limit_on_a_starved_machine(
    limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits end a running child, however little CPU time it gets per second."""
    monkeypatch.setattr("pd.grammar.compiler._HUNG_SECONDS", 0.05)
    made = Grammars(VOCABULARY, LIMITS._replace(**limits), 1 << 20)
    try:
        for _ in range(2):
            error = wanted(made, LONG)
            assert isinstance(error, InvalidRequestError)
            assert "48 MiB (--grammar-memory)" in error.message
        assert made.num_compiled == 1
    finally:
        made.close()


def test_a_grammar_is_refused_if_its_child_was_killed_for_memory() -> None:
    """The host may have less memory than the limit allows."""
    made = Grammars(VOCABULARY, LIMITS._replace(memory_bytes=128 << 20, cpu_seconds=60.0), 1 << 20)
    try:
        assert not isinstance(wanted(made, SMALL), PDError)
        compiler = made._compilers[0]
        child = compiler._child
        assert child is not None

        def kill_when_large() -> None:
            while _read_resident_bytes(child.pid) < compiler._idle_bytes + (80 << 20):
                if child.poll() is not None:
                    return
                time.sleep(0.01)
            time.sleep(2 * _CHECK_SECONDS)
            child.kill()

        killer = threading.Thread(target=kill_when_large)
        killer.start()
        error = wanted(made, LONG)
        killer.join()
        assert isinstance(error, InvalidRequestError)
        assert "128 MiB (--grammar-memory)" in error.message
        before = made.num_compiled
        assert wanted(made, LONG) is error
        assert made.num_compiled == before
    finally:
        made.close()


def test_a_child_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd.grammar.compiler._HUNG_SECONDS", 0.3)
    compiler = GrammarCompiler(VOCABULARY, LIMITS)
    try:
        compiler.compile_grammar(SMALL)
        child = compiler._child
        assert child is not None
        child.send_signal(signal.SIGSTOP)
        with pytest.raises(UnavailableError, match="was killed"):
            compiler.compile_grammar(SMALL)
        assert not compiler.compile_grammar(SMALL).error
    finally:
        compiler.close()
