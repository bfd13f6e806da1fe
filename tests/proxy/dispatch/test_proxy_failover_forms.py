"""An answer of every form that is divided by a failover is the undivided one: chat with tool calls
and reasoning, completions, echo, log probabilities, usage."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from failing_nodes import asked_of, ids_of, next_of
from fake_node import EOS
from proxy_cluster import read_events, wait_for_all
from test_proxy_tools import ASKED, BOTH, CLOCK, WEATHER
from tool_models import QWEN, tokenizer, write_model

from pd.core.messages import Finish

if TYPE_CHECKING:
    from pathlib import Path

    from fake_node import FakeNode
    from proxy_cluster import Cluster

    from pd.core.messages import Generate

TEXT = tokenizer()
THINKING = "<think>\nhm, two cities.\n</think>\n\n" + BOTH
PLAIN = "One, two, three, größer, four, five, six."
CHAT = {"model": "fake", "messages": ASKED, "max_tokens": 400}
USAGE = {"stream_options": {"include_usage": True}}
# Path, body, and the text that the nodes say.
FORMS: dict[str, tuple[str, dict[str, Any], str]] = {
    "tool calls": ("/v1/chat/completions", CHAT | {"tools": [WEATHER, CLOCK]}, BOTH),
    "reasoning and tool calls": (
        "/v1/chat/completions",
        CHAT | {"tools": [WEATHER, CLOCK]} | USAGE,
        THINKING,
    ),
    "chat with log probabilities": (
        "/v1/chat/completions",
        CHAT | {"logprobs": True, "top_logprobs": 2},
        PLAIN,
    ),
    "completion": ("/v1/completions", {"prompt": "Say: ", "max_tokens": 400} | USAGE, PLAIN),
    "completion with echo": (
        "/v1/completions",
        {"prompt": "Say: ", "max_tokens": 400, "echo": True, "logprobs": 2},
        PLAIN,
    ),
}
# What differs from answer to answer.
OF_ONE_ANSWER = ("id", "created")
# Fields that come in parts.
TEXTS = ("content", "reasoning_content", "reasoning", "text")


def joined(whole: Any, part: Any, name: str = "") -> Any:
    """Two events' fields as those of one: texts and lists behind each other, of others the last
    that is not null."""
    if isinstance(whole, dict) and isinstance(part, dict):
        return whole | {key: joined(whole.get(key), value, key) for key, value in part.items()}
    if isinstance(whole, list) and isinstance(part, list):
        return whole + part
    if name in TEXTS and whole is not None and part is not None:
        return whole + part
    return whole if part is None else part


def of_events(events: list[Any]) -> dict[str, Any]:
    """A stream as one answer, the calls of tools without their ids."""
    assert events[-1] == "DONE"
    whole: dict[str, Any] = {}
    calls: dict[int, dict[str, str]] = {}
    for event in events[:-1]:
        assert "error" not in event, event
        for choice in event["choices"]:
            for part in choice.get("delta", {}).pop("tool_calls", None) or []:
                call = calls.setdefault(part["index"], {"name": "", "arguments": ""})
                for key, value in part["function"].items():
                    call[key] += value or ""
        # There is one, and none beside usage.
        event["choices"] = event["choices"][0] if event["choices"] else None
        whole = joined(whole, {k: v for k, v in event.items() if k not in OF_ONE_ANSWER})
    return whole | {"calls": calls}


class TwoNodes:
    """A proxy before two nodes, on the first of which an answer ends early."""

    def __init__(self, cluster: Cluster, path: Path) -> None:
        for _ in range(2):
            limits = {"context_length": 4000, "pages": {"total": 2000, "free": 2000}}
            cluster.node("unified", auto=False, **limits)
        model = write_model(path / "model", QWEN)
        self._nodes = cluster.unified
        self._client = cluster.client(failover="on", policy="round_robin", tokenizer=model)
        wait_for_all(self._client)

    def answer(self, name: str, cut: int | None = None) -> tuple[dict[str, Any], int]:
        """The answer, and how many tokens it has. The first node says ``cut`` of them."""
        path, body, text = FORMS[name]
        tokens = [*TEXT.encode(text, add_special_tokens=False).ids, EOS]
        for node in self._nodes:
            node.generates.clear()
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(self._read, path, body | {"stream": True})
            node, request = asked_of(self._nodes)
            position = 0
            if cut is not None:
                self._say(node, request, tokens[:cut], 0)
                node.fail(request, "node_failed")
                first, (node, request) = request, next_of(self._nodes, node)
                # What the client could not be told yet may be computed again.
                position = request.produced
                assert ids_of(request) == ids_of(first) + tokens[:position]
            self._say(node, request, tokens[position:], position)
            return of_events(reading.result(20)), len(tokens)

    def _read(self, path: str, body: dict[str, Any]) -> list[Any]:
        with self._client.stream("POST", path, json=body) as response:
            assert response.status_code == 200, response.read()
            return read_events(response)

    @staticmethod
    def _say(node: FakeNode, request: Generate, tokens: list[int], position: int) -> None:
        """One token a step, as nodes do."""
        params, prompt = request.params, ids_of(request)
        for at, token in enumerate(tokens, position):
            fields: dict[str, Any] = {}
            if at == position:
                fields["cached_tokens"] = 0
                if params.prompt_logprobs_start is not None:
                    entries = node.logprobs(prompt, params.top_logprobs)
                    fields["prompt_logprobs"] = entries[params.prompt_logprobs_start :]
            if params.logprobs:
                fields["logprobs"] = node.logprobs([token], params.top_logprobs)
            finish = Finish("stop", EOS) if token == EOS else None
            node.say(request, [token], position=at, finish=finish, **fields)


@pytest.mark.parametrize("name", FORMS)
def test_an_answer_that_a_failover_divides_anywhere(
    cluster: Cluster, tmp_path: Path, name: str
) -> None:
    nodes = TwoNodes(cluster, tmp_path)
    expected, count = nodes.answer(name)
    if name == "reasoning and tool calls":
        reasoning = TEXT.encode(THINKING.partition("\n\n")[0], add_special_tokens=False).ids
        assert expected["usage"]["reasoning_tokens"] == len(reasoning)
    for cut in [0, 1, 2, *range(3, count - 1, 7), count - 1]:
        found, _ = nodes.answer(name, cut)
        assert found == expected, f"divided behind token {cut}"
