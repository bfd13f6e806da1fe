"""Reports of a node's prefixes to a proxy, some of which are lost, while the cache changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pd.core.messages import HEARTBEAT_INTERVAL, PREFIXES_UNKNOWN, PrefixEvents
from pd.node.prefixes import PrefixReports
from pd.proxy.nodes.reported_prefixes import ReportedPrefixes
from pd.radix import RadixCache

if TYPE_CHECKING:
    from collections.abc import Callable

PROXY = b"proxy"
PAGE = 4
TICK = 0.1


class Reported:
    """A node whose cache changes with every flush, and a proxy that gets its reports."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.prompts = 0
        self.snapshots: list[float] = []
        self.known = ReportedPrefixes(PAGE, 10_000)
        self.radix = RadixCache(PAGE)
        self.is_lost: Callable[[PrefixEvents], bool] = lambda events: False
        core: Any = SimpleNamespace(
            config=SimpleNamespace(is_elastic=True),
            memory=SimpleNamespace(radix=self.radix),
            instance_id="node",
            post=self._post,
        )
        self.reports = PrefixReports(core)
        monkeypatch.setattr("pd.node.prefixes.time", SimpleNamespace(monotonic=lambda: self.now))

    def _post(self, proxy: bytes, events: PrefixEvents) -> None:
        assert proxy == PROXY
        if events.snapshot:
            self.snapshots.append(self.now)
        if not self.is_lost(events):
            self.known.apply_events(events)

    @property
    def is_known(self) -> bool:
        """Whether the proxy knows the last prompt that was computed."""
        return self.known.count_cached(self._prompt(self.prompts), "") == 2 * PAGE

    def run(self, seconds: float) -> None:
        """Compute a prompt and report it every 0.1 s, beside the proxy's heartbeats."""
        for tick in range(1, round(seconds / TICK) + 1):
            self.now += TICK
            self.prompts += 1
            self.radix.insert_prefix(self._prompt(self.prompts), np.zeros(2, np.int32), "")
            self.reports.send_reports(self.now)
            if tick % round(HEARTBEAT_INTERVAL / TICK) == 0:
                self.reports.note_wanted(PROXY, self.known.number)

    @staticmethod
    def _prompt(number: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.full(2 * PAGE, number, np.int32)


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Reported:
    return Reported(monkeypatch)


def lose_one(reported: Reported) -> None:
    number = reported.known.number + 1
    reported.is_lost = lambda events: events.number == number and not events.snapshot


def meet_again(reported: Reported) -> None:
    reported.known = ReportedPrefixes(PAGE, 10_000)


@pytest.mark.parametrize("happens", [lose_one, meet_again])
def test_a_proxy_that_knows_nothing_gets_a_snapshot_while_the_cache_changes(
    reported: Reported, happens: Callable[[Reported], None]
) -> None:
    reported.run(5)
    assert reported.is_known and len(reported.snapshots) == 1
    happens(reported)
    reported.run(2 * HEARTBEAT_INTERVAL)
    assert reported.is_known and len(reported.snapshots) == 2


def test_snapshots_to_a_proxy_that_goes_on_losing_batches_are_rare(reported: Reported) -> None:
    reported.run(1)
    reported.is_lost = lambda events: not events.snapshot
    reported.known.number = PREFIXES_UNKNOWN
    for _ in range(20):
        reported.run(HEARTBEAT_INTERVAL)
        reported.known.number = PREFIXES_UNKNOWN
    assert 4 <= len(reported.snapshots) <= 6


def test_a_batch_that_nothing_follows_is_missed_after_a_while(reported: Reported) -> None:
    reported.run(5)
    lose_one(reported)
    reported.run(TICK)
    waited = 0.0
    while not reported.is_known:
        reported.now += HEARTBEAT_INTERVAL
        waited += HEARTBEAT_INTERVAL
        reported.reports.note_wanted(PROXY, reported.known.number)
    assert 2.0 <= waited <= 2.5
