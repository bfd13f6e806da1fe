"""Nodes of which not all have the same EAGLE head do not work together, and say why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from cluster import TokenClient, random_prompts
from tiny import tiny_head, tiny_node

from pd.core.errors import PDError
from pd.core.node_info import NO_HEAD
from pd.speculative.choice import describe_drafter

if TYPE_CHECKING:
    from pd.launch import NodeServer

(PROMPT,) = random_prompts(5, [30])


def eagle(algorithm: str = "eagle3", **settings: Any) -> dict[str, Any]:
    head = {"speculative_algorithm": "eagle", "speculative_draft_model": tiny_head(algorithm)}
    return {**head, **settings}


def drafter_of(server: NodeServer) -> str:
    return describe_drafter(server.node.core.config, server.node.engine)


PREFILL: dict[str, dict[str, Any]] = {
    "no head": {},
    "another drafter": {"speculative_algorithm": "ngram"},
    "another head": eagle("eagle"),
    "another dtype": eagle(dtype="bfloat16"),
}


def test_pairs_without_the_same_head_are_refused_and_the_others_go_on() -> None:
    """The message names both values, whichever node lacks the head."""
    decode, without = tiny_node("decode", **eagle()), tiny_node("decode")
    same = tiny_node("prefill", **eagle())
    others = {name: tiny_node("prefill", **settings) for name, settings in PREFILL.items()}
    nodes = [decode, without, same, *others.values()]
    client = TokenClient(nodes)
    try:
        pairs = [(other, decode) for other in others.values()] + [(same, without)]
        for prefill, decoding in pairs:
            with pytest.raises(PDError, match="--speculative-algorithm differs") as raised:
                client.generate(PROMPT, [prefill, decoding], max_tokens=4).result()
            for server in (prefill, decoding):
                assert repr(drafter_of(server) or NO_HEAD) in str(raised.value)
        assert "float32" in drafter_of(decode)
        for prefill, decoding in ((same, decode), (others["no head"], without)):
            client.generate(PROMPT, [prefill, decoding], max_tokens=4).result()
    finally:
        client.close()
        for server in nodes:
            server.stop()
