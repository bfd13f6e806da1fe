"""``--kv-digest``: KV that was damaged on its way fails its request and nothing else."""

from __future__ import annotations

import json
import random
import time
from typing import TYPE_CHECKING

import pytest
from backends import IN_PROCESS, PROCESSES, TCP, Backend, over
from cluster import Cluster
from damage import check_damage, make_asked

from pd.core.errors import NodeFailedError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DAMAGE = "rules: [{do: corrupt, token: 20, layer: 1, rooms: 2}]"


def prompt(number: int, length: int = 60) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(256) for _ in range(length)]


@over(IN_PROCESS)
def test_intact_transfers_pass_whatever_the_page_sizes(
    checkpoint: Callable[[str], Path], backend: Backend
) -> None:
    with Cluster(
        checkpoint("qwen3"),
        unified=1,
        transfer_backend=backend.flag,
        kv_digest=True,
        decode_settings={"page_size": 4, "dtype": "float32"},
    ) as cluster:
        for number in range(3):
            tokens = prompt(1, 30 + 30 * number)  # grows, so that only a part is sent
            split = cluster.client.generate(tokens, cluster.pair).tokens()
            assert split == cluster.client.generate(tokens, cluster.unified).tokens()
        cluster.wait_idle()


@pytest.mark.parametrize("digest", [False, True])
def test_a_flipped_byte_is_noticed_with_the_digest_alone(
    checkpoint: Callable[[str], Path], tmp_path: Path, digest: bool
) -> None:
    script = tmp_path / "script.yaml"
    script.write_text(DAMAGE)
    settings = {"transfer_backend": "fake", "fake_script": script, "kv_digest": digest}
    with Cluster(checkpoint("qwen3"), **settings) as cluster:
        cluster.client.generate(prompt(1), cluster.pair).tokens()
        damaged = cluster.client.generate(prompt(2), cluster.pair)
        if digest:
            with pytest.raises(TransferError, match="damaged on its way"):
                damaged.tokens()
        else:
            damaged.tokens()
        assert len(cluster.client.generate(prompt(3), cluster.pair).tokens()) == 16
        cluster.wait_idle()


def test_a_flipped_byte_in_any_page_fails_its_request(
    checkpoint: Callable[[str], Path], tmp_path: Path, seed: int
) -> None:
    """Every page of a prompt in turn; token, layer, K or V, head and dimension are drawn."""
    model, rng, length, page = checkpoint("qwen3"), random.Random(seed), 200, 16
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    rules = [
        {
            "do": "corrupt",
            "rooms": room,
            "token": rng.randrange(start, min(start + page, length)),
            "layer": rng.randrange(layers),
            "part": rng.choice("kv"),
            "byte": rng.randrange(1 << 16),  # wraps at the row's end
        }
        for room, start in enumerate(range(0, length, page), start=1)
    ]
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"rules": rules}))
    settings = {"transfer_backend": "fake", "fake_script": script, "kv_digest": True}
    with Cluster(model, page_size=page, **settings) as cluster:
        for room in range(1, len(rules) + 1):
            request = cluster.client.generate(prompt(room, length), cluster.pair)
            with pytest.raises(TransferError, match="damaged on its way"):
                request.tokens()
        assert len(cluster.client.generate(prompt(0, length), cluster.pair).tokens()) == 16
        cluster.wait_idle()


@over(PROCESSES, sample=[TCP])
def test_a_flipped_bit_fails_its_request_alone(
    checkpoint: Callable[[str], Path], tmp_path: Path, backend: Backend, seed: int
) -> None:
    model = checkpoint("qwen3")
    check_damage(model, tmp_path, make_asked(model, seed), backend)


def test_both_nodes_must_use_it(checkpoint: Callable[[str], Path]) -> None:
    with Cluster(checkpoint("qwen3"), prefill_settings={"kv_digest": True}) as cluster:
        request = cluster.client.generate(prompt(1), cluster.pair)
        with pytest.raises(NodeFailedError, match=r"--kv-digest differs.*True.*False"):
            request.tokens()


@over(IN_PROCESS, sample=[TCP])
def test_aborts_at_any_moment_leave_nothing_behind_and_hurt_nobody(
    checkpoint: Callable[[str], Path], backend: Backend, seed: int
) -> None:
    rng = random.Random(seed)
    settings = {"transfer_backend": backend.flag, "kv_digest": True}
    with Cluster(checkpoint("qwen3"), unified=1, **settings) as cluster:
        prompts = [prompt(seed + number, rng.randrange(40, 200)) for number in range(8)]
        expected = [cluster.client.generate(p, cluster.unified).tokens() for p in prompts]
        kept = []
        for _ in range(24):
            index = rng.randrange(len(prompts))
            # Without a shared prefix each transfer is whole.
            request = cluster.client.generate(
                prompts[index], cluster.pair, namespace=str(rng.random())
            )
            if rng.random() < 0.3:
                kept.append((index, request))
            else:
                time.sleep(rng.random() * 0.03)
                cluster.client.abort(request)
        for index, request in kept:
            assert request.tokens() == expected[index], f"prompt {index}, seed {seed}"
        cluster.wait_idle()
