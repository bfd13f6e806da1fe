"""Counted lengths allow the same tokens as a grammar with lengths."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest
import torch
import xgrammar

from pd.embedded import EMBEDDED_MODEL
from pd.grammar.compile_jobs import Vocabulary
from pd.grammar.lengths import split_lengths
from pd.grammar.rules import GrammarRules
from pd.grammar.tag_lengths import split_tag_lengths
from pd.grammar.xgrammar_library import (
    Compiler,
    accepts_text,
    count_characters,
    dump_compiled,
    load_compiled,
    read_tokenizer,
)
from pd.structured.schema_rewriting import rewrite_schema, rewrite_tag

if TYPE_CHECKING:
    from pd.grammar.token_characters import TokenCharacters

SEED = int(os.environ.get("PD_TEST_SEED", random.randrange(1 << 31)))
SIZE, STOP = 2048, 2


def text(**bounds: int) -> dict[str, Any]:
    return {"type": "string", **bounds}


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


# Every place in which a string may stand.
COUNTED = {
    "bare": text(maxLength=6),
    "empty": text(maxLength=0),
    "at least": text(minLength=4),
    "exactly": text(minLength=3, maxLength=3),
    "more than 128": text(minLength=120, maxLength=140),
    "many pieces": text(minLength=65, maxLength=191),
    "no fewer than 128": text(minLength=130),
    "several": closed(a=text(maxLength=4), b=text(minLength=2, maxLength=9), c=text()),
    "optional": {"type": "object", "properties": {"a": text(maxLength=3), "b": text()}},
    "items": {"type": "array", "items": text(minLength=1, maxLength=2), "maxItems": 5},
    "nullable": closed(a={"type": ["string", "null"], "maxLength": 5}),
    "others": {"type": "object", "additionalProperties": text(maxLength=5), "maxProperties": 3},
    "beside a pattern": closed(a=text(maxLength=5), b={"type": "string", "pattern": "^[a-c]+$"}),
    "beside a pattern of pairs": closed(
        a=text(maxLength=5), b={"type": "string", "pattern": "^(xx)*$"}
    ),
    "beside anything": closed(a=text(maxLength=5), b={}),
    "reference": {
        **closed(a={"$ref": "#/$defs/t"}, b=text(maxLength=2)),
        "$defs": {"t": text(maxLength=7)},
    },
    "union": closed(a={"anyOf": [text(maxLength=4), {"type": "integer"}, closed(b=text())]}),
}


def tagged(begin: str, schema: Any, end: str) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def separated(tags: list[Any], separator: str = ", ") -> dict[str, Any]:
    options = {"at_least_one": True, "stop_after_first": False}
    return {"type": "tags_with_separator", "tags": tags, "separator": separator, **options}


def constant(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


ARGUMENTS = closed(a=text(maxLength=4), b=text(minLength=2, maxLength=5))
F, G = '<tool_call>\n{"name": "f", "arguments": ', '<tool_call>\n{"name": "g", "arguments": '
CALLS = separated([tagged(F, ARGUMENTS, "}"), tagged(G, text(maxLength=3), "}")], "\n")
THOUGHT = sequence(
    {
        "type": "tag",
        "begin": "<think>",
        "content": {"type": "any_text", "excludes": []},
        "end": "</think>",
    },
    {"type": "regex", "pattern": r"\n{0,2}"},
)
FREE = {
    "type": "dispatch",
    "rules": [["<tool_call>", tagged('\n{"name": "f", "arguments": ', ARGUMENTS, "}")]],
    "loop": True,
    "excludes": [],
}
# Formats of structural tags, and beginnings of outputs that lead into their strings.
TAGS: dict[str, tuple[Any, list[str]]] = {
    "schema": (tagged("", ARGUMENTS, ""), ['{"a": "']),
    "calls": (CALLS, [F + '{"a": "', G + '"', F + '{"a": "x", "b": "xxx"}}\n' + G + '"']),
    "text and calls": (FREE, ["Hm. " + F + '{"a": "', F + '{"a": "x", "b": "']),
    "behind reasoning": (sequence(THOUGHT, FREE), ["<think>Hm.</think>\n" + F + '{"a": "']),
    "behind some reasoning": (
        sequence({"type": "optional", "content": THOUGHT}, CALLS),
        ["<think>Hm.</think>\n" + F + '{"a": "', F + '{"a": "'],
    ),
    "a list": (
        sequence(
            constant("[C]["), separated([tagged('{"arguments": ', ARGUMENTS, "}")]), constant("]")
        ),
        [
            '[C][{"arguments": {"a": "',
            '[C][{"arguments": {"a": "x", "b": "xxx"}}, {"arguments": {"a": "',
        ],
    ),
    "calls or text": (
        {
            "type": "or",
            "elements": [
                sequence(constant("[f("), tagged("a=", text(maxLength=3), ""), constant(")]")),
                sequence({"type": "regex", "pattern": r"[^{\[\s<]"}, {"type": "any_text"}),
                constant(""),
            ],
        },
        ['[f(a="', "Hm."],
    ),
    "calls or an answer": (
        {"type": "or", "elements": [CALLS, tagged("", ARGUMENTS, "")]},
        ['{"a": "', F],
    ),
    "optional parameters": (
        sequence(
            tagged("f(a=", text(maxLength=3), ""),
            *(
                {
                    "type": "optional",
                    "content": sequence(constant(", "), tagged(f"{n}=", text(maxLength=4), "")),
                }
                for n in "bc"
            ),
            constant(")"),
        ),
        ['f(a="x", b="', 'f(a="x", c="'],
    ),
    "structures": (
        {
            "type": "triggered_tags",
            "triggers": ["<f", "<g"],
            "tags": [
                tagged("<f>", text(maxLength=2), "</f>"),
                tagged("<f1>", text(minLength=3), "</f>"),
                tagged("<g", ARGUMENTS, ">"),
            ],
        },
        ['Hm. <f>"', '<f1>"', '<g{"a": "', '<f>"x"</f><f>"'],
    ),
}
# Which of several strings is being written may be unknown.
UNCLEAR = {
    "two lengths": {"anyOf": [text(maxLength=3), text(minLength=5)]},
    "a constant": {"anyOf": [text(maxLength=3), {"enum": ["constant"]}]},
    "a pattern": {"anyOf": [text(maxLength=3), {"type": "string", "pattern": "^[a-z]+$"}]},
    "inside": {"anyOf": [closed(a=text(maxLength=3)), closed(a={"enum": ["constant"]})]},
    "by reference": {
        "anyOf": [text(maxLength=3), {"$ref": "#/$defs/t"}],
        "$defs": {"t": text(minLength=5)},
    },
    "names": {"type": "object", "propertyNames": {"maxLength": 3}},
    "long": {"anyOf": [text(maxLength=150), {"enum": ["constant"]}]},
}


@functools.cache
def info() -> xgrammar.TokenizerInfo:
    return read_tokenizer(Vocabulary(str(EMBEDDED_MODEL / "tokenizer.json"), SIZE, [STOP]))


@functools.cache
def characters() -> TokenCharacters:
    return count_characters(info())


def rules_of(schema: Any, kind: str = "json_schema") -> GrammarRules:
    """Make rules of a grammar transferred from another process."""
    compiler = Compiler(info())
    compiled = compiler.compile_text(kind, json.dumps(schema))
    compiled = load_compiled(dump_compiled(compiled), kind, compiler)
    return GrammarRules(compiled, characters() if compiled.counted else None, None, [STOP])


def exact(schema: Any) -> xgrammar.GrammarMatcher:
    """Compile a grammar that has the lengths itself."""
    compiler = xgrammar.GrammarCompiler(info(), max_threads=1, cache_enabled=False)
    prepared = json.dumps(rewrite_schema(json.loads(json.dumps(schema))))
    compiled = compiler.compile_json_schema(prepared, any_whitespace=False)
    return xgrammar.GrammarMatcher(compiled, override_stop_tokens=[STOP])


def tag_of(content: Any) -> Any:
    return {"type": "structural_tag", "format": json.loads(json.dumps(content))}


def exact_tag(content: Any, known: xgrammar.TokenizerInfo, stop: int) -> xgrammar.GrammarMatcher:
    """Compile the grammar of a structural tag that has the lengths itself."""
    compiler = xgrammar.GrammarCompiler(known, max_threads=1, cache_enabled=False)
    compiled = compiler.compile_structural_tag(json.dumps(rewrite_tag(tag_of(content))))
    return xgrammar.GrammarMatcher(compiled, override_stop_tokens=[stop])


def allowed(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("name", COUNTED)
def test_masks_equal_those_of_a_grammar_with_lengths(name: str) -> None:
    print(f"PD_TEST_SEED={SEED}")
    rng, schema = random.Random(f"{SEED} {name}"), COUNTED[name]
    assert split_lengths(rewrite_schema(json.loads(json.dumps(schema)))) is not None
    rules, reference = rules_of(schema), exact(schema)
    mask, expected = np.zeros(SIZE // 32, np.int32), np.zeros(SIZE // 32, np.int32)
    written: list[int] = []
    for _ in range(150):
        if rules.has_ended:
            whole = b"".join(characters().tokens[each] for each in written[:-1])
            # NOTE: where a string has no length, xgrammar has it hold the bytes of surrogates, too,
            # which are no text and are delivered as U+FFFD.
            jsonschema.validate(json.loads(whole.decode(errors="replace")), schema)
            back = len(written)
        else:
            mask[:] = expected[:] = 0
            rules.fill_mask(mask)
            reference.fill_next_token_bitmask(torch.from_numpy(expected)[None], 0)
            assert allowed(mask) == allowed(expected), written
            refused = rng.randrange(SIZE)
            if refused not in allowed(mask):
                assert not rules.accept_token(refused)
            # Else few strings would end before they are full.
            ends = [each for each in allowed(mask) if b'"' in characters().tokens[each]]
            token = rng.choice(ends if ends and rng.random() < 0.2 else allowed(mask))
            assert rules.accept_token(token) and reference.accept_token(token)
            written.append(token)
            back = rng.randrange(1, len(written) + 1) if rng.random() < 0.1 else 0
        rules.roll_back(back)
        if back:
            reference.rollback(back)
            del written[len(written) - back :]


@pytest.mark.parametrize("name", TAGS)
def test_masks_of_structural_tags_equal_those_of_a_grammar_with_lengths(name: str) -> None:
    print(f"PD_TEST_SEED={SEED}")
    rng, (content, beginnings) = random.Random(f"{SEED} {name}"), TAGS[name]
    rules, reference = rules_of(tag_of(content), "structural_tag"), exact_tag(content, info(), STOP)
    assert rules._counted is not None
    mask, expected = np.zeros(SIZE // 32, np.int32), np.zeros(SIZE // 32, np.int32)
    written, rest = list[int](), b""
    for _ in range(250):
        if rules.has_ended or rng.random() < 0.04:
            rules.roll_back(len(written))
            reference.rollback(len(written))
            written, rest = [], rng.choice(beginnings).encode()
        mask[:] = expected[:] = 0
        rules.fill_mask(mask)
        reference.fill_next_token_bitmask(torch.from_numpy(expected)[None], 0)
        assert allowed(mask) == allowed(expected), written
        tokens = allowed(mask)
        leading = [each for each in tokens if rest.startswith(characters().tokens[each] or b"?")]
        ends = [each for each in tokens if b'"' in characters().tokens[each]]
        token = rng.choice(leading or (ends if ends and rng.random() < 0.2 else tokens))
        rest = rest[len(characters().tokens[token]) :] if leading else b""
        assert rules.accept_token(token) and reference.accept_token(token)
        written.append(token)


# Tokens of a small vocabulary: all short texts of a few characters.
LETTERS = '[]"x,<1'
SMALL = ["".join(each) for n in (1, 2, 3) for each in itertools.product(LETTERS, repeat=n)]
SCHEMAS = [
    *(text(maxLength=1), text(minLength=1, maxLength=2), text(maxLength=2), text()),
    *({"type": "integer"}, {"const": "x"}, {"type": "string", "pattern": "^(xx)*$"}),
    {"type": "array", "items": text(maxLength=2)},
    {"type": "array", "prefixItems": [{"type": "integer"}, text(maxLength=1)], "minItems": 2},
]


def random_text(rng: random.Random, least: int = 0) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randrange(least, 3)))


def random_format(rng: random.Random, depth: int) -> Any:
    kinds = ["const_string", "json_schema", "json_schema", "any_text", "other"]
    more = ["sequence", "or", "optional", "tag", "tags", "dispatch", "triggered"]
    kind = rng.choice(kinds + 2 * more if depth else kinds)
    several = [random_format(rng, depth - 1) for _ in range(rng.randrange(1, 4))] if depth else []
    if kind == "const_string":
        return constant(random_text(rng))
    if kind == "any_text":
        return {"type": "any_text", "excludes": [random_text(rng, 1)] * (rng.random() < 0.2)}
    if kind == "other":
        characters = "".join(f"\\{each}" for each in random_text(rng, 1))
        return sequence({"type": "regex", "pattern": f"[^{characters}]"}, {"type": "any_text"})
    if kind == "json_schema":
        return {"type": "json_schema", "json_schema": rng.choice(SCHEMAS), "max_whitespace_cnt": 1}
    if kind in ("sequence", "or"):
        return {"type": kind, "elements": several}
    if kind == "optional":
        return {"type": kind, "content": several[0]}
    tags = [
        {"type": "tag", "begin": random_text(rng), "content": each, "end": random_text(rng)}
        for each in several
    ]
    options = {"at_least_one": rng.random() < 0.5, "stop_after_first": rng.random() < 0.5}
    if kind == "tags":
        return {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": random_text(rng),
            **options,
        }
    if kind == "dispatch":
        rules = [[random_text(rng, 1), each] for each in several]
        return {"type": "dispatch", "rules": rules, "loop": rng.random() < 0.5, "excludes": []}
    if kind == "triggered":
        triggers = {random_text(rng, 1) for _ in tags}
        for each in tags:
            each["begin"] = rng.choice(sorted(triggers)) + each["begin"]
        return {"type": "triggered_tags", "triggers": sorted(triggers), "tags": tags, **options}
    return tags[0] if tags else constant("")


@pytest.mark.parametrize("count", [1500, pytest.param(40_000, marks=pytest.mark.full)])
def test_masks_of_random_structural_tags_equal_those_of_a_grammar_with_lengths(count: int) -> None:
    print(f"PD_TEST_SEED={SEED}")
    size = len(SMALL) + 1
    known = xgrammar.TokenizerInfo([*SMALL, "</s>"], vocab_size=size, stop_token_ids=[size - 1])
    table, compiler = count_characters(known), Compiler(known)
    mask = np.zeros(-(-size // 32), np.int32)
    expected, free = np.zeros_like(mask), np.zeros_like(mask)
    compared = narrowed = 0
    for number in range(count):
        rng = random.Random(f"{SEED} {number}")
        content = random_format(rng, 3)
        if split_tag_lengths(rewrite_tag(tag_of(content))) is None:
            continue
        try:
            compiled = compiler.compile_text("structural_tag", json.dumps(tag_of(content)))
            reference = exact_tag(content, known, size - 1)
        except (ValueError, RuntimeError):
            continue
        rules = GrammarRules(compiled, table, None, [size - 1])
        for _ in range(12):
            mask[:] = expected[:] = free[:] = 0
            rules.fill_mask(mask)
            rules._matcher.fill_next_token_bitmask(torch.from_numpy(free)[None], 0)
            reference.fill_next_token_bitmask(torch.from_numpy(expected)[None], 0)
            tokens, right = ([t for t in allowed(m) if t < size] for m in (mask, expected))
            assert tokens == right, (number, content)
            compared += 1
            narrowed += bool((mask != free).any())
            likely = [each for each in tokens if each < size - 1 and "<" not in SMALL[each]]
            token = rng.choice(likely if likely and rng.random() < 0.7 else tokens or [size - 1])
            if token == size - 1:
                break
            assert rules.accept_token(token) and reference.accept_token(token)
    print(f"{narrowed} of {compared} masks were narrowed")
    assert narrowed > count / 10


@pytest.mark.parametrize("name", UNCLEAR)
def test_the_grammar_keeps_lengths_if_strings_are_ambiguous(name: str) -> None:
    compiled = Compiler(info()).compile_text("json_schema", json.dumps(UNCLEAR[name]))
    assert compiled.counted is None


@pytest.mark.parametrize("text", ["x", "xxx", "begin" + 8 * "x"])
def test_the_grammar_keeps_lengths_if_texts_look_like_strings(text: str) -> None:
    repeated = separated([tagged("<f>", ARGUMENTS, "</f>"), tagged(text, ARGUMENTS, "")], "")
    assert split_tag_lengths(rewrite_tag(tag_of(repeated))) is None


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "[a-c]{129}"),
        (
            "structural_tag",
            json.dumps(
                {
                    "type": "structural_tag",
                    "format": {
                        "type": "or",
                        "elements": [
                            {"type": "json_schema", "json_schema": closed(a=text(maxLength=129))},
                            {"type": "any_text", "excludes": ["x"]},
                        ],
                    },
                }
            ),
        ),
    ],
)
def test_a_grammar_with_its_own_lengths_may_have_long_ones(kind: str, text: str) -> None:
    assert Compiler(info()).compile_text(kind, text).counted is None


@pytest.mark.parametrize("low", [0, 1, 31, 32, 33, 64, 100])
def test_every_length_within_the_bounds_can_be_written_and_no_other(low: int) -> None:
    for high in (low, low + 1, low + 62, low + 63, low + 64, low + 95, low + 96):
        schema = json.dumps(text(minLength=low, maxLength=high))
        compiled = Compiler(info()).compile_text("json_schema", schema)
        written = [n for n in range(high + 70) if accepts_text(compiled, f'"{"é" * n}"')]
        assert written == list(range(low, high + 1))
