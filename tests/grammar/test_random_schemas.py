"""Random models write instances of random schemas, the same ones everywhere."""

from __future__ import annotations

import json
import os
import random
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from grammar_model import EOS, make_model
from grammar_nodes import DRAFTERS, ask, cluster_of, share_grammars
from random_schemas import random_schema
from tokenizers import Tokenizer

from pd.core.grammar import Grammar
from pd.grammar.grammars import MAX_WAITING
from pd.proxy.json_schemas import what_is_not_enforced

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SEED = int(os.environ.get("PD_TEST_SEED", random.randrange(1 << 31)))
DEPLOYMENTS: list[tuple[str, str, dict[str, Any]]] = [
    ("unified", "none", {"overlap_schedule": "off"}),
    ("unified", "eagle", {}),
    ("split", "none", {"overlap_schedule": "on"}),
    ("split", "ngram", {}),
    ("split", "tree", {"overlap_schedule": "on"}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"))
    with share_grammars(path):
        yield path


@pytest.mark.parametrize(
    ("count", "deployments"),
    [(40, DEPLOYMENTS[::2]), pytest.param(300, DEPLOYMENTS, marks=pytest.mark.full)],
    ids=["40", "300"],
)
@pytest.mark.timeout(900)
def test_random_schemas(
    model: Path, count: int, deployments: list[tuple[str, str, dict[str, Any]]]
) -> None:
    print(f"PD_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    schemas = [random_schema(rng) for _ in range(count)]
    found: dict[tuple[str, str], list[list[int]]] = {}
    for kind, drafter, settings in deployments:
        with cluster_of(model, kind, **DRAFTERS[drafter], **settings) as cluster:
            tokens_there: list[list[int]] = []
            # A node lets so many grammars wait at most.
            for start in range(0, count, MAX_WAITING):
                asked = [
                    ask(
                        cluster,
                        [1 + number % 200, 7, 9],
                        grammar=Grammar("json_schema", json.dumps(schemas[number])),
                        temperature=1.0,
                        seed=number,
                        max_tokens=800,
                    )
                    for number in range(start, min(start + MAX_WAITING, count))
                ]
                tokens_there += [pending.tokens() for pending in asked]
            found[kind, drafter] = tokens_there
            cluster.wait_idle(30.0)
    plain = found["unified", "none"]
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for number, (schema, tokens) in enumerate(zip(schemas, plain, strict=True)):
        assert what_is_not_enforced(schema) is None, schema
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        assert tokens[-1] == EOS, (schema, text)
        try:
            jsonschema.validate(json.loads(text), schema)
        except (ValueError, jsonschema.ValidationError) as error:
            pytest.fail(f"PD_TEST_SEED={SEED}, {number}: {json.dumps(schema)}\n{text}\n{error}")
    for deployment, tokens_there in found.items():
        assert tokens_there == plain, f"{deployment}, PD_TEST_SEED={SEED}"
