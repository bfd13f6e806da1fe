"""Detects lost messages between two living processes.

When a firewall, say, resets a connection, ZMQ connects again within a tenth of a second. No lease
notices that, but messages under way are lost. So we send a number in a frame before every message:
its place in the sender's stream to this receiver. Heartbeats repeat the number of the last message
that counts. A new stream begins when a sender first speaks to the receiver, or lost track.
"""

from __future__ import annotations

import itertools
import struct
import time

_FRAME = struct.Struct("<QQ?")
# Later streams have larger numbers, even if another process took over the address.
_streams = itertools.count(time.time_ns())


class SentNumbers:
    """Numbers the messages to one receiver."""

    def __init__(self) -> None:
        self._stream, self._count = next(_streams), 0

    def number_message(self, *, counts: bool) -> bytes:
        """Return the frame that goes before the next message."""
        self._count += counts
        return _FRAME.pack(self._stream, self._count, counts)

    def take_back(self, *, counts: bool) -> None:
        """Undo the number of an unsent message."""
        self._count -= counts


class ReceivedNumbers:
    """Checks the numbers of one sender.

    Args:
        whole: we see streams from their beginning. Otherwise the first number may be any.

    Attributes:
        began: number of streams so far.
    """

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self._stream = self._count = 0
        self.began = 0

    def detect_loss(self, number: bytes) -> bool:
        """Read the frame before a message. Return whether earlier messages were lost.

        Raises:
            ValueError: the frame is malformed.
        """
        if len(number) != _FRAME.size:
            raise ValueError(f"a message number has {_FRAME.size} bytes, not {len(number)}")
        stream, count, counts = _FRAME.unpack(number)
        if stream < self._stream:
            return False  # the message comes from an abandoned connection
        first = stream != self._stream
        last = 0 if first else self._count
        self.began += first
        self._stream, self._count = stream, count
        return bool(count != last + counts) and (self._whole or not first)
