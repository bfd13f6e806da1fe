"""What must follow when a bit of one prompt's KV is wrong, which ``damaged_decode.py`` sees to."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
from cluster import Cluster
from e2e import damaged_decode
from processes import Stream, deployment

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from backends import Backend

OUTPUT_TOKENS = 12
_LENGTHS = (700, 20, 90, damaged_decode.DAMAGED_TOKENS - 1, 500, 64)


@dataclass
class Asked:
    """Prompts, and the tokens that one unified node gave for them."""

    prompts: list[list[int]]
    damaged: list[int]
    continued: list[int]
    expected: list[list[int]]
    expected_continued: list[int]


def make_asked(model: Path, seed: int) -> Asked:
    """Some good prompts, one to be damaged, and one that begins with that."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in _LENGTHS]
    damaged = [rng.randrange(256) for _ in range(damaged_decode.DAMAGED_TOKENS)]
    continued = [*damaged, rng.randrange(256)]
    with Cluster(model, prefill=0, decode=0, unified=1) as cluster:
        expected = [
            cluster.client.generate(p, cluster.unified, max_tokens=OUTPUT_TOKENS).tokens()
            for p in [*prompts, continued]
        ]
    return Asked(prompts, damaged, continued, expected[:-1], expected[-1])


def check_damage(
    model: Path,
    logs: Path,
    asked: Asked,
    backend: Backend,
    *,
    devices: Sequence[str] = ("auto",),
    node_flags: Sequence[str] = (),
) -> None:
    """1P1D with ``--kv-digest``, without failover: the damaged request fails, and nothing else."""
    flags = ["--transfer-backend", backend.flag, "--kv-digest", *node_flags]
    with deployment(
        model,
        logs,
        node_flags=flags,
        prefill_flags=["--device", devices[0]],
        decode_flags=["--device", devices[-1]],
        decode_program=[damaged_decode.__file__],
        proxy_flags=["--failover", "off"],
        env=backend.env,
    ) as running:
        lives = [node.server_info()["instance_id"] for node in running.nodes]
        for _ in range(3):
            good = [running.stream(p, OUTPUT_TOKENS) for p in asked.prompts[::2]]
            damaged = running.stream(asked.damaged, OUTPUT_TOKENS)
            good += [running.stream(p, OUTPUT_TOKENS) for p in asked.prompts[1::2]]
            _fails(damaged.join())
            for stream, expected in zip(
                good, asked.expected[::2] + asked.expected[1::2], strict=True
            ):
                assert stream.join().succeeded_as(expected), (stream, stream.output, expected)
            running.wait_idle()
            for node in running.nodes:  # so that all is sent again
                httpx.post(f"{node.url}/flush_cache").raise_for_status()
        _fails(running.stream(asked.damaged, OUTPUT_TOKENS).join())
        # None of it is in a cache.
        stream = running.stream(asked.continued, OUTPUT_TOKENS).join()
        assert stream.succeeded_as(asked.expected_continued), (stream, stream.output)
        running.wait_idle()
        assert [node.server_info()["instance_id"] for node in running.nodes] == lives


def _fails(stream: Stream) -> None:
    """After the first token at most, which comes from the prefill node."""
    assert stream.error is not None, f"{stream}: {stream.output}"
    assert "damaged on its way" in stream.error["message"], stream
    assert len(stream.output) <= 1, stream
