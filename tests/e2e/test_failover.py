"""A stream survives its nodes: whatever is killed, it goes on with the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from processes import deployment, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from processes import Deployment


def prompt(number: int, length: int = 40) -> list[int]:
    return [(number * 31 + i * 7) % 256 for i in range(length)]


@pytest.fixture(scope="module")
def running(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    logs = tmp_path_factory.mktemp("failover")
    with deployment(
        checkpoint("qwen3"), logs, prefill=2, decode=2, proxy_flags=["--policy", "round_robin"]
    ) as started:
        yield started


def test_decode_killed_while_streaming(running: Deployment) -> None:
    running.wait_ready()
    plain = [running.stream(prompt(i), 400).join() for i in range(4)]
    assert all(stream.succeeded() for stream in plain)
    streams = [running.stream(prompt(i), 400) for i in range(4)]
    for stream in streams:
        wait_until(lambda s=stream: len(s.output) > 3, 30)
    victim = running.decode[0]
    victim.kill()
    for stream, expected in zip(streams, plain, strict=True):
        stream.join()
        assert stream.succeeded_as(expected.output), (stream, stream.error)
    victim.restart()
    running.wait_ready()
    running.wait_idle()
