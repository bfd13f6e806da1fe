"""When the KV of a chunk is given to the sender: layer by layer, or gathered where bursts pay."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from pd.core.node_info import KVLayout
from pd.prefill_node.outgoing import Chunk, Outgoing

LAYERS = 8
LAYOUT = KVLayout(LAYERS, 2, 16, "bfloat16", 16)
REPORTS = (2, 4, 6, 8)


class Recorder(SimpleNamespace):
    """A sender that notes what it is given and at which report."""

    def __init__(self, burst_tokens: int) -> None:
        super().__init__(burst_bytes=burst_tokens * LAYOUT.token_bytes, sent=[], now=())

    def send(self, *block: int) -> None:
        self.sent.append((*self.now, block))


def prefill(
    recorder: Recorder, prompt: int, chunk: int, cached: int = 0, opened: tuple[int, int] = (0, 0)
) -> list[Any]:
    """All chunks of a prompt, as the node goes through them; ``opened``: the token and the layer
    from which on there is a sender."""
    outgoing = Outgoing(pushed=cached)
    for start in range(0, prompt, chunk):
        part = Chunk(outgoing, start, min(start + chunk, prompt), prompt)
        for layers in REPORTS:
            if (start, layers) >= opened:
                outgoing.sender = recorder  # type: ignore[assignment]
            recorder.now = (part.stop, layers)
            part.push(layers, LAYOUT)
    assert outgoing.pushed == prompt
    return recorder.sent


def test_without_bursts_every_group_of_layers_is_sent() -> None:
    assert prefill(Recorder(0), 20, 16) == [
        *((16, stop, (0, 16, stop - 2, stop)) for stop in REPORTS),
        *((20, stop, (16, 20, stop - 2, stop)) for stop in REPORTS),
    ]


def test_a_burst_is_gathered_until_three_quarters_of_the_layers_of_the_last_chunk() -> None:
    assert prefill(Recorder(1000), 32, 16) == [
        (32, 6, (0, 16, 0, 8)),
        (32, 6, (16, 32, 0, 6)),
        (32, 8, (16, 32, 6, 8)),
    ]


def test_a_full_burst_leaves_at_the_end_of_its_chunk() -> None:
    sent = prefill(Recorder(32), 64, 16)
    assert sent[:2] == [(32, 8, (0, 16, 0, 8)), (32, 8, (16, 32, 0, 8))]
    assert [place[:2] for place in sent[2:]] == [(64, 6), (64, 6), (64, 8)]


def test_nothing_waits_for_a_chunk_too_short_to_hide_it() -> None:
    assert prefill(Recorder(1000), 20, 16) == [
        (16, 8, (0, 16, 0, 8)),
        (20, 6, (16, 20, 0, 6)),
        (20, 8, (16, 20, 6, 8)),
    ]


@pytest.mark.parametrize("burst", [0, 1000])
def test_a_reservation_in_the_middle_of_a_pass_is_not_too_late(burst: int) -> None:
    sent = prefill(Recorder(burst), 32, 16, opened=(16, 4))
    first = 6 if burst else 4
    assert sent[:2] == [(32, first, (0, 16, 0, 8)), (32, first, (16, 32, 0, first))]


def test_whatever_the_sizes_each_cell_is_sent_once(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        prompt, chunk = rng.randint(1, 90), rng.randint(1, 40)
        cached = rng.randint(0, prompt)
        opened = rng.randrange(0, prompt, chunk), rng.choice(REPORTS)
        sent = prefill(Recorder(rng.choice([0, 20, 1000])), prompt, chunk, cached, opened)
        cells = [
            (token, layer)
            for _, _, (start, stop, first, last) in sent
            for token in range(start, stop)
            for layer in range(first, last)
        ]
        assert len(cells) == len(set(cells)) == (prompt - cached) * LAYERS
        for computed, layers, (start, stop, _, last) in sent:
            chunk_start = (computed - 1) // chunk * chunk
            assert stop <= chunk_start or (start >= chunk_start and last <= layers), "not computed"
