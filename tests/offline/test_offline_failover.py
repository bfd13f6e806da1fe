"""Batches at a running deployment whose nodes are killed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from processes import deployment

import pd.lang as pl
from pd import LLM, SamplingParams
from pd.embedded import EMBEDDED_MODEL

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from processes import Process

    from pd import RequestOutput

PROMPTS = ["The prefill node", "A page", "Speculative decoding", "If a decode node dies,"]
# The first answer shows that the batch is under way.
PARAMS = [
    SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=1)
    for tokens in (4, 60, 60, 60)
]
FLAGS = ["--dtype", "float32"]


class Bar:
    """A progress bar that calls a function when the first answer is there."""

    def __init__(self, on_first: Callable[[], object]) -> None:
        self._on_first: Callable[[], object] | None = on_first

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def update(self) -> None:
        if self._on_first is not None:
            self._on_first()
            self._on_first = None


def list_answers(outputs: list[RequestOutput]) -> list[Any]:
    return [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[Any]:
    """The answers that nothing disturbs."""
    return list_answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


def find_busy(nodes: list[Process]) -> Process:
    """Find the node with most requests."""

    def count_requests(node: Process) -> int:
        return sum(node.server_info()["queues"].values())

    busiest = max(nodes, key=count_requests)
    assert count_requests(busiest) > 0
    return busiest


def generate_disturbed(url: str, disturb: Callable[[], object]) -> list[Any]:
    """Generate the batch, and disturb it when the first answer is there."""
    with LLM(url=url) as remote:
        bar = Bar(disturb)
        return list_answers(remote.generate(PROMPTS, PARAMS, use_tqdm=lambda **_: bar))


def test_a_node_that_ends_in_a_batch_costs_no_token(expected: list[Any]) -> None:
    from cluster import start_node

    from pd.proxy.config import ProxyConfig
    from pd.proxy.server import ProxyThread

    nodes = [start_node("unified", EMBEDDED_MODEL) for _ in range(2)]
    try:
        with ProxyThread(ProxyConfig(unified=[node.url for node in nodes], port=0)) as proxy:

            def end_busy_node() -> None:
                busy = max(nodes, key=lambda server: len(server.node.requests))
                assert len(busy.node.requests) > 0
                nodes.remove(busy)
                busy.stop()

            assert generate_disturbed(proxy.url, end_busy_node) == expected
            assert len(nodes) == 1
    finally:
        for node in nodes:
            node.stop()


@pytest.mark.full
def test_a_node_killed_in_a_batch_costs_no_token(expected: list[Any], tmp_path: Path) -> None:
    with deployment(EMBEDDED_MODEL, tmp_path, decode=2, node_flags=FLAGS) as running:
        answers = generate_disturbed(running.proxy.url, lambda: find_busy(running.decode).kill())
    assert answers == expected


@pytest.mark.full
@pytest.mark.parametrize("role", ["prefill", "decode", "proxy"])
def test_the_only_process_of_a_kind_may_die_and_come_back(
    role: str, expected: list[Any], tmp_path: Path
) -> None:
    with deployment(EMBEDDED_MODEL, tmp_path, node_flags=FLAGS) as running:
        processes = {
            "prefill": running.prefill[0],
            "decode": running.decode[0],
            "proxy": running.proxy,
        }

        def kill_and_restart() -> None:
            processes[role].kill()
            processes[role].restart()

        assert generate_disturbed(running.proxy.url, kill_and_restart) == expected


@pl.function
def explain(s: Any, subject: str) -> None:
    s += subject
    s += pl.gen("first", max_tokens=60, temperature=0, ignore_eos=True)
    s += " Also"
    s += pl.gen("second", max_tokens=60, temperature=0, ignore_eos=True)


@pytest.mark.full
def test_a_node_killed_in_a_batch_of_programs_costs_no_token(llm: LLM, tmp_path: Path) -> None:
    arguments = [{"subject": prompt} for prompt in PROMPTS * 2]
    undisturbed = [state.text() for state in explain.run_batch(arguments, backend=llm)]
    with deployment(EMBEDDED_MODEL, tmp_path, decode=2, node_flags=FLAGS) as running:
        backend = pl.RuntimeEndpoint(running.proxy.url)
        states = explain.run_batch(arguments, backend=backend, generator_style=True)
        texts = [next(states).text()]
        running.decode[0].kill()
        texts += [state.text() for state in states]
    assert texts == undisturbed
