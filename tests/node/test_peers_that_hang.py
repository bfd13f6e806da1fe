"""A node gives up a peer that answers nothing while KV is on its way between the two."""

from __future__ import annotations

import threading
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pytest
from cluster import is_idle, random_prompts, wait_until
from lacking import require_backend
from tiny import tiny_cluster

from pd.core.errors import NodeFailedError
from pd.transfer.fake import link as fake_link

if TYPE_CHECKING:
    from pd.launch import NodeServer

# What takes KV in on a decode node, and sends it on a prefill node: the method of its manager.
HELD = {
    ("decode", "tcp"): "_inbox._read_payload",
    ("decode", "fake"): "nic._perform_next",
    ("decode", "nixl"): "_incoming.land_blocks",
    ("decode", "mooncake"): "_incoming.land_blocks",
    ("prefill", "tcp"): "sender",
    ("prefill", "fake"): "sender",
    ("prefill", "nixl"): "_outgoing.thread._begin_gather",
    ("prefill", "mooncake"): "_outgoing.thread._begin_gather",
}
# So long the peer hangs, and half as long others may take: with no CPU they take long, too.
HELD_SECONDS = 120.0
PATIENCE = HELD_SECONDS / 2


class Held:
    """One method of a node's transfer manager, which waits until it is released."""

    def __init__(self, server: NodeServer, path: str) -> None:
        *owners, name = path.split(".")
        transfer = server.node.transfers[0]
        owner = attrgetter(".".join(owners))(transfer) if owners else transfer
        self._method = getattr(owner, name)
        self._released = threading.Event()
        self.entered = threading.Event()
        setattr(owner, name, self._wait)

    def _wait(self, *args: Any, **kwargs: Any) -> Any:
        self.entered.set()
        assert self._released.wait(2 * HELD_SECONDS)
        return self._method(*args, **kwargs)

    def release(self) -> None:
        self._released.set()


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    "backend",
    [
        "tcp",
        "fake",
        pytest.param("nixl", marks=pytest.mark.full),
        pytest.param("mooncake", marks=pytest.mark.full),
    ],
)
def test_streams_of_other_peers_go_on_while_a_peer_that_hangs_is_given_up(
    monkeypatch: pytest.MonkeyPatch, role: str, backend: str
) -> None:
    """``role``: of the node that gives its peer up."""
    require_backend(backend)
    # The backend may wait as long for what is on the wire; the node may not.
    monkeypatch.setattr(fake_link, "_CLOSE_SECONDS", HELD_SECONDS)
    prompts = random_prompts(61, [40] * 8)
    twice = {"decode": 2} if role == "prefill" else {"prefill": 2}
    with tiny_cluster(**twice, transfer_backend=backend) as cluster:
        prefill, decode = cluster.prefill[0], cluster.decode[0]
        hung = (cluster.prefill[-1], cluster.decode[-1])
        node, peer = (prefill, hung[1]) if role == "prefill" else (decode, hung[0])
        for pair in ((prefill, decode), hung):
            cluster.client.generate(next(prompts), pair, max_tokens=4).tokens(PATIENCE)
        held = Held(peer, HELD[peer.node.role, backend])
        lost = [cluster.client.generate(next(prompts), hung, max_tokens=4) for _ in range(3)]
        assert held.entered.wait(PATIENCE)
        stream = cluster.client.generate(next(prompts), (prefill, decode), max_tokens=900)
        wait_until(lambda: len(stream.choices[0].tokens) > 1, PATIENCE)
        given_up = threading.Event()

        def give_up() -> None:
            (end,) = node.node.ends
            end.drop_peer(peer.instance_id, "the test said so")
            given_up.set()

        before = len(stream.choices[0].tokens)
        node.node.control.call_soon(give_up)
        # The lock of the node is free, so that a whole new request passes both of its steps.
        other = cluster.client.generate(next(prompts), (prefill, decode), max_tokens=4)
        assert len(other.tokens(PATIENCE)) == 4
        # It may have come to its end before this thread looked.
        wait_until(lambda: len(stream.choices[0].tokens) > before or stream.done.is_set(), PATIENCE)
        assert stream.error is None
        assert given_up.is_set()
        for request in lost:
            assert request.done.wait(PATIENCE)
        # A call that was under way when the method was replaced may have served one of them.
        assert any(isinstance(request.error, NodeFailedError) for request in lost)
        node.node.check_books()
        held.release()
        cluster.client.abort(stream)
        cluster.wait_idle(PATIENCE)
        assert is_idle(node)
