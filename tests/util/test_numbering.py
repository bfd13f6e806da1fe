"""Message numbers detect lost messages, and give no false alarms."""

from __future__ import annotations

import random

import pytest

from pd.util.numbering import ReceivedNumbers, SentNumbers


def test_random_losses_are_detected_at_the_next_message_or_heartbeat(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    sent, received, lost = SentNumbers(), ReceivedNumbers(whole=True), False
    for _ in range(2000):
        counts = rng.random() < 0.6
        number = sent.number_message(counts=counts)
        if rng.random() < 0.1:
            lost = lost or counts
        else:
            assert received.detect_loss(number) == lost
            lost = False
    assert received.began == 1


def test_an_unsent_message_does_not_count_as_lost() -> None:
    sent, received = SentNumbers(), ReceivedNumbers(whole=True)
    assert not received.detect_loss(sent.number_message(counts=True))
    sent.number_message(counts=True)
    sent.take_back(counts=True)
    assert not received.detect_loss(sent.number_message(counts=True))


@pytest.mark.parametrize("whole", [True, False])
def test_the_first_message_of_a_stream(whole: bool) -> None:
    """Its loss is detected if we see streams from their beginning. A later stream begins anew."""
    received = ReceivedNumbers(whole=whole)
    for began in (1, 2):
        sent = SentNumbers()
        sent.number_message(counts=True)
        assert received.detect_loss(sent.number_message(counts=True)) == whole
        assert not received.detect_loss(sent.number_message(counts=False))
        assert received.began == began


def test_messages_of_an_earlier_stream_are_ignored() -> None:
    earlier, later, received = SentNumbers(), SentNumbers(), ReceivedNumbers(whole=True)
    assert not received.detect_loss(later.number_message(counts=True))
    earlier.number_message(counts=True)
    assert not received.detect_loss(earlier.number_message(counts=True))
    assert not received.detect_loss(later.number_message(counts=True))
    assert received.began == 1


@pytest.mark.parametrize("frame", [b"", b"x" * 16, b"x" * 18])
def test_frames_are_checked(frame: bytes) -> None:
    with pytest.raises(ValueError, match=f"not {len(frame)}"):
        ReceivedNumbers(whole=True).detect_loss(frame)
