"""Steps planned ahead: the same tokens, and no page changes its owner under a launched step."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import pytest
from cluster import random_prompts
from lagging_device import LaggingDevice
from tiny import tiny_cluster

from pd.core.errors import PDError
from pd.engine.device_copy import DeviceTimer
from pd.node import step_loop
from pd.scheduling.step import LaunchedStep

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster import Cluster, Pending

# Small enough that sequences are retracted and pages go from one to the next at once.
SMALL = {"kv_cache_tokens": 256, "reserved_decode_tokens": 4, "chunked_prefill_size": 48}


def some_params(rng: random.Random) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_tokens": rng.choice((1, 2, 3, 8, 30)),
        "n": rng.choice((1, 1, 3)),
    }
    params |= rng.choice(
        (
            {},
            {"temperature": 1.0, "seed": rng.randrange(1000)},
            {"temperature": 0.8, "top_p": 0.9, "min_tokens": 4, "ignore_eos": False},
            {"frequency_penalty": 1.0},
            {"logprobs": True, "top_logprobs": 2},
            {"stop_token_ids": tuple(rng.sample(range(256), 40))},
        )
    )
    return params


def unused_by_steps(act: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def checked(sequence: Any) -> Any:
        assert not sequence.is_in_step
        return act(sequence)

    return checked


def watch_owners(cluster: Cluster) -> None:
    """No page is given up while a launched step uses it."""
    for server in cluster.nodes:
        memory = server.node.core.memory
        memory.release_pages = unused_by_steps(memory.release_pages)
        memory.quarantine_pages = unused_by_steps(memory.quarantine_pages)


def run(
    cluster: Cluster, requests: list[tuple[list[int], dict[str, Any]]], rng: random.Random | None
) -> list[Any]:
    """Tokens of every request; with ``rng`` some are aborted, whose entry is None."""
    nodes = cluster.unified or cluster.pair
    sent: list[Pending] = []
    aborted: list[Pending] = []
    for prompt, params in requests:
        sent.append(cluster.client.generate(prompt, nodes, **params))
        if rng is not None:
            time.sleep(rng.random() * 0.01)
            if rng.random() < 0.25:
                aborted.append(rng.choice(sent))
                cluster.client.abort(aborted[-1])
    found: list[Any] = []
    for pending in sent:
        try:
            # Who aborts hears no more, but the answer may have been complete.
            heard = pending not in aborted or pending.done.is_set()
            found.append(pending.result(30) if heard else None)
        except PDError:
            found.append(None)
    cluster.wait_idle()
    return found


@pytest.mark.parametrize("elastic", ["off", "auto"])
@pytest.mark.parametrize("split", [False, True])
def test_tokens_are_those_of_steps_one_by_one(split: bool, elastic: str, seed: int) -> None:
    """Elastic nodes wait with a plan until the step before it is nearly over."""
    rng = random.Random(seed)
    prompts = random_prompts(seed, [rng.randrange(1, 90) for _ in range(40)])
    requests = [(prompt, some_params(rng)) for prompt in prompts]
    with tiny_cluster(0, 0, 1, overlap_schedule="off") as cluster:
        expected = run(cluster, requests, None)
    nodes = (1, 1, 0) if split else (0, 0, 1)
    with tiny_cluster(*nodes, **SMALL, overlap_schedule="on", elastic=elastic) as cluster:
        watch_owners(cluster)
        devices = [LaggingDevice(server) for server in cluster.nodes]
        found = run(cluster, requests, rng)
        assert all(server.node.ready for server in cluster.nodes)
    right = [tokens == wanted for tokens, wanted in zip(found, expected, strict=True) if tokens]
    assert all(right), [i for i, tokens in enumerate(found) if tokens and tokens != expected[i]]
    assert len(right) > 10
    assert sum(device.ahead for device in devices) > 10


@pytest.mark.parametrize(
    "params",
    [{}, {"frequency_penalty": 0.5, "repetition_penalty": 1.1}],
    ids=["plain", "penalties"],
)
def test_a_request_at_its_last_token_is_not_computed_further(params: dict[str, Any]) -> None:
    with tiny_cluster(0, 0, 1, overlap_schedule="on") as cluster:
        device = LaggingDevice(cluster.unified[0])
        (prompt,) = random_prompts(0, [10])
        cluster.client.generate(prompt, cluster.unified, max_tokens=9, **params).tokens()
        cluster.wait_idle()
        assert (device.launched, device.ahead) == (9, 7)


@pytest.mark.parametrize("over", [True, False])
def test_tokens_of_a_step_that_is_over_are_sent_before_the_next_is_launched(
    over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launching a step may take the host longer than the step took."""
    events: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(DeviceTimer, "has_measured", True)  # as on a GPU
    if over:
        monkeypatch.setattr(LaunchedStep, "is_over", True)
    monkeypatch.setattr(step_loop, "launch_step", noted("launched", step_loop.launch_step))
    with tiny_cluster(0, 0, 1, overlap_schedule="on") as cluster:
        node = cluster.unified[0].node
        if not over:
            LaggingDevice(cluster.unified[0])
        node.scheduler.process_step = noted("known", node.scheduler.process_step)
        outputs = node.core.requests.outputs
        outputs.send_outputs = noted("sent", outputs.send_outputs)
        (prompt,) = random_prompts(0, [10])
        cluster.client.generate(prompt, cluster.unified, max_tokens=9).tokens()
        cluster.wait_idle()
    launches = [place for place, name in enumerate(events) if name == "launched"]
    known = [events[:place].count("known") for place in launches]
    if over:
        assert known == [*range(9)], events
        assert all(events[place - 1] == "sent" for place in launches), events
    else:
        assert known == [0, 1, *range(1, 8)], events
