"""Fixtures of tests that start deployments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from cluster_helpers import ROOT, Command
from processes import python_path

from pd.cluster.host_processes import kill_all_with
from pd.cluster.state import ClusterState

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where runs are recorded. Processes of the test find pd, and none of them stays."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONPATH", python_path(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield tmp_path / "state"
    Command.stop_all()
    for file in (tmp_path / "state").glob("pd/clusters/*/state.json"):
        state = msgspec.json.decode(file.read_bytes(), type=ClusterState)
        for host in state.hosts:
            kill_all_with(state.token_on(host))
