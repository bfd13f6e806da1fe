"""A proxy that finds nodes of other releases of pd: it names both, and uses none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from failing_nodes import PROMPT
from fake_node import wait_until

from pd import __version__
from pd.core.messages import NodeHeartbeat
from pd.core.release import PROTOCOL, RELEASE

if TYPE_CHECKING:
    import httpx
    from proxy_cluster import Cluster

LATER: dict[str, Any] = {"version": "9.0", "protocol": 7}
BOTH = f"it runs pd 9.0 (protocol 7), this proxy pd {RELEASE}: run the same release of pd"


def problems(client: httpx.Client) -> list[str]:
    return [worker["problem"] or "" for worker in client.get("/workers").json()["workers"]]


@pytest.mark.parametrize(
    ("info", "theirs"),
    [
        (LATER, "pd 9.0 (protocol 7)"),
        ({"version": __version__}, f"pd {__version__} (protocol 1)"),
        ({"version": __version__, "protocol": PROTOCOL + 1}, f"pd {__version__} (protocol 3)"),
        ({"version": "9.0", "protocol": PROTOCOL}, "pd 9.0 (protocol 2)"),
        # Whatever else such a release says of itself.
        (LATER | {"pages": {"count": 5}, "dtype": 5, "endpoints": []}, "pd 9.0 (protocol 7)"),
        (LATER | {"sampling_defaults": {"heat": 1.0}, "of_a_later_release": []}, "pd 9.0"),
        ({"version": "\x1b[2J\n"}, r"pd '\x1b[2J\n (protocol 1)'"),
    ],
)
def test_readiness_names_both_releases_and_what_to_do(
    cluster: Cluster, info: dict[str, Any], theirs: str
) -> None:
    node = cluster.node("unified", **info)
    proxy = cluster.proxy(wait_ready=0.5)
    client = cluster.client(proxy)
    wait_until(lambda: "it runs" in problems(client)[0])
    response = client.get("/readiness")
    assert response.status_code == 503
    message = response.json()["error"]["message"]
    assert f"{node.url}: it runs {theirs}" in message
    assert f"this proxy pd {RELEASE}: run the same release of pd on all nodes" in message
    assert "--cluster-key-file" not in message
    assert node.heartbeats == {}, "no message was sent there"
    answer = client.post("/generate", json={"input_ids": PROMPT})
    assert (answer.status_code, RELEASE in answer.text) == (503, True)


def test_nodes_of_the_same_release_and_scripted_ones_serve(cluster: Cluster) -> None:
    cluster.node("prefill", version=__version__, protocol=PROTOCOL, of_no_interest={"a": 1})
    cluster.node("decode")
    client = cluster.client(text=False)
    wait_until(lambda: client.get("/readiness").status_code == 200)
    assert client.post("/generate", json={"input_ids": PROMPT}).status_code == 200


def test_a_node_that_is_restarted_as_another_release_is_used_no_more(cluster: Cluster) -> None:
    node = cluster.node("unified")
    client = cluster.client(text=False)
    wait_until(lambda: client.get("/readiness").status_code == 200)
    node.kill()
    node.overrides = LATER
    node.start()
    wait_until(lambda: BOTH in problems(client)[0])
    assert client.get("/readiness").status_code == 503
    node.kill()
    node.overrides = {}
    node.start()
    wait_until(lambda: client.get("/readiness").status_code == 200)


def test_a_heartbeat_of_another_release_is_not_taken(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever answers over HTTP in its place."""
    node = cluster.node("unified")
    made = NodeHeartbeat

    def later(**fields: Any) -> NodeHeartbeat:
        return made(**fields, release="9.0 (protocol 7)")

    monkeypatch.setattr("fake_node.NodeHeartbeat", later)
    client = cluster.client(cluster.proxy(wait_ready=0.5))
    wait_until(lambda: BOTH in problems(client)[0])
    assert client.get("/readiness").status_code == 503
    assert node.generates == []
