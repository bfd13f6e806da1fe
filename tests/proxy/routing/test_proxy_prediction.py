"""Nodes are chosen by what is predicted: the first token, and what streams lose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from elastic_nodes import COST, ITL, handle, report

from pd.core.node_load import NodeLoad
from pd.core.step_cost import LEAST_SLICE, StepShape
from pd.proxy.nodes import load_estimate
from pd.proxy.routing import prediction
from pd.proxy.routing.demand import Demand, Prompt
from pd.proxy.routing.policies import CacheAware
from pd.proxy.routing.prediction import Predictor
from pd.proxy.routing.routing import Router

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.proxy.nodes.node_handle import NodeHandle


def demand(length: int = 10_000, **fields: Any) -> Demand:
    return Demand(Prompt(np.arange(length, dtype=np.int32), ""), **fields)


def router(nodes: Sequence[NodeHandle], ttft: float | None = None) -> Router:
    return Router(CacheAware(), nodes, Predictor(ttft))


def way(
    nodes: Sequence[NodeHandle], wanted: Demand | None = None, **options: Any
) -> tuple[str, str]:
    """Names of the node that computes the prompt and of the one that generates."""
    route = router(nodes, **options).choose_route("m", wanted or demand())
    return route.first_node.instance_id, (route.decode_node or route.first_node).instance_id


def test_idle_nodes_split_the_request() -> None:
    assert way([handle("decode", "d"), handle("prefill", "p")]) == ("p", "d")


def test_a_long_queue_sends_the_prompt_to_the_decode_node() -> None:
    p, d = handle("prefill", "p"), handle("decode", "d", streams=20, context=40_000)
    assert way([p, d]) == ("p", "d")
    report(p, queue_seconds=0.5)
    assert way([p, d]) == ("d", "d")
    report(d, streams=20, context=40_000, queue_seconds=1.0)
    assert way([p, d]) == ("p", "d"), "the queue there is longer"


def test_many_answers_are_slowed_only_for_a_much_earlier_first_token() -> None:
    """Within their objective, but they are many."""
    p, d = handle("prefill", "p", queue_seconds=0.5), handle("decode", "d", streams=3)
    assert way([p, d]) == ("d", "d")
    report(d, streams=100)
    assert way([p, d]) == ("p", "d")
    report(p, queue_seconds=8.0)
    assert way([p, d], ttft=60.0) == ("d", "d")


def test_where_prompts_are_few_answers_go_where_steps_are_shortest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They keep away from a node that computes prompts only as long as there are many of these."""
    monkeypatch.setattr(prediction, "_FEW_SECONDS", 0.0)
    p, d = handle("prefill", "p"), handle("decode", "d")
    for share, expected in ((0.05, ("p", "p")), (0.15, ("p", "d"))):
        report(p, prompt_share=2 * share)
        report(d, prompt_share=0.0, streams=20)
        assert way([p, d]) == expected
        report(d, prompt_share=0.0, streams=2)
        assert way([p, d]) == ("p", "d"), "about equal"
        large = msgspec.structs.replace(COST, stream=COST.base / 10)
        report(d, prompt_share=0.0, streams=3, cost=large)
        assert way([p, d]) == ("p", "d"), "hardly more, though each takes long"
        report(p, prompt_share=2 * share, streams=10)
        slower = msgspec.structs.replace(COST, base=1.2 * COST.base)
        report(d, prompt_share=0.0, streams=10, cost=slower)
        assert way([p, d]) == ("p", "d"), "it has no more answers than the other"


def test_how_many_prompts_there_are_is_known_only_after_ten_seconds_of_answers(
    clock: SimpleNamespace,
) -> None:
    """Till then requests are split: the first burst tells little of the load that it begins."""
    p, d = handle("prefill", "p", prompt_share=0.0), handle("decode", "d", prompt_share=0.0)

    def pass_time(seconds: float, streams: int) -> tuple[str, str]:
        clock.now += seconds
        report(d, prompt_share=0.0, streams=streams)
        return way([p, d])

    assert pass_time(100.0, 20) == ("p", "d"), "the first report of answers"
    assert pass_time(9.0, 20) == ("p", "d")
    assert pass_time(1.5, 20) == ("p", "p")
    assert pass_time(1.0, 0) == ("p", "d"), "no answers, none is slowed"
    assert pass_time(1.0, 20) == ("p", "d"), "it begins anew"
    assert pass_time(10.5, 20) == ("p", "p")


def test_choices_that_are_about_equal_are_split() -> None:
    p, d = handle("prefill", "p", queue_seconds=0.009), handle("decode", "d")
    assert way([p, d]) == ("p", "d")


