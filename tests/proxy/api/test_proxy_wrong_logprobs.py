"""Scripted nodes whose log probabilities make no sense, or are too few."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from failing_nodes import PROMPT, TOKENS, Asked, asked_of, ids_of, next_of
from proxy_cluster import wait_for_all

from pd.core.messages import Finish, TokenLogprobs

if TYPE_CHECKING:
    from fake_node import FakeNode
    from proxy_cluster import Cluster

    from pd.core.messages import Generate


@pytest.mark.parametrize("part", ["prompt", "answer"])
@pytest.mark.parametrize(
    "entry",
    [
        TokenLogprobs(1 << 40, -1.0),
        TokenLogprobs(5, -1.0, [-1], [-1.0]),
        TokenLogprobs(5, -1.0, [5]),
    ],
    ids=str,
)
def test_a_node_whose_log_probabilities_make_no_sense_is_left_for_another(
    cluster: Cluster, entry: TokenLogprobs, part: str
) -> None:
    nodes = [cluster.node("unified", auto=False) for _ in range(2)]
    client = cluster.client(failover="on", policy="round_robin")
    wait_for_all(client)
    fields = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    asked = Asked(client, {}, **fields)
    bad, request = asked_of(nodes)
    of_prompt, of_answer = bad.logprobs(PROMPT, 1), bad.logprobs(TOKENS[:1], 1)
    (of_prompt if part == "prompt" else of_answer)[0] = entry
    bad.say(request, TOKENS[:1], cached_tokens=0, prompt_logprobs=of_prompt, logprobs=of_answer)
    good, again = next_of(nodes, bad)
    assert (ids_of(again), again.produced) == (PROMPT, 0)
    good.reply(again)
    assert asked.result()["output_ids"] == TOKENS
    bad.wait_abort(request.room)


def test_choices_of_a_node_that_leaves_out_a_log_probability_of_the_prompt_come_once(
    cluster: Cluster,
) -> None:
    """One of them ends while the other goes on, and both begin again at another node."""
    nodes = [cluster.node("unified", auto=False) for _ in range(2)]
    client = cluster.client(failover="on", policy="round_robin", text=False)
    wait_for_all(client)
    asked = Asked(client, {"n": 2}, return_logprob=True, logprob_start_len=0)
    bad, request = asked_of(nodes)

    def answer(node: FakeNode, request: Generate, of_prompt: list[TokenLogprobs]) -> None:
        first, rest = node.logprobs(TOKENS[:1], 0), node.logprobs(TOKENS[1:], 0)
        end = Finish("length")
        node.say(request, TOKENS[:1], cached_tokens=0, prompt_logprobs=of_prompt, logprobs=first)
        node.say(request, TOKENS[1:], position=1, logprobs=rest, finish=end)
        node.say(request, TOKENS[:1], index=1, logprobs=first)
        node.say(request, TOKENS[1:], position=1, index=1, logprobs=rest, finish=end)

    answer(bad, request, bad.logprobs(PROMPT[1:], 0))
    good, again = next_of(nodes, bad)
    assert (ids_of(again), again.produced, again.params.n) == (PROMPT, 0, 2)
    answer(good, again, good.logprobs(PROMPT, 0))
    asked.result()
    ends = [event for event in asked.events[:-1] if event["meta_info"]["finish_reason"]]
    assert sorted(event["index"] for event in ends) == [0, 1]
    assert [event["output_ids"] for event in ends] == [TOKENS] * 2
