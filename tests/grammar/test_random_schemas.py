"""Random models write instances of random schemas, the same ones everywhere."""

from __future__ import annotations

import json
import os
import random
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from grammar_model import EOS
from grammar_nodes import DRAFTERS, ask, cluster_of, share_grammars
from random_schemas import FORMATS, random_schema
from tokenizers import Tokenizer

from pd.core.grammar import Grammar
from pd.embedded import EMBEDDED_MODEL
from pd.grammar.grammars import MAX_WAITING
from pd.structured.schema_check import find_unenforced

if TYPE_CHECKING:
    from pathlib import Path

    from cluster import Cluster

SEED = int(os.environ.get("PD_TEST_SEED", random.randrange(1 << 31)))
Deployment = tuple[str, str, dict[str, Any]]
DEPLOYMENTS: list[Deployment] = [
    ("unified", "none", {"overlap_schedule": "off"}),
    ("unified", "eagle", {}),
    ("split", "none", {"overlap_schedule": "on"}),
    ("split", "ngram", {}),
    ("split", "tree", {"overlap_schedule": "on"}),
    ("split", "draft", {}),
]
WEIGHTS = {"load_format": "auto"}
HEADS = EMBEDDED_MODEL.parent
EAGLE3 = {"speculative_draft_model": HEADS / "embedded-eagle3"}
TRAINED: list[Deployment] = [
    ("unified", "none", WEIGHTS),
    ("split", "none", WEIGHTS),
    ("split", "ngram", WEIGHTS),
    ("split", "eagle", WEIGHTS | EAGLE3),
    ("unified", "tree", WEIGHTS | EAGLE3),
    ("split", "draft", WEIGHTS | {"speculative_draft_model": HEADS / "embedded-draft"}),
]
TRAINED_EOS = 2


@pytest.mark.parametrize(
    ("count", "deployments"),
    [(20, DEPLOYMENTS[::4]), pytest.param(300, DEPLOYMENTS, marks=pytest.mark.full)],
    ids=["20", "300"],
)
@pytest.mark.timeout(1500)
def test_random_schemas_constrain_random_models(
    model: Path, count: int, deployments: list[Deployment]
) -> None:
    check(model, EOS, count, deployments)


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_random_schemas_constrain_a_trained_model() -> None:
    """Its drafters are right more often than not."""
    with share_grammars(EMBEDDED_MODEL, 2048, TRAINED_EOS):
        check(EMBEDDED_MODEL, TRAINED_EOS, 300, TRAINED)


def check(model: Path, eos: int, count: int, deployments: list[Deployment]) -> None:
    """Check that the first deployment's answers are instances and the others' are the same."""
    print(f"PD_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    schemas = [random_schema(rng, times=model != EMBEDDED_MODEL) for _ in range(count)]
    plain: list[list[int]] | None = None
    for kind, drafter, settings in deployments:
        with cluster_of(model, kind, **DRAFTERS[drafter] | settings) as cluster:
            found = answers(cluster, schemas)
            cluster.wait_idle(30.0)
        plain = plain or found
        assert found == plain, f"{kind}, {drafter}, PD_TEST_SEED={SEED}"
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for number, (schema, tokens) in enumerate(zip(schemas, plain or [], strict=True)):
        assert find_unenforced(schema) is None, schema
        # As clients see it: special tokens that the grammar took for text are a part of it.
        text = tokenizer.decode(tokens[:-1], skip_special_tokens=False)
        assert tokens[-1] == eos, (schema, text)
        try:
            jsonschema.validate(json.loads(text), schema, format_checker=FORMATS)
        except (ValueError, jsonschema.ValidationError) as error:
            pytest.fail(f"PD_TEST_SEED={SEED}, {number}: {json.dumps(schema)}\n{text}\n{error}")


def answers(cluster: Cluster, schemas: list[Any]) -> list[list[int]]:
    """Return the model's output at temperature 1 for each schema."""
    found: list[list[int]] = []
    # A node lets so many grammars wait at most.
    for start in range(0, len(schemas), MAX_WAITING):
        asked = [
            ask(
                cluster,
                [1 + number % 200, 7, 9],
                grammar=Grammar("json_schema", json.dumps(schema)),
                temperature=1.0,
                seed=number,
                max_tokens=800,
            )
            for number, schema in enumerate(schemas[start : start + MAX_WAITING], start)
        ]
        found += [pending.tokens() for pending in asked]
    return found
