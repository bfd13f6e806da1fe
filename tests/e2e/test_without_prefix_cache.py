"""``--radix-cache off``: prompts are computed anew, answers stay the same, and no page is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from cluster import Cluster, random_prompts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

PROMPT = next(random_prompts(0, [70]))


def ask(cluster: Cluster, prompts: Sequence[list[int]]) -> tuple[list[list[list[int]]], list[Any]]:
    """Answer prompts together; return tokens and numbers of cached tokens."""
    nodes = cluster.unified or cluster.pair
    asked = [cluster.client.generate(p, nodes, n=2, max_tokens=24) for p in prompts]
    answers = [each.result() for each in asked]
    return answers, [each.cached_tokens for each in asked]


@pytest.mark.parametrize(
    "layout", ["unified", "split", pytest.param("elastic", marks=pytest.mark.full)]
)
def test_answers_are_the_same_and_nothing_is_cached(
    layout: str, checkpoint: Callable[[str], Path]
) -> None:
    """The pool is small, so sequences are retracted, too."""
    settings: dict[str, Any] = {"kv_cache_tokens": 448, "page_size": 4}
    if layout == "unified":
        settings |= {"prefill": 0, "decode": 0, "unified": 1}
    if layout == "elastic":
        settings |= {"elastic": "auto"}
    prompts = [[*PROMPT, number] for number in range(4)]
    found = []
    for radix_cache in ("on", "off"):
        with Cluster(checkpoint("qwen3"), radix_cache=radix_cache, **settings) as cluster:
            ask(cluster, [PROMPT])
            found.append(ask(cluster, prompts))
            cluster.wait_idle()
            pages = [node.node.server_info()["pages"]["cached"] for node in cluster.nodes]
            assert any(pages) == (radix_cache == "on")
    (answers, cached), (without, none) = found
    assert without == answers
    assert all(cached) and not any(none)
