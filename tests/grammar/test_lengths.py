"""Lengths that are counted beside a grammar allow the tokens that a grammar with lengths allows."""

from __future__ import annotations

import functools
import json
import os
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
import xgrammar

from pd.embedded import EMBEDDED_MODEL
from pd.grammar.child import Vocabulary
from pd.grammar.json_schemas import prepare
from pd.grammar.lengths import TokenCharacters, split_lengths
from pd.grammar.rules import GrammarRules
from pd.grammar.xgrammar_library import (
    Compiler,
    allows,
    dump_compiled,
    load_compiled,
    token_characters,
    tokenizer_info,
)

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
    "beside anything": closed(a=text(maxLength=5), b={}),
    "reference": {
        **closed(a={"$ref": "#/$defs/t"}, b=text(maxLength=2)),
        "$defs": {"t": text(maxLength=7)},
    },
    "union": closed(a={"anyOf": [text(maxLength=4), {"type": "integer"}, closed(b=text())]}),
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
    return tokenizer_info(Vocabulary(str(EMBEDDED_MODEL / "tokenizer.json"), SIZE, [STOP]))


@functools.cache
def characters() -> TokenCharacters:
    return token_characters(info())


def rules_of(schema: Any) -> GrammarRules:
    """Rules of a grammar that was handed over by another process."""
    compiled = Compiler(info()).compile("json_schema", json.dumps(schema))
    compiled = load_compiled(dump_compiled(compiled), info())
    return GrammarRules(compiled, characters() if compiled.counted else None, None, [STOP])


def exact(schema: Any) -> xgrammar.GrammarMatcher:
    """A grammar that has the lengths itself."""
    compiler = xgrammar.GrammarCompiler(info(), max_threads=1, cache_enabled=False)
    prepared = json.dumps(prepare(json.loads(json.dumps(schema))))
    compiled = compiler.compile_json_schema(prepared, any_whitespace=False)
    return xgrammar.GrammarMatcher(compiled, override_stop_tokens=[STOP])


def allowed(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("name", COUNTED)
def test_masks_are_those_of_the_grammar_with_lengths(name: str) -> None:
    print(f"PD_TEST_SEED={SEED}")
    rng, schema = random.Random(f"{SEED} {name}"), COUNTED[name]
    assert split_lengths(prepare(json.loads(json.dumps(schema)))) is not None
    rules, reference = rules_of(schema), exact(schema)
    mask, expected = np.zeros(SIZE // 32, np.int32), np.zeros(SIZE // 32, np.int32)
    written: list[int] = []
    for _ in range(150):
        if rules.ended:
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
                assert not rules.advance(refused)
            # Else few strings would end before they are full.
            ends = [each for each in allowed(mask) if b'"' in characters().tokens[each]]
            token = rng.choice(ends if ends and rng.random() < 0.2 else allowed(mask))
            assert rules.advance(token) and reference.accept_token(token)
            written.append(token)
            back = rng.randrange(1, len(written) + 1) if rng.random() < 0.1 else 0
        rules.rollback(back)
        if back:
            reference.rollback(back)
            del written[len(written) - back :]


@pytest.mark.parametrize("name", UNCLEAR)
def test_where_strings_cannot_be_told_apart_the_grammar_has_the_lengths(name: str) -> None:
    compiled = Compiler(info()).compile("json_schema", json.dumps(UNCLEAR[name]))
    assert compiled.counted is None


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "[a-c]{129}"),
        (
            "structural_tag",
            json.dumps(
                {
                    "type": "structural_tag",
                    "format": {"type": "json_schema", "json_schema": closed(a=text(maxLength=129))},
                }
            ),
        ),
    ],
)
def test_grammars_that_keep_their_lengths_may_have_long_ones(kind: str, text: str) -> None:
    assert Compiler(info()).compile(kind, text).counted is None


@pytest.mark.parametrize("low", [0, 1, 31, 32, 33, 64, 100])
def test_every_length_within_the_bounds_can_be_written_and_no_other(low: int) -> None:
    for high in (low, low + 1, low + 62, low + 63, low + 64, low + 95, low + 96):
        schema = json.dumps(text(minLength=low, maxLength=high))
        compiled = Compiler(info()).compile("json_schema", schema)
        written = [n for n in range(high + 70) if allows(compiled, f'"{"é" * n}"')]
        assert written == list(range(low, high + 1))
