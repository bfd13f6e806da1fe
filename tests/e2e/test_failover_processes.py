"""Streams with every feature at once survive what happens to real processes and to links between
hosts, whatever each of them is at."""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import netns
import pytest
from failover_deployment import Answer
from failover_features import FEATURES, body_of
from failover_hosts import is_whole, two_hosts
from processes import Process, deployment, is_idle, wait_until

sys.path.insert(0, str(Path(__file__).parents[1] / "grammar"))

from grammar_model import make_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from processes import Deployment

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

NODE_FLAGS = ["--load-format", "dummy", "--chunked-prefill-size", "32"]
ROUNDS = 2
Expected = list[tuple[dict[str, Any], Answer]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def undisturbed(url: str) -> Expected:
    """A request with each feature, and its answer."""
    found = []
    for number, feature in enumerate(FEATURES):
        body = body_of(feature, 100 + 60 * number)
        answer = Answer(url, body).join()
        if feature == "stop string":
            body = body_of(feature, 100 + 60 * number, stop=answer.texts[0][-40:-36])
            answer = Answer(url, body).join()
        found.append((body, answer))
    return found


class AllAtOnce:
    """All requests twice, each answer equal to the undisturbed one."""

    def __init__(self, url: str, expected: Expected) -> None:
        self._asked = [(Answer(url, body), answer) for body, answer in [*expected, *expected]]

    def wait_tokens(self, count: int) -> None:
        wait_until(lambda: sum(answer.num_tokens for answer, _ in self._asked) >= count, 60)

    def check(self) -> int:
        """How many went on elsewhere."""
        for answer, expected in self._asked:
            answer.join().assert_same(expected)
        return sum(bool(answer.failovers) for answer, _ in self._asked)


@pytest.fixture(scope="module", params=["off", "auto"], ids="elastic {}".format)
def running(
    model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[Deployment, Expected]]:
    """Elastic nodes are chosen by predictions."""
    node_flags = [*NODE_FLAGS, "--elastic", request.param]
    settings: dict[str, Any] = {"prefill": 2, "decode": 2, "node_flags": node_flags}
    policy = "cache_aware" if request.param == "auto" else "round_robin"
    flags = ["--policy", policy, "--tokenizer", str(model)]
    with deployment(model, tmp_path_factory.mktemp("logs"), proxy_flags=flags, **settings) as made:
        yield made, undisturbed(made.proxy.url)


def choose(made: Deployment, role: str, rng: random.Random) -> Process:
    """A node of a role that has something to do; of another if no node of the role has. Roles of
    elastic nodes are preferences."""

    def found() -> list[Process]:
        busy = [node for node in made.nodes if any(node.server_info()["queues"].values())]
        return [node for node in busy if node.command[0] == role] or busy

    wait_until(lambda: bool(found()), 20)
    return rng.choice(found() or made.nodes)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_every_feature_survives_signals(
    running: tuple[Deployment, Expected], sign: signal.Signals, role: str, seed: int
) -> None:
    made, expected = running
    rng, moved = random.Random(seed), 0
    for _ in range(ROUNDS):
        made.wait_ready()
        asked = AllAtOnce(made.proxy.url, expected)
        # Prompts are computed until a few answers have begun.
        asked.wait_tokens(rng.randrange(20 if role == "prefill" else 200))
        victim = choose(made, role, rng)
        victim.child.send_signal(sign)
        try:
            moved += asked.check()
        finally:
            if sign == signal.SIGSTOP:
                victim.child.send_signal(signal.SIGCONT)
            else:
                victim.child.wait(60)
                victim.restart()
    # A prefill node that is asked to end may have computed all of its prompts before they can move.
    assert moved or (sign, role) == (signal.SIGTERM, "prefill"), seed
    made.wait_ready()
    made.wait_idle(60)


@pytest.mark.parametrize(
    "cut_off", [("prefill",), ("decode",), ("prefill", "decode")], ids="+".join
)
def test_every_feature_survives_a_link_that_is_cut(
    model: Path, tmp_path: Path, seed: int, cut_off: tuple[str, ...]
) -> None:
    """A prefill node alone loses only the decode nodes. The others lose the proxy, too: they go on
    for a while, and come back with what nobody waits for."""
    netns.require()
    rng, moved = random.Random(seed), 0
    tokenizer = ["--tokenizer", str(model)]
    with (
        netns.network() as net,
        two_hosts(net, model, tmp_path, cut_off, NODE_FLAGS, tokenizer) as (url, nodes),
    ):
        expected = undisturbed(url)
        for _ in range(ROUNDS):
            asked = AllAtOnce(url, expected)
            asked.wait_tokens(rng.randrange(20))
            net.cut(whole="decode" in cut_off)
            try:
                moved += asked.check()
            finally:
                net.restore()
            wait_until(lambda: is_whole(url), 60)
        assert moved, seed
        for node in nodes:
            wait_until(lambda node=node: is_idle(node.server_info()), 60, node.server_info)
