"""Everything at once, in random order: no wrong token, no lost page, nobody left behind."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import pytest
from cluster import random_prompts
from hand_off_helpers import scripted_cluster
from requests_for_tests import make_generate
from tiny import TOKEN_BYTES, tiny_cluster, tiny_model

from pd.core.errors import NodeFailedError, PDError, TransferError
from pd.models.config_reader import read_model_config
from pd.transfer.fake.sender import FakeSender

if TYPE_CHECKING:
    from pathlib import Path

    from cluster import Cluster, Pending

    from pd.launch import NodeServer

RULES = (
    {"do": "late_write", "seconds": [0.0, 0.2], "probability": 0.3},
    {"do": "duplicate_write", "seconds": [0.0, 0.2], "probability": 0.2},
    {"do": "lose_write", "seconds": [0.0, 0.1], "probability": 0.01},
    {"do": "delay_reservation", "seconds": [0.0, 0.2], "probability": 0.2},
    {"do": "fail_room", "probability": 0.03},
)
SMALL = {
    "kv_cache_tokens": 320,
    "reserved_decode_tokens": 4,
    "chunked_prefill_size": 48,
    "max_overtakes": 4,
}


class Soak:
    """Requests and mishaps in an order that the seed determines (their timing it does not)."""

    def __init__(self, cluster: Cluster, rng: random.Random, prompts: list[list[int]]) -> None:
        self.cluster, self.rng, self.prompts = cluster, rng, prompts
        self.sent: list[tuple[int, Pending]] = []
        self.aborted: set[bytes] = set()
        # Rooms whose request came to the prefill node once more, maybe after it had ended there.
        self.repeated: set[bytes] = set()

    def request(self) -> None:
        index = self.rng.randrange(len(self.prompts))
        nodes = self.rng.choice(self.cluster.prefill), self.rng.choice(self.cluster.decode)
        n = self.rng.choice((1, 1, 1, 3))
        pending = self.cluster.client.generate(self.prompts[index], nodes, max_tokens=12, n=n)
        self.sent.append((index, pending))

    def abort(self) -> None:
        """By the client, told to both nodes or, as when a message is lost, to one."""
        _, pending = self.rng.choice(self.sent)
        if not pending.done.is_set():
            self.aborted.add(pending.room)
            pending.nodes = self.rng.sample(pending.nodes, self.rng.choice((1, len(pending.nodes))))
            self.cluster.client.abort(pending)

    def lose_peer(self) -> None:
        """As if a lease had ended, on either side."""
        self.lost_peer = True
        prefill, decode = (
            self.rng.choice(self.cluster.prefill),
            self.rng.choice(self.cluster.decode),
        )
        if self.rng.random() < 0.5:
            prefill.node.sending.drop_peer(decode.instance_id, "the soak test said so")
        else:
            decode.node.control.call_soon(lambda: lose(decode, prefill))

    def repeat(self) -> None:
        """A request's message comes twice."""
        index, pending = self.rng.choice(self.sent)
        self.repeated.add(pending.room)
        prefill, decode = pending.nodes[0], pending.nodes[-1]
        message = make_generate(
            self.prompts[index],
            to=prefill.instance_id,
            sender=self.cluster.client.instance,
            room=pending.room,
            peer=decode.instance_id if decode is not prefill else "",
        )
        self.cluster.client._post(prefill, message)

    def flush(self) -> None:
        self.rng.choice(self.cluster.nodes).node.flush_cache()

    def check(self) -> None:
        for server in self.cluster.nodes:
            server.node.check_books()

    def run(self, steps: int, mishaps: list[Any]) -> None:
        self.request()
        for _ in range(steps):
            self.rng.choice([self.request, self.request, *mishaps])()
            time.sleep(self.rng.random() * 0.02)
            self.check()


def lose(decode: NodeServer, prefill: NodeServer) -> None:
    with decode.node.core.events.event():
        decode.node.receiving.drop_peer(prefill.instance_id, "the soak test said so")


# Tokens computed while the KV of one is sent: see pd/prefill_node/outgoing.py.
@pytest.mark.parametrize(
    "pace",
    [
        pytest.param(0.0, id="by-layers"),
        pytest.param(0.02, id="late", marks=pytest.mark.full),
        pytest.param(0.5, id="early", marks=pytest.mark.full),
    ],
)
def test_random_aborts_losses_and_late_writes_harm_nobody_else(
    tmp_path: Path, seed: int, pace: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    flops = read_model_config(tiny_model()).token_flops
    monkeypatch.setattr(FakeSender, "flops_per_byte", pace * flops / TOKEN_BYTES)
    rng = random.Random(seed)
    shared = next(random_prompts(seed, [40]))
    tails = random_prompts(seed + 1, [rng.randrange(1, 60) for _ in range(16)])
    prompts = [shared + tail if rng.random() < 0.5 else tail for tail in tails]
    with tiny_cluster(0, 0, 1) as cluster:
        client, nodes = cluster.client, cluster.unified
        expected = [client.generate(prompt, nodes, max_tokens=12).tokens() for prompt in prompts]
    # Planned ahead as on a GPU, where a chunk is processed after the next one was launched.
    small = SMALL | {"overlap_schedule": rng.choice(("on", "off"))}
    with scripted_cluster(tmp_path, *RULES, **small, prefill=2, decode=2) as cluster:
        soak = Soak(cluster, rng, prompts)
        soak.run(150, [soak.abort, soak.abort, soak.lose_peer, soak.repeat, soak.flush])
        outcomes = {"right": 0, "failed": 0, "aborted": 0}
        for index, pending in soak.sent:
            if pending.room in soak.aborted and not pending.done.wait(0):
                outcomes["aborted"] += 1
                continue
            try:
                result = pending.result(30)
            except (NodeFailedError, TransferError):
                outcomes["failed"] += 1
                soak.aborted.add(pending.room)
                continue
            except PDError:
                outcomes["aborted"] += 1
                continue
            assert all(tokens == expected[index] for tokens in result), f"prompt {index}"
            outcomes["right"] += 1
        for _, pending in soak.sent:
            if pending.room in soak.aborted | soak.repeated:
                cluster.client.abort(pending)  # as a proxy does: the other node hears of it too
        cluster.wait_idle(20)
        assert outcomes["right"] > 0, outcomes
        assert all(server.node.ready for server in cluster.nodes)
