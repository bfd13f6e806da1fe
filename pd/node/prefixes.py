"""Tells proxies which prefixes a node has cached."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd.core.messages import LEASE_SECONDS, PREFIXES_UNKNOWN, PREFIXES_UNWANTED, PrefixEvents
from pd.radix.prefix_log import PrefixLog

if TYPE_CHECKING:
    from pd.scheduling.core import NodeCore

# A proxy whose number lags behind for so long has lost a report. It gets no two snapshots within
# this time.
_RESEND_SECONDS = 2.0


@dataclass
class _ReadingProxy:
    """A proxy that gets reports: when it last said that it lives, when it was last sent one, and
    when a snapshot."""

    heard: float
    sent: float
    snapshot: float


class PrefixReports:
    """Sends changes of an elastic node's prefix cache in numbered batches, and all of it to a proxy
    that begins or that missed a batch. The caller holds the node's lock."""

    def __init__(self, core: NodeCore) -> None:
        self._core = core
        self._log: PrefixLog | None = None
        if core.config.is_elastic:
            self._log = PrefixLog()
            core.memory.radix.listen(self._log)
        self._number = 0
        self._readers: dict[bytes, _ReadingProxy] = {}

    def wanted(self, proxy: bytes, known: int) -> None:
        """A heartbeat of a proxy that knows the batches up to this number."""
        now = time.monotonic()
        if known == PREFIXES_UNWANTED or self._log is None:
            self._readers.pop(proxy, None)
            return
        reader = self._readers.get(proxy)
        if reader is not None:
            reader.heard = now
            # NOTE: a proxy that lost a batch says that it knows nothing as soon as another comes,
            # so only a number that lags behind may be due to what is under way.
            asked = known == PREFIXES_UNKNOWN
            since = reader.snapshot if asked else reader.sent
            if known == self._number or now - since < _RESEND_SECONDS:
                return
        self.flush(now)
        self._readers[proxy] = _ReadingProxy(now, now, now)
        self._post(proxy, self._core.memory.radix.hashes(), b"", snapshot=True)

    def flush(self, now: float) -> None:
        """Send what changed, and forget proxies that are silent."""
        changes = None if self._log is None else self._log.take()
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
            self._post(proxy, changes.stored, changes.removed, snapshot=False)

    def _post(self, proxy: bytes, stored: bytes, removed: bytes, *, snapshot: bool) -> None:
        message = PrefixEvents(
            to=proxy.decode(errors="replace"),
            sender=self._core.instance_id,
            number=self._number,
            stored=stored,
            removed=removed,
            snapshot=snapshot,
        )
        self._core.post(proxy, message)
