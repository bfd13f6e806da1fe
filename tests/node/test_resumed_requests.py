"""Requests that other nodes began go on at any token as if nothing had happened: the same tokens
and log probabilities on every deployment, with every feature and every drafter."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster import random_prompts
from raw_peer import proxy_of
from requests_for_tests import make_generate
from tiny import VOCAB_SIZE, tiny_cluster, tiny_head, tiny_model, tiny_node

from pd.core.messages import Failed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cluster import Cluster, Pending

    from pd.launch import NodeServer

TOKENS = 24
(PROMPT,) = random_prompts(31, [37])
# Every second token ends the answer, which may be so only late.
EVEN = tuple(range(0, VOCAB_SIZE, 2))
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7, "top_p": 0.9, "top_k": 30},
    "penalties": {
        "temperature": 0.8,
        "seed": 9,
        "repetition_penalty": 1.3,
        "presence_penalty": 1,
        "frequency_penalty": 0.5,
    },
    "min tokens": {"min_tokens": 15, "stop_token_ids": EVEN, "temperature": 1.0, "seed": 2},
    "bias": {"logit_bias": {7: 3.0, 9: -50.0}, "temperature": 1.0, "seed": 3},
    "limits": {
        "allowed_token_ids": EVEN[:40],
        "bad_sequences": tuple((a, a) for a in EVEN[:40]) + tuple((a, 4, a + 2) for a in EVEN[:40]),
        "temperature": 1.0,
        "seed": 6,
    },
    "log probabilities": {"logprobs": True, "top_logprobs": 2, "temperature": 1.0, "seed": 4},
}
# Tokens that were output before: one, some, all but one; with a page's end and beside it.
CUTS = (1, 3, 11, TOKENS - 1)
NGRAM = {"speculative_algorithm": "ngram", "speculative_adaptive": "off"}
# Drafts that are the model's own tokens, and trees of random ones.
DRAFT_MODEL = NGRAM | {"speculative_algorithm": "draft"}
TREES = NGRAM | {
    "speculative_algorithm": "eagle",
    "speculative_num_draft_tokens": 7,
    "speculative_topk": 3,
}
DRAFT_MODELS: dict[str, Callable[[], Path]] = {"draft": tiny_model, "eagle": tiny_head}
DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "pair": {"prefill": 1, "decode": 1},
    "decode node alone": {"prefill": 0, "decode": 1},
    "unified": {"prefill": 0, "decode": 0, "unified": 1},
    "unified, overlap": {"prefill": 0, "decode": 0, "unified": 1, "overlap_schedule": "on"},
    "pair, n-grams": {"prefill": 1, "decode": 1, **NGRAM},
    "pair, draft model": {"prefill": 1, "decode": 1, **DRAFT_MODEL},
    "pair, trees": {"prefill": 1, "decode": 1, **TREES},
    "small chunks": {"prefill": 1, "decode": 1, "chunked_prefill_size": 16},
}

# In make test-all only.
LESS_SHARP = ("unified, overlap", "pair, draft model", "small chunks")


@functools.cache
def undisturbed(name: str) -> Pending:
    """The answer of one unified node."""
    with tiny_cluster(0, 0, 1) as cluster:
        pending = cluster.client.generate(PROMPT, cluster.unified, **_params(name))
        pending.result()
        return pending


def _params(name: str) -> dict[str, Any]:
    return {"max_tokens": TOKENS, **FEATURES[name]}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.full if name in LESS_SHARP else ())
        for name in DEPLOYMENTS
    ],
)
def deployment(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    settings = dict(DEPLOYMENTS[request.param])
    make = DRAFT_MODELS.get(settings.get("speculative_algorithm", ""))
    if make is not None:
        settings["speculative_draft_model"] = make()
    with tiny_cluster(**settings) as cluster:
        yield cluster


@pytest.mark.parametrize("name", FEATURES)
def test_a_request_can_resume_after_any_token(deployment: Cluster, name: str) -> None:
    whole = undisturbed(name)
    (tokens,) = whole.result()
    asked = [
        deployment.client.generate(PROMPT, deployment.nodes, produced=tokens[:cut], **_params(name))
        for cut in CUTS
        if cut < len(tokens)
    ]
    assert asked
    for pending in asked:
        assert pending.result() == [tokens]
        assert pending.choices[0].finish == whole.choices[0].finish
        for position, entry in pending.choices[0].logprobs.items():
            expected = whole.choices[0].logprobs[position]
            assert entry.top_ids == expected.top_ids
            assert entry.logprob == pytest.approx(expected.logprob, abs=1e-4)
    deployment.wait_idle()


@pytest.fixture(scope="module")
def unified() -> Iterator[NodeServer]:
    server = tiny_node("unified")
    yield server
    server.stop()


@pytest.mark.parametrize(
    ("produced", "params", "text"),
    [
        (5, {}, "produced must be below the 5 tokens of prompt and output"),
        (4, {"max_tokens": 4}, r"below max_tokens \(4\), not 4"),
        (2, {"n": 2}, "has one choice"),
        (2, {"prompt_logprobs_start": 0}, "no log probabilities of its prompt"),
        (3, {"stop_token_ids": (3,)}, r"has ended \(stop\) after 2 of 3 tokens"),
    ],
)
def test_output_that_cannot_be_is_refused(
    unified: NodeServer, produced: int, params: dict[str, Any], text: str
) -> None:
    with proxy_of(unified) as proxy:
        message = make_generate(
            np.arange(5) if produced != 3 else [1, 2, 9, 3, 4],
            to=unified.instance_id,
            sender=proxy.name,
            produced=produced,
            params={"max_tokens": 10} | params,
        )
        proxy.send(message)
        failed = proxy.receive(Failed)
        assert failed.room == message.room
        assert failed.error.kind == "invalid_request"
        assert re.search(text, failed.error.message), failed.error.message
    assert unified.node.idle
