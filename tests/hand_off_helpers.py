"""Pairs of real nodes in which a hand-off stops at the place that a test wants to look at."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

from tiny import tiny_cluster

if TYPE_CHECKING:
    from pathlib import Path

    from cluster import Cluster

    from pd.launch import NodeServer


def scripted_cluster(directory: Path, *rules: dict[str, Any], **settings: Any) -> Cluster:
    """A pair over the fake backend under these rules."""
    script = directory / "script.json"
    script.write_text(json.dumps({"seed": 1, "rules": rules}))
    return tiny_cluster(transfer_backend="fake", fake_script=script, **settings)


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
