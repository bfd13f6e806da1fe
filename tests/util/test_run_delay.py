"""Run delay of processes, and its effect on limits on progress."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from pd.core.messages import (
    NodeHeartbeat,
    PeerHeartbeat,
    ProxyHeartbeat,
    decode_message,
    encode_message,
)
from pd.util.starvation import (
    CEILING_SECONDS,
    READING_INTERVAL,
    DelayHistory,
    Patience,
    RunDelay,
    read_run_delays,
    thread_run_delay,
)

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 3.5


class Process:
    """A clock, and threads whose delays a test decides."""

    def __init__(self, *, counted: bool = True) -> None:
        self.now = 1000.0
        self.delays: dict[int, float] = {1: 5.0, 2: 0.0}
        self.run_delay = RunDelay(lambda: dict(self.delays) if counted else None, lambda: self.now)
        self.run_delay._started = True  # this test is its thread

    def pass_time(self, seconds: float, delay: float = 0.0) -> None:
        """Pass time heartbeat by heartbeat. Thread 1 is delayed as much in all."""
        beats = round(seconds / READING_INTERVAL)
        for _ in range(beats):
            self.now += seconds / beats
            self.delays[1] += delay / beats
            self.run_delay.update_reading(beat=True)


def test_delay_of_the_most_delayed_thread_adds_up() -> None:
    process = Process()
    process.pass_time(2.0, delay=1.5)
    assert process.run_delay.total == pytest.approx(1.5)
    process.pass_time(2.0)
    assert process.run_delay.total == pytest.approx(1.5)
    assert process.run_delay.measure_growth(process.now - 2.0) == pytest.approx(0.0)
    assert process.run_delay.measure_growth(process.now - 4.0) == pytest.approx(1.5)


def test_total_never_shrinks_when_threads_end_and_counts_new_ones() -> None:
    process = Process()
    process.pass_time(1.0, delay=0.8)
    del process.delays[1]
    process.now += READING_INTERVAL
    process.run_delay.update_reading(beat=True)
    assert process.run_delay.total == pytest.approx(0.8)
    process.delays[3] = 0.4
    process.now += READING_INTERVAL
    process.run_delay.update_reading(beat=True)
    assert process.run_delay.total == pytest.approx(1.2)


def test_of_two_delayed_threads_the_more_delayed_counts() -> None:
    process = Process()
    process.delays = {1: 5.3, 2: 0.2}
    process.now += READING_INTERVAL
    process.run_delay.update_reading(beat=True)
    assert process.run_delay.total == pytest.approx(0.3)


def test_growth_uses_a_recent_reading() -> None:
    process = Process()
    since = process.now
    process.now += 0.4
    process.delays[1] += 0.4
    assert process.run_delay.measure_growth(since) == pytest.approx(0.4)


def test_without_kernel_counts_lateness_replaces_them() -> None:
    process = Process(counted=False)
    since = process.now
    process.pass_time(2.0)
    assert process.run_delay.total == pytest.approx(0.0)
    process.now += READING_INTERVAL + 3.0
    assert process.run_delay.measure_growth(since) == pytest.approx(3.0), (
        "though the beat is yet to come"
    )
    process.run_delay.update_reading(beat=True)
    assert process.run_delay.total == pytest.approx(3.0)
    assert process.run_delay.measure_growth(since) == pytest.approx(3.0)
    process.pass_time(2.0)
    assert process.run_delay.total == pytest.approx(3.0)


@pytest.mark.parametrize("counted", [True, False])
def test_delay_before_the_first_reading_does_not_count(counted: bool) -> None:
    process = Process(counted=counted)
    process.run_delay._started = False
    process.run_delay._run = lambda: None
    process.now += 20.0
    process.delays[1] += 10.0
    Patience(process.run_delay, clock=lambda: process.now)
    assert process.run_delay.measure_growth(process.now) == pytest.approx(0.0)


def test_delays_are_read_of_every_thread_of_this_process() -> None:
    found = read_run_delays()
    if found is None:
        pytest.skip("this kernel does not count how long threads wait for a CPU")
    assert os.getpid() in found
    gone = threading.Thread(target=lambda: None)
    gone.start()
    gone.join()
    assert all(delay >= 0.0 for delay in found.values())


@pytest.mark.parametrize("content", [None, "0 0 0\n", "nonsense\n", ""])
def test_kernels_without_counts_are_recognised(tmp_path: Path, content: str | None) -> None:
    for thread in ("17", "18"):
        (tmp_path / thread).mkdir()
        if content is not None:
            (tmp_path / thread / "schedstat").write_text(content)
    assert read_run_delays(str(tmp_path)) is None
    assert read_run_delays(str(tmp_path / "none")) is None


def test_delays_are_seconds(tmp_path: Path) -> None:
    (tmp_path / "17").mkdir()
    (tmp_path / "17" / "schedstat").write_text("900 1500000000 4\n")
    assert read_run_delays(str(tmp_path)) == {17: 1.5}
    assert thread_run_delay(17, str(tmp_path)) == 1.5
    assert thread_run_delay(18, str(tmp_path)) == 0.0


def test_history_answers_from_the_reading_before_and_forgets_old_ones() -> None:
    history = DelayHistory()
    assert history.measure_growth(0.0) == 0.0
    for second in range(100):
        history.add_reading(float(second), second / 2)
    assert history.measure_growth(90.0) == pytest.approx(4.5)
    assert history.measure_growth(90.7) == pytest.approx(4.5), "from the reading before"
    assert len(history._readings) < 2 * CEILING_SECONDS


# ---- patience


class Ends:
    """Both ends of a transfer, and the knowledge of one of them."""

    def __init__(self) -> None:
        self.process = Process()
        self.patience = Patience(self.process.run_delay, clock=lambda: self.process.now)
        self.total = 0.0
        self.patience.note_delay("D", 0.0)
        self.since = self.process.now

    def pass_time(self, seconds: float, *, own: float = 0.0, peer: float = 0.0) -> None:
        """``own``, ``peer``: part of the time without a CPU for this end."""
        for _ in range(round(seconds / READING_INTERVAL)):
            self.process.pass_time(READING_INTERVAL, own * READING_INTERVAL)
            self.total += peer * READING_INTERVAL
            self.patience.note_delay("D", self.total)

    def is_over(self, peer: str | None = "D") -> bool:
        return self.patience.is_over(self.since, LIMIT, peer)


def test_an_idle_silence_ends_at_the_limit() -> None:
    ends = Ends()
    ends.pass_time(LIMIT)
    assert not ends.is_over()
    ends.pass_time(READING_INTERVAL)
    assert ends.is_over()


@pytest.mark.parametrize("starved", ["own", "peer"])
def test_a_starved_end_gets_time_until_the_ceiling(starved: str) -> None:
    ends = Ends()
    while ends.process.now < ends.since + CEILING_SECONDS:
        assert not ends.is_over()
        ends.pass_time(READING_INTERVAL, **{starved: 1.0})
    ends.pass_time(READING_INTERVAL, **{starved: 1.0})
    assert ends.is_over()


@pytest.mark.parametrize("starved", ["own", "peer"])
def test_only_the_delay_since_the_wait_began_counts(starved: str) -> None:
    ends = Ends()
    ends.pass_time(10.0, **{starved: 1.0})
    ends.since = ends.process.now
    ends.pass_time(LIMIT + READING_INTERVAL)
    assert ends.is_over()


def test_half_a_cpu_doubles_the_limit_and_idle_time_counts_in_full() -> None:
    ends = Ends()
    ends.pass_time(4.0, peer=0.5)
    assert not ends.is_over(), "2 s of it were the peer's"
    ends.pass_time(2.0)
    assert ends.is_over()


def test_delays_of_both_ends_add_up() -> None:
    ends = Ends()
    ends.pass_time(8.0, own=0.4, peer=0.4)
    assert not ends.is_over()
    ends.pass_time(12.0, own=0.4, peer=0.4)
    assert ends.is_over()


def test_another_peer_s_delay_counts_only_if_the_peer_is_unknown() -> None:
    ends = Ends()
    ends.pass_time(5.0, peer=1.0)
    assert not ends.is_over("D")
    assert ends.is_over("E")
    assert not ends.is_over(None)


def test_a_peer_cannot_claim_more_than_the_time_that_passed() -> None:
    ends = Ends()
    ends.pass_time(20.0, peer=1e6)
    assert not ends.is_over()
    ends.pass_time(12.0, peer=1e6)
    assert ends.is_over()


def test_the_number_of_remembered_peers_is_bounded() -> None:
    patience = Patience()
    for number in range(5000):
        patience.note_delay(f"peer-{number}", 0.0)
    assert len(patience._peers) <= 4096
    assert "peer-4999" in patience._peers


# ---- heartbeats


def test_heartbeats_carry_the_delay_in_all_directions() -> None:
    common = {"to": "B", "sender": "A", "run_delay": 1.5}
    load = {"ready": True, "queued_tokens": 0, "running": 0}
    for beat in (
        ProxyHeartbeat(**common, run_delays={"D": 2.5}),
        NodeHeartbeat(**common, **load),
        PeerHeartbeat(**common),
    ):
        assert decode_message(encode_message(beat)) == beat
