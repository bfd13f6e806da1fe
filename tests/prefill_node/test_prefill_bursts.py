"""When the KV of a chunk is given to the sender: layer by layer, or gathered where bursts pay."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from pd.prefill_node.outgoing import Chunk, OutgoingRoom, PromptCost, layers_per_group

LAYERS = 8
REPORTS = tuple((layer, layer + 1) for layer in range(LAYERS))
GROUPS = ((0, 2), (2, 4), (4, 6), (6, 8))
LAYER_BY_LAYER, AT_LEISURE, SLOW = 0.0, 1 / 8, 1 / 2
Sent = list[tuple[int, int, tuple[int, int, int, int]]]


class Recorder(SimpleNamespace):
    """A sender that notes what it is given, and at which token and layer the node is.

    Args:
        pace: tokens computed while one is sent; 0 for a sender that gains nothing by waiting.
    """

    def __init__(self, pace: float) -> None:
        super().__init__(flops_per_byte=pace, sent=[], now=())

    def send(self, *block: int) -> None:
        self.sent.append((*self.now, block))


def prefill(
    pace: float,
    prompt: int,
    chunk: int,
    cached: int = 0,
    opened: tuple[int, int] = (0, 0),
    pair_flops: float = 0.0,
    extra_layers: int = 0,
    told: bool = True,
) -> Sent:
    """All chunks of a prompt, as the node goes through them; ``opened``: the token and the layer
    from which on there is a sender; ``told``: layers of further planes are reported, too."""
    recorder: Any = Recorder(pace)
    request: Any = None
    cost = PromptCost(LAYERS, 1, 1.0, pair_flops, extra_layers)
    outgoing = OutgoingRoom(request, cost, pushed=cached)
    for start in range(0, prompt, chunk):
        part = Chunk(outgoing, start, min(start + chunk, prompt), prompt)
        extra = [(LAYERS, LAYERS + extra_layers)] if extra_layers and told else []
        for first, stop in (*REPORTS, *extra):
            if (start, stop) >= opened:
                outgoing.sender = recorder
            recorder.now = (part.stop, stop)
            part.layers_done(first, stop)
    if extra_layers:
        recorder.now = (prompt, LAYERS + extra_layers)
        outgoing.push_until(prompt)
    assert outgoing.pushed == prompt
    assert outgoing.partial is None
    return recorder.sent


def test_without_bursts_every_group_of_layers_is_sent() -> None:
    assert prefill(LAYER_BY_LAYER, 20, 16) == [
        *((16, stop, (0, 16, first, stop)) for first, stop in GROUPS),
        *((20, stop, (16, 20, first, stop)) for first, stop in GROUPS),
    ]


def test_a_burst_leaves_when_just_enough_is_left_to_hide_it() -> None:
    assert prefill(AT_LEISURE, 32, 16) == [
        (32, 5, (0, 16, 0, 8)),
        (32, 5, (16, 32, 0, 5)),
        (32, 6, (16, 32, 5, 6)),
        (32, 8, (16, 32, 6, 8)),
    ]


def test_attention_to_a_long_prompt_hides_more() -> None:
    """Of the second chunk with its 16 * 24 pairs, each as much work as a token."""
    assert prefill(SLOW, 32, 16, pair_flops=1.0)[0] == (32, 6, (0, 16, 0, 8))


@pytest.mark.parametrize(
    ("layers", "group"), [(1, 1), (2, 1), (6, 2), (16, 4), (32, 4), (80, 4), (126, 4), (200, 7)]
)
def test_groups_are_small_and_few(layers: int, group: int) -> None:
    """What is left to send after the last layer is one group."""
    assert layers_per_group(layers) == group
    assert -(-layers // group) <= 32


def test_what_takes_longer_to_send_leaves_earlier() -> None:
    assert prefill(SLOW, 32, 16) == [
        (32, 2, (0, 16, 0, 8)),
        (32, 2, (16, 32, 0, 2)),
        (32, 4, (16, 32, 2, 4)),
        (32, 6, (16, 32, 4, 6)),
        (32, 8, (16, 32, 6, 8)),
    ]


def test_nothing_waits_for_a_chunk_too_short_to_hide_it() -> None:
    sent = prefill(AT_LEISURE, 17, 16)
    assert sent[:2] == [(16, 6, (0, 16, 0, 6)), (16, 8, (0, 16, 6, 8))]


def test_what_d_has_of_a_chunk_does_not_make_the_rest_leave_early() -> None:
    assert prefill(AT_LEISURE, 32, 16, cached=5) == [
        (32, 5, (5, 16, 0, 8)),
        (32, 5, (16, 32, 0, 5)),
        (32, 6, (16, 32, 5, 6)),
        (32, 8, (16, 32, 6, 8)),
    ]


@pytest.mark.parametrize(("pace", "layer"), [(LAYER_BY_LAYER, 4), (AT_LEISURE, 5)])
def test_a_reservation_in_the_middle_of_a_pass_is_not_too_late(pace: float, layer: int) -> None:
    sent = prefill(pace, 32, 16, opened=(16, 4))
    assert sent[:2] == [(32, layer, (0, 16, 0, 8)), (32, layer, (16, 32, 0, layer))]


def test_layers_of_further_planes_are_sent_when_they_are_reported() -> None:
    assert prefill(LAYER_BY_LAYER, 20, 16, extra_layers=2) == [
        *((16, stop, (0, 16, first, stop)) for first, stop in (*GROUPS, (8, 10))),
        *((20, stop, (16, 20, first, stop)) for first, stop in (*GROUPS, (8, 10))),
    ]


def test_layers_of_further_planes_that_nobody_reports_are_sent_later() -> None:
    assert prefill(LAYER_BY_LAYER, 20, 16, extra_layers=2, told=False) == [
        *((16, stop, (0, 16, first, stop)) for first, stop in GROUPS),
        (20, 2, (0, 16, 8, 10)),
        *((20, stop, (16, 20, first, stop)) for first, stop in GROUPS),
        (20, 10, (16, 20, 8, 10)),
    ]


@pytest.mark.parametrize(
    ("extra_layers", "told"), [(0, True), (1, True), (1, False), (3, True), (3, False)]
)
def test_whatever_the_sizes_each_cell_is_sent_once_and_only_when_computed(
    seed: int, extra_layers: int, told: bool
) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        prompt, chunk = rng.randint(1, 90), rng.randint(1, 40)
        cached = rng.randint(0, prompt)
        opened = rng.randrange(0, prompt, chunk), rng.choice(REPORTS)[1]
        pace = rng.choice([0, 0.01, 0.1, 1, 10])
        sent = prefill(pace, prompt, chunk, cached, opened, extra_layers=extra_layers, told=told)
        cells = [
            (token, layer)
            for _, _, (start, stop, first, last) in sent
            for token in range(start, stop)
            for layer in range(first, last)
        ]
        assert len(cells) == len(set(cells)) == (prompt - cached) * (LAYERS + extra_layers)
        for computed, layers, (start, stop, _, last) in sent:
            before = (computed - 1) // chunk * chunk
            assert stop <= before or (before <= start and stop <= computed and last <= layers)
