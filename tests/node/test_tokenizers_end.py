"""The token with which only the tokenizer ends an answer ends it on every way of a request."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from cluster import Cluster
from tiny import tiny_model

from pd.core.messages import Finish

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

END, END_ID = "<|im_end|>", 200
PROMPT = [5, 6, 7, 8, 9]
CERTAIN = {"logit_bias": {END_ID: 100.0}, "max_tokens": 6, "ignore_eos": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fine-tuned base model: both configurations name token 0, the tokenizer its own."""
    path = shutil.copytree(tiny_model(), tmp_path_factory.mktemp("model") / "chatml")
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"eos_token_id": 0}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    tokens = {"added_tokens": [{"id": END_ID, "content": END}]}
    (path / "tokenizer.json").write_text(json.dumps(tokens))
    return path


@pytest.fixture(scope="module", params=["plain", "elastic", "ngram"])
def cluster(model: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    settings: dict[str, Any] = {
        "plain": {},
        "elastic": {"elastic": "auto"},
        "ngram": {"speculative_algorithm": "ngram"},
    }[request.param]
    with Cluster(
        model, 1, 1, 1, load_format="dummy", page_size=4, kv_cache_tokens=1024, **settings
    ) as made:
        yield made


@pytest.fixture(params=["split", "unified"])
def nodes(cluster: Cluster, request: pytest.FixtureRequest) -> Any:
    return cluster.pair if request.param == "split" else cluster.unified


@pytest.mark.parametrize("least", [0, 1, 4])
def test_it_ends_the_answer_as_soon_as_min_tokens_let_it(
    cluster: Cluster, nodes: Any, least: int
) -> None:
    """Token 1 is that of the prefill node, later ones those of the decode node."""
    request = cluster.client.generate(PROMPT, nodes, min_tokens=least, **CERTAIN)
    tokens = request.tokens()
    assert len(tokens) == least + 1
    assert END_ID not in tokens[:-1] and tokens[-1] == END_ID
    assert request.choices[0].finish == Finish("stop", END_ID)


def test_every_choice_ends_with_it(cluster: Cluster, nodes: Any) -> None:
    request = cluster.client.generate(PROMPT, nodes, n=3, **CERTAIN)
    assert request.result() == [[END_ID]] * 3


def test_ignore_eos_ignores_it(cluster: Cluster, nodes: Any) -> None:
    request = cluster.client.generate(PROMPT, nodes, **CERTAIN | {"ignore_eos": True})
    assert request.tokens() == [END_ID] * 6
    assert request.choices[0].finish == Finish("length")


def test_the_end_that_the_configurations_name_still_counts(cluster: Cluster, nodes: Any) -> None:
    request = cluster.client.generate(PROMPT, nodes, **CERTAIN | {"logit_bias": {0: 100.0}})
    assert request.tokens() == [0]
    assert request.choices[0].finish == Finish("stop", 0)


def test_an_output_that_goes_on_elsewhere_ends_with_it(cluster: Cluster, nodes: Any) -> None:
    request = cluster.client.generate(PROMPT, nodes, produced=[11, 12], **CERTAIN)
    assert request.tokens() == [11, 12, END_ID]
