"""Whether messages between two processes were lost though both live.

A connection that is reset (by a firewall, say) is made again within a tenth of a second, so no
lease notices; what was on its way is gone. So every message carries a number, in a frame before it:
its place in the sender's stream to this receiver. Heartbeats do not count, they repeat the number
of the last message that does. A stream begins when its sender begins to speak to the receiver, or
begins anew because it lost track.
"""

from __future__ import annotations

import itertools
import struct
import time

_FRAME = struct.Struct("<QQ?")
# Later streams have larger numbers, also those of a process that took over an address.
_streams = itertools.count(time.time_ns())


class Sent:
    """Numbers what goes to one receiver."""

    def __init__(self) -> None:
        self._stream, self._count = next(_streams), 0

    def number(self, *, counts: bool) -> bytes:
        """The frame that goes before the next message."""
        self._count += counts
        return _FRAME.pack(self._stream, self._count, counts)

    def take_back(self, *, counts: bool) -> None:
        """The message was not sent."""
        self._count -= counts


class Received:
    """Compares the numbers of one sender.

    Args:
        whole: streams are seen from their beginning; else any number may be the first.

    Attributes:
        began: streams that began so far.
    """

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self._stream = self._count = 0
        self.began = 0

    def missing(self, number: bytes) -> bool:
        """Take the frame before a message. Returns whether messages before it were lost.

        Raises:
            ValueError: it is not such a frame.
        """
        if len(number) != _FRAME.size:
            raise ValueError(f"a message number has {_FRAME.size} bytes, not {len(number)}")
        stream, count, counts = _FRAME.unpack(number)
        if stream < self._stream:
            return False  # the message comes from a connection that was given up
        first = stream != self._stream
        last = 0 if first else self._count
        self.began += first
        self._stream, self._count = stream, count
        return bool(count != last + counts) and (self._whole or not first)
