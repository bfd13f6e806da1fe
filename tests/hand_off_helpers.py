"""Pairs of real nodes in which a hand-off stops at the place that a test wants to look at."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

from cluster import random_prompts, wait_until
from raw_peer import SOON
from tiny import tiny_cluster

if TYPE_CHECKING:
    from pathlib import Path

    from cluster import Cluster, Pending

    from pd.launch import NodeServer


def scripted(directory: Path, *rules: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a pair over the fake backend with these rules."""
    script = directory / "script.json"
    script.write_text(json.dumps({"seed": 1, "rules": rules}))
    return {"transfer_backend": "fake", "fake_script": script}


def scripted_cluster(directory: Path, *rules: dict[str, Any], **settings: Any) -> Cluster:
    """Start a pair of the tiny model over the fake backend with these rules."""
    return tiny_cluster(**scripted(directory, *rules), **settings)


class Gate:
    """Holds a node's forward passes until it is opened, without holding anything else."""

    def __init__(self, server: NodeServer) -> None:
        self._runner = server.node.engine.runner
        self._forward = self._runner.forward
        self._open = threading.Event()
        self.entered = threading.Event()
        self._runner.forward = self._wait

    def _wait(self, *args: Any) -> Any:
        self.entered.set()
        assert self._open.wait(30)
        return self._forward(*args)

    def open(self) -> None:
        self._open.set()
        self._runner.forward = self._forward


def pages(server: NodeServer) -> dict[str, int]:
    return server.node.server_info()["pages"]


def queues(server: NodeServer) -> dict[str, int]:
    return server.node.server_info()["queues"]


# ---- an abort in every state

STATES = (
    "P waits",
    "P computes",
    "in flight, not reserved",
    "in flight",
    "D waits",
    "D computes",
    "D streams",
)
# Once D has the KV, the prefill node has done its part.
BOTH = [(state, told) for state in STATES for told in ("prefill", "decode")]
CASES = [(state, told) for state, told in BOTH if told == "decode" or not state.startswith("D ")]
FOREVER = 3000
PROMPT = next(random_prompts(21, [40]))


def sent(cluster: Cluster, prompt: list[int] = PROMPT, **params: Any) -> Pending:
    return cluster.client.generate(prompt, cluster.pair, **{"max_tokens": 200} | params)


def rules(state: str) -> list[dict[str, Any]]:
    """Return the rules that keep a hand-off in a state, if no gate does."""
    delayed = {"in flight, not reserved": "delay_reservation", "in flight": "delay_write"}
    return [{"do": delayed[state], "seconds": FOREVER}] if state in delayed else []


def hold(state: str, cluster: Cluster, **params: Any) -> tuple[Pending, list[Gate]]:
    """Start a request that stays in a state until its gate opens."""
    prefill, decode = cluster.pair
    gates: list[Gate] = []
    if state in ("P waits", "P computes"):
        gates.append(Gate(prefill))
        if state == "P waits":
            sent(cluster, [1] * 8)
            assert gates[0].entered.wait(5)
    if state in ("D waits", "D computes"):
        gates.append(Gate(decode))
        if state == "D waits":
            sent(cluster, [1] * 8)
            assert gates[0].entered.wait(5)
    request = sent(cluster, **params)
    checks = {
        "P waits": lambda: queues(prefill)["waiting"] == 1,
        "P computes": lambda: gates[0].entered.is_set(),
        "in flight, not reserved": lambda: queues(prefill)["in_flight"] == 1,
        "in flight": lambda: queues(prefill)["in_flight"] and queues(decode)["transfer"],
        "D waits": lambda: queues(decode)["waiting"] == 1,
        "D computes": lambda: gates[0].entered.is_set(),
        "D streams": lambda: len(request.choices[0].tokens) > 3,
    }
    wait_until(checks[state], 5, lambda: (queues(prefill), queues(decode)))
    return request, gates


def check_abort(cluster: Cluster, state: str, told: str, **params: Any) -> None:
    """Check that an abort sent to one node ends the room on both and frees everything. Nodes run
    one request at a time, with the :func:`rules` of the state."""
    request, gates = hold(state, cluster, **params)
    request.nodes = [cluster.prefill[0] if told == "prefill" else cluster.decode[0]]
    cluster.client.abort(request)

    def ended(node: Any) -> bool:
        found = node.requests.find_request(request.room)
        return found is None or found.state.is_terminal

    for server in cluster.pair:
        wait_until(lambda server=server: ended(server.node), SOON, server.node.server_info)
    if state == "P computes":
        assert pages(cluster.prefill[0])["locked"] > 0, "a launched step still writes there"
    for gate in gates:
        gate.open()
    cluster.client.abort(request)
    for server in cluster.pair:
        with server.node.core.events.event():
            server.node.abort_rid(None)
    cluster.wait_idle()
