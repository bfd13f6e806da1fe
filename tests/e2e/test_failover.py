"""A stream survives its nodes: whatever happens to which of them and when, it equals the
undisturbed one token by token and byte by byte."""

from __future__ import annotations

import functools
import itertools
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import held_transfers
import netns
import pytest
from cluster import wait_until
from covering import every_two

sys.path.insert(0, str(Path(__file__).parents[1] / "grammar"))

from failover_deployment import FailoverDeployment
from failover_features import FEATURES, body_of
from grammar_model import VOCAB_SIZE, make_model
from grammar_nodes import share_grammars
from tiny import tiny_head

from pd.node.step_loop import StepLoop
from pd.prefill_node.sending import SendingEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from failover_deployment import Answer, Place

    from pd.node.node import Node
    from pd.prefill_node.outgoing import OutgoingRoom

# Before, in and after each stage, and the length of the prompts: held_transfers holds two of them.
LENGTHS = {
    "before the prompt": 334,
    "prompt": 333,
    "before the transfer": held_transfers.BEFORE_TOKENS,
    "in the transfer": held_transfers.DURING_TOKENS,
    "after the transfer": 335,
    "decode": 40,
}
# Moments in which the steps of a role are held; in "prompt", when a part of it is computed.
HELD_STEPS = {"before the prompt": "prefill", "prompt": "prefill", "after the transfer": "decode"}
FACTORS: dict[str, tuple[str, ...]] = {
    "fault": ("vanishes", "stands still", "is emptied", "is cut off"),
    "role": ("prefill", "decode"),
    "moment": tuple(LENGTHS),
    "feature": tuple(FEATURES),
    "speculation": ("none", "ngram", "eagle"),
}
# What an EAGLE head drafts depends on what was computed before a failover; it is asked for less.
EAGLE_FEATURES = ("seeded", "log probabilities", "grammar")
CELLS = [
    cell
    for cell in itertools.product(*FACTORS.values())
    if cell[-1] != "eagle" or cell[-2] in EAGLE_FEATURES
]
# Every feature at every moment, and with every fault, would take twice as many. So would every
# fault at every moment and every feature with every drafter, which run with elastic nodes only.
APART = [(0, 3), (2, 3), *([] if "PD_TEST_ELASTIC" in os.environ else [(0, 2), (3, 4)])]
SAMPLE = every_two(CELLS, 4, apart=APART)
assert [*FACTORS] == ["fault", "role", "moment", "feature", "speculation"]


_step = StepLoop._run_step


class HeldTransfers:
    """Stops the transfer of the next prompt of a length that says so, and of no other."""

    def __init__(self) -> None:
        self.armed = False
        self._rooms: set[bytes] = set()

    def open(self, sending: SendingEnd, outgoing: OutgoingRoom) -> None:
        """Takes the place of ``SendingEnd._start_sending``."""
        room, length = outgoing.request.room, len(outgoing.request.prompt)
        if self.armed and length in held_transfers.HELD.values():
            self.armed = False
            self._rooms.add(room)
        if room not in self._rooms:
            held_transfers._open(sending, outgoing)
        elif length == held_transfers.DURING_TOKENS:
            make = sending._transfer.sender
            half = functools.partial(held_transfers._make_half, make)
            sending._transfer.sender = half  # type: ignore[method-assign]
            held_transfers._open(sending, outgoing)
            sending._transfer.sender = make  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def held() -> Iterator[HeldTransfers]:
    transfers = HeldTransfers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SendingEnd, "_start_sending", lambda *args: transfers.open(*args))
        yield transfers


class HeldSteps:
    """Keeps nodes from computing, at once or as soon as they have computed a part of a prompt.

    Attributes:
        loops: the step loops of these nodes.
    """

    def __init__(self) -> None:
        self.loops = frozenset[StepLoop]()
        self._nodes: dict[StepLoop, Node] = {}

    def hold(self, places: Iterable[Place], *, begun: bool = False) -> None:
        """Hold these nodes, and no others from now on."""
        nodes = {place.server.node.step_loop: place.server.node for place in places}
        self._nodes = nodes if begun else {}
        self.loops = frozenset(() if begun else nodes)

    def release(self) -> None:
        self.loops, self._nodes = frozenset(), {}

    def step(self, loop: StepLoop) -> None:
        """Takes the place of ``StepLoop._run_step``."""
        if loop in self.loops:
            time.sleep(0.005)
            return
        _step(loop)
        node = self._nodes.get(loop)
        if node is not None and node.scheduler.prefill is not None:
            running = node.scheduler.prefill.running
            if any(request.sequence.num_computed for request in running):
                self.loops |= {loop}


@pytest.fixture(scope="module")
def steps() -> Iterator[HeldSteps]:
    held = HeldSteps()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepLoop, "_run_step", lambda loop: held.step(loop))
        yield held


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = make_model(tmp_path_factory.mktemp("model"))
    with share_grammars(directory):
        yield directory


@pytest.fixture(scope="module")
def lan() -> Iterator[netns.Lan | None]:
    """A host for each node, which can be cut off; None where hosts cannot be made."""
    if netns.why_not() is not None:
        yield None
        return
    with netns.lan(4, joined=True) as made:
        made.resend_often()
        yield made


