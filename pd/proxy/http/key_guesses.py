"""Limits how fast API keys can be guessed from one address.

A key accepted from an address before is accepted from there at once, even while others share the
address. Any other key waits for its turn before we compare it. If we answered right keys at once,
guessing would not be limited.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections import OrderedDict

from pd.core.errors import QueueFullError
from pd.util.warning_limit import WarningLimit

logger = logging.getLogger(__name__)

# Number of new keys per address to compare at once, and the rate afterwards. Right keys do not
# count.
BURST = 20
PER_SECOND = 10.0
# Limits on waiting requests, per address and in total.
MAX_WAITING = 32
MAX_WAITING_IN_ALL = 256
# Limits on remembered addresses, and on right keys per address. The longest unused are dropped.
MAX_SOURCES = 4096
MAX_PROVEN = 64
# A client with one IPv6 address usually has the whole network of this prefix length.
_NETWORK_BITS = 64


class _Source:
    """An address or network that sends keys.

    Attributes:
        turns: keys that may be compared at once; negative while some wait.
        since: time at which ``turns`` was computed.
        waiting: requests that wait for their turn.
        proven: digests of right keys, the longest unused first.
    """

    def __init__(self) -> None:
        self.turns, self.since = float(BURST), time.monotonic()
        self.waiting = 0
        self.proven: OrderedDict[bytes, None] = OrderedDict()

    def seconds_to_turn(self) -> float:
        now = time.monotonic()
        self.turns = min(float(BURST), self.turns + (now - self.since) * PER_SECOND)
        self.since = now
        return max(0.0, (1.0 - self.turns) / PER_SECOND)


class KeyGuesses:
    """Gives keys their turns. Runs on the event loop."""

    def __init__(self) -> None:
        # The longest unused address comes first.
        self._sources: OrderedDict[str, _Source] = OrderedDict()
        self._waiting = 0
        self._warnings = WarningLimit(logger)

    async def wait_turn(self, address: str, digest: bytes) -> None:
        """Wait until the key with this digest may be compared.

        Raises QueueFullError if too many others wait.
        """
        source = self._find_source(address)
        if digest in source.proven:
            source.proven.move_to_end(digest)
            return
        seconds = source.seconds_to_turn()
        if seconds:
            self._warnings.log_warning(
                f"wrong API keys from {address}: more than {PER_SECOND:g} a second; we delay others"
            )
            if source.waiting >= MAX_WAITING or self._waiting >= MAX_WAITING_IN_ALL:
                raise QueueFullError("too many wrong API keys from your address; try again later")
        source.turns -= 1.0
        if not seconds:
            return
        source.waiting += 1
        self._waiting += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            source.waiting -= 1
            self._waiting -= 1

    def mark_right(self, address: str, digest: bytes) -> None:
        """Remember a right key, so that it does not wait at this address any more."""
        source = self._find_source(address)
        if digest in source.proven:
            return
        source.turns += 1.0
        source.proven[digest] = None
        if len(source.proven) > MAX_PROVEN:
            source.proven.popitem(last=False)

    def _find_source(self, address: str) -> _Source:
        name = _find_network(address)
        source = self._sources.get(name)
        if source is None:
            source = self._sources[name] = _Source()
            if len(self._sources) > MAX_SOURCES:
                self._sources.popitem(last=False)
        else:
            self._sources.move_to_end(name)
        return source


def _find_network(address: str) -> str:
    """Return an IPv4 address as it is, and the network of an IPv6 address."""
    if ":" not in address:
        return address
    try:
        network = ipaddress.IPv6Network((address.partition("%")[0], _NETWORK_BITS), strict=False)
    except ValueError:
        return address
    mapped = ipaddress.IPv6Address(address.partition("%")[0]).ipv4_mapped
    return str(mapped or network)
