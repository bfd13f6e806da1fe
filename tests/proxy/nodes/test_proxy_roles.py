"""Roles of elastic nodes move to where the demand is, or where an administrator wants them."""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING

import msgspec
import pytest
from elastic_nodes import handle, report

from pd.core.messages import NodeHeartbeat, RoleState
from pd.node.role_lease import RoleLease
from pd.proxy.nodes.role_lease import DecisionLease
from pd.proxy.nodes.roles import RoleBalancer

if TYPE_CHECKING:
    from proxy_cluster import Cluster

    from pd.core.node_info import Role
    from pd.proxy.nodes.node_handle import NodeHandle


class Fleet:
    """One prefill and two decode nodes, or the other way round, and a clock."""

    def __init__(self, *roles: str) -> None:
        self.nodes = [handle(role, f"{role}-{index}") for index, role in enumerate(roles)]
        for node in self.nodes:
            node.roles = RoleState(decider="me", term=1)
        lease = DecisionLease("me", self.nodes)
        self.balancer = RoleBalancer(self.nodes, lease, self.move)
        self.now = 1000.0
        self.balancer.rebalance_roles(self.now)
        self.now += 30.0  # the pause of a proxy that begins to decide

    @staticmethod
    def move(node: NodeHandle, role: Role) -> None:
        """The node follows the order at once."""
        node.role = role

    @property
    def roles(self) -> list[str]:
        return [node.role for node in self.nodes]

    def load(self, queue: float, streams: int) -> None:
        """What every node of a role reports."""
        for node in self.nodes:
            if node.role == "prefill":
                report(node, queue_seconds=queue, prompt_share=min(1.0, 0.2 + queue))
            else:
                report(node, streams=streams)

    def run(self, seconds: float, queue: float, streams: int) -> None:
        for _ in range(int(2 * seconds)):
            self.load(queue, streams)
            self.balancer.rebalance_roles(self.now)
            self.now += 0.5