@pytest.fixture(scope="module", params=FACTORS["speculation"])
def deployment(
    model: Path, held: HeldTransfers, lan: netns.Lan | None, request: pytest.FixtureRequest
) -> Iterator[FailoverDeployment]:
    settings = {"load_format": "dummy", "kv_cache_tokens": 8192, "chunked_prefill_size": 32}
    if request.param != "none":
        settings |= {"speculative_algorithm": request.param, "speculative_adaptive": "off"}
    if request.param == "eagle":
        settings["speculative_draft_model"] = tiny_head(vocab_size=VOCAB_SIZE)
    with FailoverDeployment(model, lan=lan, **settings) as made:
        made.wait_whole()
        yield made


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> Iterator[Callable[[str, int], tuple[dict[str, Any], Answer]]]:
    """Bodies of requests with their answers by a node that nothing happens to."""
    known: dict[tuple[str, int], tuple[dict[str, Any], Answer]] = {}
    settings = {"load_format": "dummy", "kv_cache_tokens": 8192}
    with FailoverDeployment(model, (0, 0, 1), **settings) as calm:

        def answer(feature: str, length: int) -> tuple[dict[str, Any], Answer]:
            if (feature, length) not in known:
                body = body_of(feature, length)
                found = calm.ask(body).join()
                if feature == "stop string":
                    body = body_of(feature, length, stop=found.texts[0][-40:-36])
                    found = calm.ask(body).join()
                    assert found.meta[0]["finish_reason"]["type"] == "stop"
                known[feature, length] = body, found
            return known[feature, length]

        yield answer


def strike(answer: Answer, fault: str, victim: Place, steps: HeldSteps) -> None:
    """Have something happen to a node, and make up for it when the answer is there. Steps that are
    held go on afterwards."""
    if fault == "stands still":
        with victim.standing_still():
            steps.release()
            answer.join()
        return
    if fault == "vanishes":
        victim.vanish()
    else:
        victim.server.node.drain(migrate=True)
        if victim.server.node.step_loop in steps.loops:
            # Streams leave as soon as the proxy has heard from all nodes.
            wait_until(lambda: not victim.busy, 20)
    steps.release()
    try:
        answer.join()
    finally:
        if fault == "vanishes":
            victim.restart()
        else:
            victim.server.node.undrain()


def cut_off(
    deployment: FailoverDeployment, answer: Answer, victim: Place, steps: HeldSteps
) -> None:
    """Cut a node off and let it compute alone until the proxy has given it up. Then the others go
    on, and stop in the middle of the answer until everything that the node has sent meanwhile has
    arrived."""
    assert victim.host is not None
    others = [place for place in deployment.places if place is not victim]
    steps.hold(deployment.places)
    with deployment.cut_off(victim):
        steps.hold(others)  # no longer the victim
        wait_until(lambda: not deployment.uses(victim), 20, every=0.1)
        delivered = answer.num_tokens
        steps.release()
        wait_until(lambda: answer.num_tokens > delivered or answer.is_over, 20)
        steps.hold(others)
        assert victim.host.unacknowledged_bytes(), "the node has noticed that it was cut off"
    wait_until(lambda: not victim.host.unacknowledged_bytes(), 30, every=0.1)
    wait_until(lambda: deployment.uses(victim), 30, every=0.1)
    steps.release()
    answer.join()


def wait_for(deployment: FailoverDeployment, answer: Answer, moment: str, steps: HeldSteps) -> None:
    if moment in ("before the prompt", "prompt"):
        wait_until(lambda: bool(steps.loops), 20)
        wait_until(lambda: any(place.busy for place in deployment.prefill), 20)
        wait_until(lambda: any(place.busy for place in deployment.decode), 20)
    elif moment == "after the transfer":
        wait_until(lambda: answer.num_tokens, 20)
        wait_until(
            lambda: any(p.server.node.count_queues()["waiting"] for p in deployment.decode), 20
        )
    elif moment == "decode":
        wait_until(lambda: answer.num_tokens > 5, 20)
    else:
        wait_until(lambda: answer.num_tokens, 20)
        wait_until(
            lambda: any(p.server.node.count_queues()["transfer"] for p in deployment.decode), 20
        )


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell[:-1], id=", ".join(cell[:-1])) for cell in CELLS if cell[-1] == "none"],
)
@pytest.mark.sample(
    cells=lambda params: (*params["cell"], params["deployment"]) in set(SAMPLE),
    exist=lambda params: (*params["cell"], params["deployment"]) in set(CELLS),
)
def test_a_stream_survives(
    deployment: FailoverDeployment,
    held: HeldTransfers,
    steps: HeldSteps,
    undisturbed: Callable[[str, int], tuple[dict[str, Any], Answer]],
    cell: tuple[str, str, str, str],
) -> None:
    fault, role, moment, feature = cell
    if fault == "is cut off" and deployment.lan is None:
        netns.require()
    body, expected = undisturbed(feature, LENGTHS[moment])
    for place in deployment.places:
        place.server.node.flush_cache()
    held.armed = LENGTHS[moment] in held_transfers.HELD.values()
    if moment in HELD_STEPS:
        role_held = HELD_STEPS[moment]
        places = deployment.prefill if role_held == "prefill" else deployment.decode
        steps.hold(places, begun=moment == "prompt")
    answer = deployment.ask(body)
    try:
        wait_for(deployment, answer, moment, steps)
        victim = deployment.involved(role)
        if fault == "is emptied" and moment == "decode":
            steps.hold([victim])
        if fault == "is cut off":
            cut_off(deployment, answer, victim, steps)
        else:
            strike(answer, fault, victim, steps)
    finally:
        steps.release()
    answer.assert_same(expected)
    # A node that is asked to be empty may be done before a proxy hears of that.
    is_fast = fault == "is emptied" and moment in HELD_STEPS
    has_done_its_part = role == "prefill" and moment in ("after the transfer", "decode")
    if not is_fast and not has_done_its_part:
        assert answer.failovers
    if fault == "is cut off" and has_done_its_part:
        assert not answer.failovers
    deployment.wait_whole()
