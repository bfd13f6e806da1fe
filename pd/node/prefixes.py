"""Tells proxies which prefixes a node has cached."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd.core.messages import LEASE_SECONDS, PREFIXES_UNKNOWN, PREFIXES_UNWANTED, PrefixEvents
from pd.radix.prefix_log import PrefixLog

if TYPE_CHECKING:
    from pd.scheduling.core import NodeCore

# A proxy whose number lags this long has lost a report. It gets at most one snapshot
# in this time.
_RESEND_SECONDS = 2.0


@dataclass
class _ReadingProxy:
    """A proxy that gets reports: times of its last heartbeat, our last report, our last
    snapshot."""

    heard: float
    sent: float
    snapshot: float


class PrefixReports:
    """Sends changes of an elastic node's prefix cache in numbered batches.

    A new proxy, or one that missed a batch, gets the whole cache. The caller holds the node's lock.
    """

    def __init__(self, core: NodeCore) -> None:
        self._core = core
        self._log: PrefixLog | None = None
        if core.config.is_elastic:
            self._log = PrefixLog()
            core.memory.radix.add_listener(self._log)
        self._number = 0
        self._readers: dict[bytes, _ReadingProxy] = {}

    def note_wanted(self, proxy: bytes, known: int) -> None:
        """Handle a heartbeat of a proxy that knows the batches up to number ``known``."""
        now = time.monotonic()
        if known == PREFIXES_UNWANTED or self._log is None:
            self._readers.pop(proxy, None)
            return
        reader = self._readers.get(proxy)
        if reader is not None:
            reader.heard = now
            # NOTE: a proxy that lost a batch says so when the next one arrives. A number that is
            # merely too small may be caused by reports still under way.
            asked = known == PREFIXES_UNKNOWN
            since = reader.snapshot if asked else reader.sent
            if known == self._number or now - since < _RESEND_SECONDS:
                return
        self.send_reports(now)
        self._readers[proxy] = _ReadingProxy(now, now, now)
        self._post_report(proxy, self._core.memory.radix.join_hashes(), b"", snapshot=True)

    def send_reports(self, now: float) -> None:
        """Send changes, and forget silent proxies."""
        changes = None if self._log is None else self._log.take_changes()
        self._readers = {
            proxy: reader
            for proxy, reader in self._readers.items()
            if now - reader.heard < LEASE_SECONDS
        }
        if changes is None:
            return
        self._number += 1
        for proxy, reader in self._readers.items():
            reader.sent = now
            self._post_report(proxy, changes.stored, changes.removed, snapshot=False)

    def _post_report(self, proxy: bytes, stored: bytes, removed: bytes, *, snapshot: bool) -> None:
        message = PrefixEvents(
            to=proxy.decode(errors="replace"),
            sender=self._core.instance_id,
            number=self._number,
            stored=stored,
            removed=removed,
            snapshot=snapshot,
        )
        self._core.post(proxy, message)