def test_what_was_sent_since_the_last_report_counts() -> None:
    nodes = [handle("prefill", "p"), handle("decode", "d", streams=2)]
    routes = router(nodes)
    ways = []
    for _ in range(4):
        wanted = demand()
        route = routes.choose_route("m", wanted)
        route.add_load(wanted)
        ways.append(route.reasons[0][1])
    assert set(ways) == {"split", "whole"}, "burst: both nodes compute prompts"
    for node in nodes:
        report(node)
    assert routes.choose_route("m", demand()).reasons[0][1] == "split", (
        "the reports say that it is over"
    )


def test_answers_that_ended_since_the_last_report_do_not_count() -> None:
    node = handle("unified", "u", streams=1)
    idle, load = node.load.decoding.streams, node.load
    wanted = demand()
    sent = router([node]).choose_route("m", wanted).add_load(wanted)
    assert load.decoding.streams == idle + 1
    number = load.mark_heartbeat()
    load.add_streams(-sent.streams, -sent.tokens)
    assert load.decoding.streams == idle
    load.take_report(load.reported, number)
    assert load.decoding.streams == idle - 1, "the heartbeat was sent before it ended"
    load.take_report(load.reported, load.mark_heartbeat())
    assert load.decoding.streams == idle
    load.add_streams(-5, -50)
    assert load.decoding == StepShape(), "never below none"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that loads are estimated at; it stands still."""
    stopped = SimpleNamespace(now=100.0)
    stopped.monotonic = lambda: stopped.now
    monkeypatch.setattr(load_estimate, "time", stopped)
    monkeypatch.setattr(prediction, "time", stopped)
    return stopped


@pytest.mark.usefixtures("clock")
def test_a_prompt_that_is_computed_before_the_next_report_leaves_no_queue() -> None:
    node = handle("unified", "u")
    load, wanted = node.load, demand()
    sent = router([node]).choose_route("m", wanted).add_load(wanted)
    assert load.queue_seconds == pytest.approx(sent.seconds) and sent.seconds > 0
    left = sent.end_prompt()
    assert load.queue_seconds == 0.0
    left.end_prompt()
    assert load.add_prompt(0.5) == load.last_beat
    assert load.queue_seconds == pytest.approx(0.5), "nothing is taken off twice"


def test_prompts_pass_with_time(clock: SimpleNamespace) -> None:
    """One after the other, whether a report has seen them or not."""
    load = handle("unified", "u").load
    reported = load.reported
    assert reported is not None
    load.add_prompt(0.3)
    clock.now += 0.1
    assert load.queue_seconds == pytest.approx(0.2)
    second = load.add_prompt(0.4)
    assert load.queue_seconds == pytest.approx(0.6)
    number = load.mark_heartbeat()
    clock.now += 0.25
    load.add_prompt(0.5)
    assert load.queue_seconds == pytest.approx(0.85)
    load.end_prompt(0.4, second)  # given up
    load.take_report(msgspec.structs.replace(reported, queue_seconds=0.2), number)
    assert load.queue_seconds == pytest.approx(0.7)
    clock.now += 0.6
    assert load.queue_seconds == pytest.approx(0.1)
    # Idle in between, the node does not compute what comes later beforehand.
    clock.now += 5.0
    load.add_prompt(0.3)
    assert load.queue_seconds == pytest.approx(0.3)


@pytest.mark.usefixtures("clock")
def test_a_prompt_that_is_over_is_in_no_queue_until_a_report_counts_it() -> None:
    node = handle("unified", "u")
    load, wanted = node.load, demand()
    sent = router([node]).choose_route("m", wanted).add_load(wanted)
    number = load.mark_heartbeat()
    sent.end_prompt()
    assert load.queue_seconds == 0.0
    load.take_report(load.reported, number)
    assert load.queue_seconds == 0.0


def test_the_history_on_the_decode_node_makes_it_the_faster_one() -> None:
    p, d = handle("prefill", "p"), handle("decode", "d", streams=1)
    policy = CacheAware()
    policy.note_computed(d, demand(9_900).prompt)
    assert way([p, d]) == ("d", "d")
    policy.note_computed(p, demand(9_900).prompt)
    assert way([p, d]) == ("p", "d")


def test_a_full_decode_node_leaves_the_answer_to_the_prefill_node() -> None:
    p, d = handle("prefill", "p"), handle("decode", "d", free_tokens=5000)
    assert way([p, d]) == ("p", "p")
    report(d)
    assert way([p, d]) == ("p", "d")


def test_streams_that_would_miss_the_objective_weigh_more_than_a_first_token() -> None:
    """A step of 400 streams takes longer than 20 ms: none joins them."""
    p, d = handle("prefill", "p", queue_seconds=3.0), handle("decode", "d", streams=400)
    assert way([p, d]) == ("p", "p")


def test_misses_of_an_objective_weigh_by_how_much_it_is_missed() -> None:
    """A step of 190 streams beside a prompt takes a hundredth longer than the objective."""
    a, b = handle("unified", "a", streams=190), handle("unified", "b")

    def chosen(streams: int, queue: float) -> tuple[str, str]:
        report(a, streams=streams)
        report(b, streams=182, queue_seconds=queue)
        return way([a, b], demand(1_000), ttft=1.6)

    assert chosen(190, 30.0) == ("a", "a"), "as hardly any stream loses by it"
    assert chosen(190, 2.0) == ("b", "b"), "a first token is hardly late"
    assert chosen(190, 0.0) == ("b", "b"), "nothing is missed there"
    assert chosen(400, 30.0) == ("b", "b"), "many streams would miss it by far"


def test_any_node_alone_serves() -> None:
    for role in ("prefill", "decode", "unified"):
        assert way([handle(role, "only")]) == ("only", "only")
        assert router([handle(role, "only")]).can_serve()


def test_unified_nodes_keep_their_requests() -> None:
    assert way([handle("unified", "a"), handle("unified", "b", queue_seconds=1)]) == ("a", "a")


def test_a_prompt_that_needs_most_of_a_pool_does_not_travel() -> None:
    """Two such prompts that cross would wait for each other's memory."""
    p, d = handle("prefill", "p", queue_seconds=9.0), handle("decode", "d")
    assert way([p, d], demand(99_000)) == ("d", "d")
    report(d, streams=400)
    assert way([p, d], demand(99_000)) == ("p", "p")


