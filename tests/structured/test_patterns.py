"""We accept regular expressions that xgrammar matches as Python's ``re`` does.

The tests ask xgrammar itself.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
import warnings
from typing import Any

import pytest
import xgrammar

from pd.core.errors import InvalidRequestError
from pd.grammar.xgrammar_library import Compiler, accepts_text
from pd.proxy.requests.output_grammar import find_only_grammar

SEED = int(os.environ.get("PD_TEST_SEED", random.randrange(1 << 31)))
KINDS = ("regex", "structural_tag")
# A pattern, and what the message names.
REFUSED = [
    ("a^b", "an anchor inside"),
    ("a$b", "an anchor inside"),
    ("(a$)b", "an anchor inside"),
    (r"\Aa\Z", r"the escape '\\A'"),
    (r"a\Z", r"the escape '\\Z'"),
    (r"a\z", r"the escape '\\z'"),
    (r"\ba", r"the escape '\\b'"),
    (r"\e", r"the escape '\\e'"),
    (r"\cA", r"the escape '\\cA'"),
    (r"\01", "the escape"),
    (r"[\01]", "the escape"),
    (r"(a)\1", r"the escape '\\1'"),
    (r"[\b]", r"the escape '\\b'"),
    ("(?=a)a", "lookaround"),
    ("[^]a]", "begins with ']'"),
    ("a{99999999999}", "a repetition of '99999999999' times"),
    ("a{1,2}(b|[c]{0,4294967297})", "a repetition of '4294967297' times"),
    *((pattern, "repeated repetition") for pattern in ("a++b", "(a|b)*+", "[a]{2}{3}", "a+?*")),
]
TAKEN = [
    *("[{99999999999}]", r"\{99999999999\}"),
    *("", "a", "^a$", "^(a|b)$", "^a|b$", "a|^b", "^", "$", r"\^a\$", "[$^]", "[a^]", "[^^]"),
    *(
        ".",
        "a.b",
        "[.]",
        r"\.",
        "(.|x)*",
        "[^a]",
        r"[^\n]",
        r"[\^]",
        r"[\^a]",
        r"[\^-b]",
        r"[\x5e]",
    ),
    *(r"\d+", r"\D", r"\w", r"\W", r"[\d]", r"[\w.-]", r"[^\w]", r"a\sb", r"[ \t]", r"\S\S"),
    *(r"\n", r"\t", r"\r", r"\f", r"\v", r"\0", r"\x41", r"\u0041", r"[\x41-\x43]", r"[ -~]"),
    *(
        r"\x61b",
        r"[\x61b]",
        r"[^\x61b]",
        r"[^\xe9b]",
        r"\x00A",
        r"[\x00b]",
        r"\u0061b",
        r"[\u0061b]",
        r"\xe9a",
        r"\x5ea",
        r"[\x5ea]",
    ),
    *(r"\x0ab", r"[\x0a-\x0d]", r"\x5ca", r"[\x5c\x5da]", r"\\x61b", r"[\\x61b]", r"[\^-b]c?"),
    *("a*", "a+?b", "a??", "a{2}", "a{1,}", "a{1,2}", "(ab?)?", "(ab?)*c?", "(a|)b", "(?:a|b){2}"),
    *(
        'a"b',
        '["]',
        r"\"",
        r"[a\-z]",
        "[-a]",
        "[a-]",
        r"[\]]",
        "}",
        "]",
        "é",
        "[é]",
        "[a-é]",
        "日|🦊",
    ),
    *("[日本]", "[^日]", r"\/", "/", r"\#", "(a?)?b", "()", "a||b", r"[\\]", r"\\"),
]
CHARACTERS = 'aAbBzZ01_^$.-[](){}|*+?\\"/#<, \n\r\t\f\v\0é日🦊\u07ff\u0800\uffff'
SAMPLES = ["", *CHARACTERS, *(a + b for a in "aAb^$.\n" for b in "aZb^$1\n"), "aab", "aba", "abab"]
PIECES = [
    *"aab^$.|()[]*+?{},-\\é0",
    *(
        "[^",
        "[a-c]",
        r"\x00",
        r"\x1f",
        r"\d",
        r"\S",
        r"\A",
        r"\Z",
        r"\x61",
        r"\u005e",
        r"\xe9",
        r"\0",
        r"\^",
        "{2}",
        "{1,2}",
        "(?:",
        ")?",
    ),
]


@functools.cache
def compiler() -> Compiler:
    tokens = [bytes([i]) for i in range(256)] + [b"</s>"]
    return Compiler(xgrammar.TokenizerInfo(tokens, vocab_size=257, stop_token_ids=[256]))


def tag_of(pattern: str) -> dict[str, Any]:
    element = {"type": "regex", "pattern": pattern}
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": [element]}}


def taken(pattern: str, kind: str) -> set[str]:
    """Return the samples that the grammar allows. Raises InvalidRequestError and ValueError."""
    given = {"regex": None, "json_schema": None, "ebnf": None, "structural_tag": None}
    given[kind] = pattern if kind == "regex" else tag_of(pattern)  # type: ignore[assignment]
    grammar = find_only_grammar(**given)  # type: ignore[arg-type]
    assert grammar is not None
    compiled = compiler().compile_text(grammar.kind, grammar.text)
    return {text for text in SAMPLES if accepts_text(compiled, text)}


def matched(pattern: str) -> set[str]:
    """Classes such as ``\\d`` match ASCII only."""
    compiled = re.compile(pattern, re.ASCII)
    return {text for text in SAMPLES if compiled.fullmatch(text)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("pattern", "named"), REFUSED)
def test_patterns_that_xgrammar_reads_differently_are_refused(
    pattern: str, named: str, kind: str
) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        taken(pattern, kind)
    assert named in str(raised.value)
    assert json.dumps(pattern) in str(raised.value) or repr(pattern) in str(raised.value)
    assert raised.value.param == kind
    assert ("(at format/elements/0)" in str(raised.value)) == (kind == "structural_tag")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", TAKEN)
def test_accepted_patterns_match_as_in_python(pattern: str, kind: str) -> None:
    if kind == "structural_tag" and not pattern:
        return  # a format without a pattern, says xgrammar
    assert taken(pattern, kind) == matched(pattern)


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.full)])
def test_random_patterns_match_as_in_python(count: int) -> None:
    """We compare patterns that both we and Python accept."""
    print(f"PD_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    compared = 0
    for _ in range(count):
        pattern = "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 9)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            try:
                expected, found = matched(pattern), taken(pattern, "regex")
            except (re.error, InvalidRequestError, ValueError):
                continue
        assert found == expected, (pattern, found ^ expected)
        compared += 1
    assert compared > count // 50
