"""``/v1/score``: which prompts nodes get, and what their log probabilities become."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from proxy_tokenizers import byte_level

if TYPE_CHECKING:
    import httpx
    from fake_node import FakeNode
    from proxy_cluster import Cluster

LABELS = [7, 3]
TEXTS: dict[str, Any] = {"query": "q: ", "items": ["a", "bc"], "label_token_ids": LABELS}
IDS: dict[str, Any] = {"query": [5, 6], "items": [[7], [8, 9]], "label_token_ids": LABELS}
# The scripted node gives token t the log probability -t/100.
SCORES = [math.exp(-each / 100) for each in LABELS]


@pytest.fixture
def node(cluster: Cluster) -> FakeNode:
    return cluster.node("unified")


@pytest.fixture
def client(cluster: Cluster, node: FakeNode) -> httpx.Client:
    return cluster.client()


def read_prompts(node: FakeNode) -> list[list[int]]:
    return [np.frombuffer(each.token_ids, "<i4").tolist() for each in node.generates]


def test_scores_are_the_probabilities_of_labels(client: httpx.Client, node: FakeNode) -> None:
    answer = client.post("/v1/score", json=TEXTS).json()
    assert answer["object"] == "scoring"
    assert answer["scores"] == [pytest.approx(SCORES)] * 2
    prompts = [byte_level().encode(f"q: {item}").ids for item in TEXTS["items"]]
    assert sorted(read_prompts(node)) == sorted(prompts)
    assert {request.params.max_tokens for request in node.generates} == {1}
    total = sum(map(len, prompts))
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (total, 0)
    assert usage["total_tokens"] == total


def test_softmax_is_over_the_labels(client: httpx.Client) -> None:
    (first, second) = client.post("/v1/score", json=TEXTS | {"apply_softmax": True}).json()[
        "scores"
    ]
    assert first == second == pytest.approx([each / sum(SCORES) for each in SCORES])


@pytest.mark.parametrize("first", [False, True])
def test_token_ids_are_joined_in_order(client: httpx.Client, node: FakeNode, first: bool) -> None:
    assert client.post("/v1/score", json=IDS | {"item_first": first}).status_code == 200
    expected = [[7, 5, 6], [8, 9, 5, 6]] if first else [[5, 6, 7], [5, 6, 8, 9]]
    assert sorted(read_prompts(node)) == sorted(expected)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"query": None}, "query"),
    ({"items": []}, "items"),
    ({"items": [[7]]}, "items"),
    ({"items": ["a", 7]}, "items[1]"),
    ({"label_token_ids": []}, "label_token_ids"),
    ({"label_token_ids": [1000]}, "label_token_ids"),
    ({"label_token_ids": [-1]}, "label_token_ids"),
    ({"label_token_ids": ["a"]}, "label_token_ids"),
    ({"stream": True}, "stream"),
    ({"temperature": 0.5}, "temperature"),
    ({"items": ["a" * 5000]}, "200"),
    ({"model": "other"}, "other"),
]


def test_refusals_name_the_field(client: httpx.Client, node: FakeNode) -> None:
    for wrong, part in REFUSED:
        response = client.post("/v1/score", json=TEXTS | wrong)
        assert response.status_code in (400, 404), wrong
        assert part in response.json()["error"]["message"], wrong
    assert not node.generates
