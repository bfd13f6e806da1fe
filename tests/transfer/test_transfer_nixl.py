"""NIXL between processes that are killed, stopped and cut off in the middle of writes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from staged_nodes import Nodes, play
from transfer_helpers import SEED, is_installed, wait_until

from pd.core.errors import TransferError
from pd.transfer.base import TransferState

pytestmark = pytest.mark.skipif(
    not is_installed("nixl") and not os.environ.get("CI"), reason="the library nixl is missing"
)

TLS = [
    pytest.param({}, id="local"),
    pytest.param({"UCX_TLS": "tcp"}, id="tcp"),
    pytest.param({"UCX_TLS": "all"}, id="all", marks=pytest.mark.full),
]


@pytest.fixture(params=TLS)
def nodes(request):
    made = Nodes("nixl", request.param)
    yield made
    made.close()


def test_pages_never_change_after_their_release(nodes) -> None:
    print(f"PD_TEST_SEED={SEED}")
    play(nodes, random.Random(f"{SEED}/nixl"), 12)


@pytest.mark.full
def test_pages_never_change_after_their_release_in_many_rounds(nodes) -> None:
    print(f"PD_TEST_SEED={SEED}")
    play(nodes, random.Random(f"{SEED}/nixl/many"), 150)


def test_a_killed_peer_is_noticed_at_once(nodes) -> None:
    nodes.complete(*nodes.begin())
    room, _ = nodes.begin()
    nodes.d.kill()
    begun = time.monotonic()
    # What was sent before the kill may be complete, which is for the node's heartbeat to find out.
    nodes.end(nodes.p, room)
    assert time.monotonic() - begun < 2.0
    room, later = room + 1, nodes.d.info.instance_id
    with pytest.raises(TransferError, match=r"is gone|was lost|not connected") as caught:
        wait_for_refusal(nodes, later, room)
    assert later in str(caught.value)


def wait_for_refusal(nodes: Nodes, peer: str, room: int) -> None:
    """A room for a dead peer fails with a clear error."""
    from pd.core.messages import Reservation

    asked = Reservation(to="P", sender="D", room=room.to_bytes(16), epoch=room, cached=(0,))
    nodes.p.call("send_part", peer, asked)
    wait_until(lambda: nodes.p.call("state", room)[0] is TransferState.FAILED, "the failure")
    raise TransferError(nodes.p.call("state", room)[1])


def test_idle_nodes_cost_nothing(nodes) -> None:
    nodes.cost_nothing_idle()


SILENT = """
import sys; sys.path[:0] = {path!r}
import logging; logging.basicConfig(level=logging.INFO)
from transfer_helpers import make_pool, introduce, reservation, hand_off
import numpy as np
from pd.transfer.staged.nixl import NixlManager
a, b = make_pool(64, 4), make_pool(64, 4)
p, d = NixlManager(a, "P"), NixlManager(b, "D")
introduce(p, "P", d, "D", a)
pages = np.arange(16, dtype=np.int32)
r = d.receiver("P", bytes(16), 1, pages, (0,), 64)
s = p.sender("D", reservation(r, bytes(16), 1, 0), pages, 64)
s.send(0, 64, 0, 3)
hand_off(s, r)
p.close(); d.close()
"""


def test_the_library_neither_speaks_nor_crashes_at_the_end() -> None:
    code = SILENT.format(path=sys.path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "NIXL" not in done.stderr
    assert "UCX" not in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("name", ["test_transfer_late_writes.py", "test_transfer_backends.py"])
def test_the_tests_of_every_backend_pass_over_sockets_too(name) -> None:
    """In a process of their own: UCX reads its environment once."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    chosen = ["-m", "not full", "-k", "nixl", str(Path(__file__).parent / name)]
    done = subprocess.run(
        command + chosen,
        env=os.environ | {"UCX_TLS": "tcp"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