def test_a_single_token_is_generated_where_the_prompt_is() -> None:
    route = router([handle("prefill", "p"), handle("decode", "d")]).choose_route(
        "m", demand(output=1)
    )
    assert (route.first_node.instance_id, route.decode_node) == ("p", None)


def test_the_objective_of_a_first_token_follows_from_the_prompt_unless_it_is_given() -> None:
    idle = handle("prefill", "p")
    assert Predictor(ttft=2.0).get_ttft_objective(idle, demand()) == 2.0
    alone = COST.prefill_seconds(0, 10_000, 8192, StepShape())
    half = COST.prefill_seconds(0, 4096, 8192, StepShape())
    assert Predictor().get_ttft_objective(idle, demand()) == pytest.approx(4 * (alone + half))


def test_without_reports_roles_decide() -> None:
    p, d = handle("prefill", "p", queue_seconds=9.0), handle("decode", "d")
    d.load.take_report(None, 0)
    assert way([p, d]) == ("p", "d")
    p.is_alive = False
    assert way([p, d]) == ("d", "d")


def test_beside_nodes_that_are_fixed_roles_decide() -> None:
    """Nothing can be predicted of a choice with one of those."""
    e = handle("prefill", "e", queue_seconds=30.0)
    fixed = [handle("prefill", "p"), handle("decode", "d")]
    for node in fixed:
        assert node.info is not None
        node.claimed = node.info = msgspec.structs.replace(node.info, elastic=False)
        node.load.take_report(None, 0)
    route = Router(CacheAware(), [e, *fixed], Predictor()).choose_route(
        "m", demand(), avoided=frozenset([e])
    )
    assert (route.first_node.instance_id, route.decode_node) == ("p", fixed[1])
    assert route.predicted is None


def test_nodes_of_another_model_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "_FEW_SECONDS", 0.0)
    nodes = [handle("prefill", "p", streams=10), handle("decode", "d", streams=60)]
    for node in nodes:
        report(node, prompt_share=0.05, streams=node.load.decoding.streams)
    other = handle("decode", "x", prompt_share=0.0)
    assert other.info is not None
    other.claimed = other.info = msgspec.structs.replace(other.info, model="other")
    assert way(nodes) == way([*nodes, other]) == ("p", "p")
    other.load.take_report(None, 0)
    assert way([*nodes, other]) == ("p", "p")


def test_off_leaves_elastic_nodes_to_their_roles() -> None:
    nodes = [handle("prefill", "p", queue_seconds=9.0), handle("decode", "d")]
    route = Router(CacheAware(), nodes).choose_route("m", demand())
    assert (route.first_node.instance_id, route.predicted) == ("p", None)
    assert route.decode_node is not None
    nodes[0].is_alive = False
    assert Router(CacheAware(), nodes).choose_route("m", demand()).first_node.instance_id == "d"


