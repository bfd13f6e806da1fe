"""Elastic nodes as a proxy knows them, without processes."""

from __future__ import annotations

from typing import Any

from pd.core.node_load import NodeLoad
from pd.core.step_cost import StepCost
from pd.proxy.nodes.node_handle import Endpoints, NodeHandle, Pages, ServerInfo

# 40,000 prompt tokens a second, and 6 ms for a step of 20 streams.
COST = StepCost(base=5e-3, mixed=1e-3, middle=2.5e-5, rest=2.5e-5, stream=5e-5)
ITL = 0.02


def handle(role: Any, name: str, **load: Any) -> NodeHandle:
    """An elastic node without a process."""
    made = NodeHandle(role, f"http://{name}")
    made.claimed = made.info = ServerInfo(
        role=role,
        instance_id=name,
        model="m",
        page_size=4,
        context_length=100_000,
        endpoints=Endpoints("tcp://x:1", f"http://boot-{name}"),
        pages=Pages(50_000),
        elastic=True,
    )
    made.is_alive = made.is_accepting = True
    report(made, **load)
    return made


def report(node: NodeHandle, **load: Any) -> None:
    fields = {"cost": COST, "itl": ITL, "free_tokens": 200_000, "chunk": 8192} | load
    fields.setdefault("answering", fields.get("streams", 0))
    node.load.take_report(NodeLoad(**fields), node.load.mark_heartbeat())