def test_a_decode_node_helps_when_prompts_wait_for_long(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet("prefill", "decode", "decode")
    with caplog.at_level(logging.INFO):
        fleet.run(9, queue=3.0, streams=20)
        assert fleet.roles == ["prefill", "decode", "decode"], "not long enough yet"
        fleet.run(3, queue=3.0, streams=20)
    assert sorted(fleet.roles) == ["decode", "prefill", "prefill"]
    assert "is a prefill node from now on: prompts wait for" in caplog.text


def test_a_prefill_node_helps_when_decode_nodes_are_full() -> None:
    fleet = Fleet("prefill", "prefill", "decode")
    fleet.run(12, queue=0.0, streams=300)
    assert sorted(fleet.roles) == ["decode", "decode", "prefill"]


@pytest.mark.parametrize(("queue", "streams"), [(0.5, 20), (3.0, 250), (0.0, 20)])
def test_nothing_moves_without_need_or_where_the_other_role_is_busy_too(
    queue: float, streams: int
) -> None:
    fleet = Fleet("prefill", "prefill", "decode", "decode")
    fleet.run(60, queue, streams)
    assert fleet.roles == ["prefill", "prefill", "decode", "decode"]


def test_demand_that_comes_and_goes_moves_nothing() -> None:
    fleet = Fleet("prefill", "decode", "decode")
    for _ in range(10):
        fleet.run(6, queue=3.0, streams=20)
        fleet.run(6, queue=0.0, streams=20)
    assert fleet.roles == ["prefill", "decode", "decode"]


def test_bursts_that_follow_one_another_are_demand() -> None:
    """Prompts wait for more than a second on average, though not at every moment."""
    fleet = Fleet("prefill", "decode", "decode")
    for _ in range(8):
        fleet.run(1.5, queue=3.0, streams=20)
        fleet.run(0.5, queue=0.0, streams=20)
    assert sorted(fleet.roles) == ["decode", "prefill", "prefill"]


def test_a_node_that_is_needed_where_it_is_stays() -> None:
    """Two nodes of a role carry what one cannot, so a move would be taken back, again and again."""
    fleet, roles = Fleet("prefill", "decode", "decode"), set()
    for _ in range(300):
        few = fleet.roles.count("prefill") == 1
        fleet.run(0.5, queue=3.0 if few else 0.0, streams=130 if few else 260)
        roles.add(tuple(fleet.roles))
    fleet = Fleet("prefill", "prefill", "decode")
    for _ in range(300):
        few = fleet.roles.count("decode") == 1
        for node in fleet.nodes:
            if node.role == "prefill":
                report(node, prompt_share=0.6 if few else 1.0, queue_seconds=0.0 if few else 3.0)
            else:
                report(node, streams=300 if few else 100)
        fleet.balancer.rebalance_roles(fleet.now)
        fleet.now += 0.5
        roles.add(tuple(fleet.roles))
    assert roles == {("prefill", "decode", "decode"), ("prefill", "prefill", "decode")}


def test_moves_follow_one_another_slowly() -> None:
    fleet = Fleet("prefill", *["decode"] * 4)
    fleet.run(35, queue=3.0, streams=20)
    assert fleet.roles.count("prefill") == 2
    fleet.run(20, queue=3.0, streams=20)
    assert fleet.roles.count("prefill") == 3


def test_the_last_node_of_a_role_keeps_it() -> None:
    fleet = Fleet("prefill", "decode")
    fleet.run(60, queue=3.0, streams=0)
    fleet.run(60, queue=0.0, streams=400)
    assert fleet.roles == ["prefill", "decode"]


def test_a_role_that_was_set_stays() -> None:
    fleet = Fleet("prefill", "decode", "decode")
    fixed: NodeHandle = fleet.nodes[1]
    fixed.role_is_fixed = True
    fleet.run(12, queue=3.0, streams=20)
    assert fleet.roles == ["prefill", "decode", "prefill"]


def test_only_the_proxy_with_most_leases_moves_roles() -> None:
    fleet = Fleet("prefill", "decode", "decode", "decode")
    for node in fleet.nodes[:2]:
        node.roles = RoleState(decider="another", term=1)
    fleet.run(30, queue=3.0, streams=20)
    assert fleet.roles.count("prefill") == 1, "half of the leases are too few"
    fleet.nodes[0].roles = RoleState(decider="me", term=2)
    fleet.run(29, queue=3.0, streams=20)
    assert fleet.roles.count("prefill") == 1, "the other proxy may have moved a node just now"
    fleet.run(3, queue=3.0, streams=20)
    assert fleet.roles.count("prefill") == 2
    assert fleet.nodes[1].role == "decode", "the lease of that node has another proxy"


@pytest.mark.parametrize(
    ("deciders", "wanted"),
    [
        (["", "", ""], True),
        (["me", "", ""], True),
        (["a", "", ""], True),
        (["x", ""], True),  # me < x
        (["a", ""], False),
        (["me", "a", ""], True),
        (["a", "a", ""], False),
        (["me", "a"], False),
        (["me", "me", "a"], True),
        (["me", "x", "x"], False),
    ],
)
def test_leases_that_were_dealt_out_end_up_with_one_proxy(
    deciders: list[str], wanted: bool
) -> None:
    fleet = Fleet(*["decode"] * len(deciders))
    for node, decider in zip(fleet.nodes, deciders, strict=True):
        node.roles = RoleState(decider=decider)
    assert DecisionLease("me", fleet.nodes).is_wanted() is wanted


def deal_out(views: dict[str, range], seed: int) -> dict[int, str]:
    """Let proxies with some of the nodes each ask for leases, in an order that is drawn; returns
    the proxy that has the lease of each node in the end."""
    rng, now = random.Random(seed), 0.0
    leases = {number: RoleLease() for view in views.values() for number in view}
    known = {
        name: {number: handle("decode", f"node-{number}") for number in view}
        for name, view in views.items()
    }
    for turn in range(400):
        name = rng.choice(list(views))
        nodes = known[name]
        wanted = turn < len(views) or DecisionLease(name, list(nodes.values())).is_wanted()
        for number in rng.sample(list(nodes), len(nodes)):
            leases[number].note_request(name.encode(), now, wanted=wanted)
            nodes[number].roles = leases[number].describe_state(now)
        now += 0.02
    return {number: lease.describe_state(now).decider for number, lease in leases.items()}


def test_one_of_several_proxies_over_the_same_nodes_gets_all_leases(seed: int) -> None:
    for offset in range(20):
        found = deal_out(dict.fromkeys("abcd", range(5)), seed + offset)
        assert len(set(found.values())) == 1, seed + offset


def test_a_proxy_that_shares_few_nodes_with_another_decides_on_its_own(seed: int) -> None:
    """It gets the leases of more than half of its nodes, whichever proxy has the shared one."""
    for offset in range(20):
        found = deal_out({"a": range(1, 3), "b": range(2, 10)}, seed + offset)
        assert [found[number] for number in range(3, 10)] == ["b"] * 7, seed + offset


def heartbeat(node: NodeHandle, roles: RoleState | None) -> None:
    beat = NodeHeartbeat(
        to="me",
        sender=node.instance_id,
        ready=True,
        queued_tokens=0,
        running=0,
        roles=roles,
        answers=node.load.mark_heartbeat(),
    )
    node.take_heartbeat(beat)


def start_again(node: NodeHandle, **info: object) -> None:
    node.mark_lost("it died")
    assert node.info is not None
    node.meet_instance(msgspec.structs.replace(node.info, **{"instance_id": "another", **info}))


def test_a_node_that_is_started_again_has_its_own_role() -> None:
    node = handle("prefill", "node")
    heartbeat(node, RoleState(role="decode", decider="another", term=1))
    assert node.role == "decode"
    start_again(node)
    heartbeat(node, RoleState())
    assert node.role == "prefill"


def test_a_node_that_is_started_again_gets_the_role_that_an_administrator_set() -> None:
    node = handle("prefill", "node")
    heartbeat(node, RoleState(role="decode", fixed=True))
    start_again(node)
    heartbeat(node, RoleState())
    assert node.role == "decode" and node.lacks_order
    # A proxy that did not know of it moved the node first.
    heartbeat(node, RoleState(role="unified", decider="another", term=1))
    assert node.role == "decode" and node.lacks_order


def test_a_role_that_an_administrator_gave_back_is_no_more_fixed_at_any_proxy() -> None:
    node = handle("prefill", "node")
    heartbeat(node, RoleState(role="decode", fixed=True, administered=1))
    start_again(node)
    heartbeat(node, RoleState())
    assert node.lacks_order
    heartbeat(node, RoleState(role="decode", fixed=True, administered=1))
    heartbeat(node, RoleState(role="decode", administered=2))
    assert (node.role, node.role_is_fixed, node.lacks_order) == ("decode", False, False)
    heartbeat(node, RoleState(role="unified", decider="another", term=1, administered=2))
    assert node.role == "unified"


def test_a_role_that_was_given_back_while_the_node_was_out_of_reach_is_given_back_later() -> None:
    node = handle("prefill", "node")
    heartbeat(node, RoleState(role="decode", fixed=True, administered=1))
    node.mark_lost("its link is cut")
    node.free_role()
    heartbeat(node, RoleState(role="decode", fixed=True, administered=1))
    assert (node.role_is_fixed, node.lacks_order) == (False, True)
    # Another proxy's administrator has fixed it since.
    heartbeat(node, RoleState(role="unified", fixed=True, administered=2))
    assert (node.role, node.role_is_fixed, node.lacks_order) == ("unified", True, False)
    node.free_role()
    heartbeat(node, RoleState(role="unified", administered=3))
    assert (node.role_is_fixed, node.lacks_order) == (False, False)


def test_a_restarted_node_counts_orders_of_administrators_anew() -> None:
    node = handle("prefill", "node")
    heartbeat(node, RoleState(role="decode", fixed=True, administered=3))
    start_again(node)
    # Meanwhile another proxy fixed it, and an administrator gave it back there.
    heartbeat(node, RoleState(role="decode", administered=2))
    assert (node.role_is_fixed, node.lacks_order) == (False, False)


def test_a_node_that_is_elastic_no_more_has_the_role_with_which_it_was_added() -> None:
    node = handle("prefill", "node")
    heartbeat(node, RoleState(role="decode", fixed=True))
    start_again(node, elastic=False)
    heartbeat(node, None)
    assert node.role == "prefill" and not node.role_is_fixed


def test_every_proxy_has_an_elastic_node_in_the_role_with_which_it_was_started() -> None:
    node = handle("prefill", "node")
    node.role = node.added_as = "decode"
    heartbeat(node, RoleState())
    assert node.role == "prefill"


def test_only_elastic_nodes_change_their_role(cluster: Cluster) -> None:
    fixed, elastic = cluster.node("decode"), cluster.node("prefill", elastic=True)
    client = cluster.client()
    refused = client.post(f"/workers/{fixed.instance_id}", json={"role": "prefill"})
    assert refused.status_code == 400
    assert "runs without --elastic auto" in refused.json()["error"]["message"]
    changed = client.post(f"/workers/{elastic.instance_id}", json={"role": "decode"})
    assert (changed.status_code, changed.json()["role"]) == (200, "decode")
    wrong = client.post(f"/workers/{elastic.instance_id}", json={"role": "queen"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "role")
    refused = client.post(f"/workers/{fixed.instance_id}", json={"role": "auto"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "role")
    released = client.post(f"/workers/{elastic.instance_id}", json={"role": "auto"})
    assert (released.status_code, released.json()["role"]) == (200, "decode")
    assert client.post("/workers/nobody", json={"role": "decode"}).status_code == 404


def test_each_model_has_roles_of_its_own() -> None:
    """The last node of a role of one model stays, whatever nodes another model has."""
    fleet = Fleet("prefill", "decode", "prefill", "decode", "decode")
    for node in fleet.nodes[:2]:
        assert node.info is not None
        node.claimed = node.info = msgspec.structs.replace(node.info, model="other")
    fleet.run(30, queue=3.0, streams=20)
    assert fleet.roles[:2] == ["prefill", "decode"]
    assert fleet.roles[2:] == ["prefill", "prefill", "decode"]