@pytest.mark.usefixtures("clock")
def test_a_report_counts_only_what_was_sent_after_its_heartbeat() -> None:
    load = handle("prefill", "p").load
    first = load.mark_heartbeat()
    load.add_prompt(1.0)
    second = load.mark_heartbeat()
    load.add_prompt(0.25)
    fields: Any = {"cost": COST, "itl": ITL}
    load.take_report(NodeLoad(**fields), first)
    assert load.queue_seconds == pytest.approx(1.25)
    load.take_report(NodeLoad(**fields, queue_seconds=0.9), second)
    assert load.queue_seconds == pytest.approx(0.9 + 0.25, abs=0.05)


def test_heartbeats_without_answers_take_no_memory() -> None:
    load = handle("prefill", "p").load
    for _ in range(1000):
        load.mark_heartbeat()
    assert len(load._marks) <= 64


def test_a_waiting_request_moves_for_an_earlier_first_token_only() -> None:
    """However many answers its prompt slows where it is, and its own are none of them."""
    p, d = handle("prefill", "p", queue_seconds=0.28), handle("decode", "d", streams=48)
    wanted = demand(8_000)
    predictor = Predictor()
    waiting = predictor.choose_nodes([d], [d], wanted, lambda *_: True)
    assert waiting is not None
    present = waiting._replace(ttft=0.336)
    assert predictor.find_better(present, [p], [p, d], wanted, lambda *_: True) is None
    report(p)
    many = demand(8_000, streams=16)
    report(d, streams=16)
    waiting = predictor.choose_nodes([d], [d], many, lambda *_: True)
    assert waiting is not None
    present = waiting._replace(ttft=1.0)
    moved = predictor.find_better(present, [p], [p, d], many, lambda *_: True)
    assert moved is not None
    assert moved.first_node is p


def test_an_answer_does_not_go_where_a_long_step_is_under_way_when_its_first_token_is_there() -> (
    None
):
    """Where it is generated no answer was expected when the step began. A node with answers, or one
    that has time to get ready, computes in short steps."""
    p = handle("prefill", "p")
    d = handle("decode", "d", queued_tokens=32_000, queue_seconds=1.0)
    short, long = demand(2_000), demand(30_000)
    assert way([p, d], short) == ("p", "p")
    assert way([p, d], long) == ("p", "d")
    another = handle("decode", "another")
    assert way([p, d, another], short) == ("p", "another")
    for short_steps in ({"streams": 1, "context": 100}, {"awaits": True}):
        report(d, queued_tokens=32_000, queue_seconds=1.0, **short_steps)
        assert way([p, d], short) == ("p", "d")


def test_a_waiting_request_moves_past_a_node_whose_steps_are_a_hair_too_long() -> None:
    """Choosing takes misses that differ little for equal, so moving does, too."""
    predictor, wanted = Predictor(2.0), demand(1_000)
    p, a = handle("prefill", "p"), handle("decode", "a", streams=20)
    step = COST.predict_seconds(StepShape(tokens=LEAST_SLICE, streams=20, context=2_000))
    report(a, streams=20, context=2_000, itl=step / 1.003)
    b = handle("decode", "b", queue_seconds=0.3)
    waiting = predictor.choose_nodes([p], [p], wanted, lambda *_: True)
    assert waiting is not None
    present = waiting._replace(ttft=1.2)
    moved = predictor.find_better(present, [a, b], [p, a, b], wanted, lambda *_: True)
    assert moved is not None
    assert moved.first_node is a


def test_a_waiting_request_moves_only_to_nodes_that_will_be_chosen_for_it() -> None:
    a, b = handle("unified", "a", queue_seconds=9.0), handle("unified", "b")
    routes, wanted = router([a, b]), demand()
    present = Predictor().choose_nodes([a], [a], wanted, lambda *_: True)
    assert present is not None
    nothing: frozenset[Any] = frozenset()
    moved = routes.find_better("m", wanted, present, nothing, nothing)
    assert moved is not None and moved.decode_node is b
    assert routes.find_better("m", wanted, present, frozenset([b]), nothing) is None
    # The other node has room for the prompt, but not for the answer.
    assert b.info is not None
    b.claimed = b.info = msgspec.structs.replace(b.info, context_length=10_001)
    moved = routes.find_better("m", wanted, present, nothing, nothing)
    assert moved is not None and (moved.first_node, moved.decode_node) == (b, a)
    assert routes.find_better("m", wanted, present, nothing, frozenset([(b, a)])) is None
