"""Numbers of messages show what was lost, and nothing else."""

from __future__ import annotations

import random

import pytest

from pd.core.numbering import Received, Sent


def test_random_losses_are_seen_with_the_next_message_or_heartbeat(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    sent, received, lost = Sent(), Received(whole=True), False
    for _ in range(2000):
        counts = rng.random() < 0.6
        number = sent.number(counts=counts)
        if rng.random() < 0.1:
            lost = lost or counts
        else:
            assert received.missing(number) == lost
            lost = False
    assert received.began == 1


def test_a_message_that_was_not_sent_is_not_missed() -> None:
    sent, received = Sent(), Received(whole=True)
    assert not received.missing(sent.number(counts=True))
    sent.number(counts=True)
    sent.take_back(counts=True)
    assert not received.missing(sent.number(counts=True))


@pytest.mark.parametrize("whole", [True, False])
def test_the_first_message_of_a_stream(whole: bool) -> None:
    """Missed where the stream is seen from its beginning; a later stream begins anew."""
    received = Received(whole=whole)
    for began in (1, 2):
        sent = Sent()
        sent.number(counts=True)
        assert received.missing(sent.number(counts=True)) == whole
        assert not received.missing(sent.number(counts=False))
        assert received.began == began


def test_what_is_left_of_an_earlier_stream_says_nothing() -> None:
    earlier, later, received = Sent(), Sent(), Received(whole=True)
    assert not received.missing(later.number(counts=True))
    earlier.number(counts=True)
    assert not received.missing(earlier.number(counts=True))
    assert not received.missing(later.number(counts=True))
    assert received.began == 1


@pytest.mark.parametrize("frame", [b"", b"x" * 16, b"x" * 18])
def test_frames_are_checked(frame: bytes) -> None:
    with pytest.raises(ValueError, match=f"not {len(frame)}"):
        Received(whole=True).missing(frame)
