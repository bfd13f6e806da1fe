"""A transfer library in this process, whose writes a test can hold back, fail or watch."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from pd.transfer.staged.mover import Mover, MoverError, Path, Target, Written

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class HeldTarget(Target):
    """Knows where its buffers are, as long as they are registered."""

    def __init__(self, mover: HeldMover, buffers: torch.Tensor, peer: str) -> None:
        self.buffers, self.peer, self._mover = buffers, peer, mover
        self.closed = False
        self.progressed = 0

    @property
    def description(self) -> bytes:
        return msgspec.msgpack.encode((self.buffers.data_ptr(), *self.buffers.shape))

    def make_progress(self) -> None:
        self.progressed += 1

    def close(self) -> None:
        self.closed = True


class HeldPath(Path):
    """Writes at once, or when the mover lets go."""

    poll_seconds = 0.001
    needs_peer = True

    def __init__(self, mover: HeldMover, buffers: torch.Tensor, description: bytes) -> None:
        self.buffers, self._mover = buffers, mover
        self.address, count, size = msgspec.msgpack.decode(description)
        if (count, size) != buffers.shape:
            raise MoverError("buffers of another shape")
        self.flying: dict[int, tuple[int, int]] = {}
        self.closed = False

    def begin_write(self, source: int, target: int, num_bytes: int) -> None:
        assert target not in self.flying, "written twice"
        assert source not in [source for source, _ in self.flying.values()], "sent twice"
        self.flying[target] = (source, num_bytes)
        self._mover.written.append((target, num_bytes))
        self._mover.sources.append(source)

    def poll(self) -> list[Written]:
        # A first write opens the link; what a test holds back comes after it.
        if self._mover.held and self in self._mover.open:
            return []
        self._mover.open.add(self)
        return [self._land(target) for target in list(self.flying)]

    def close(self) -> None:
        assert not self.flying
        self.closed = True

    def _land(self, target: int) -> Written:
        source, num_bytes = self.flying.pop(target)
        if self._mover.error:
            return Written(target, self._mover.error)
        size = self.buffers.shape[1]
        here = self.buffers.data_ptr() + source * size
        ctypes.memmove(self.address + target * size, here, num_bytes)
        return Written(target)


class HeldMover(Mover):
    """``held``: writes do not end. ``error``: they end with this. ``written``: all that began, to
    which buffer and how many bytes; ``sources``: from which. ``slow``: seconds that each step of a
    link's opening takes. ``refuses``: why neither end of a link can be made, for good if
    ``lasting``; ``refused``: how often. ``prepared``: how many links."""

    name = "held"

    def __init__(self) -> None:
        self.held = False
        self.error = ""
        self.refuses = ""
        self.lasting = False
        self.refused = self.prepared = 0
        self.slow = 0.0
        self.written: list[tuple[int, int]] = []
        self.sources: list[int] = []
        self.targets: list[HeldTarget] = []
        self.paths: list[HeldPath] = []
        self.open: set[HeldPath] = set()
        self._lock = threading.Lock()

    def prepare(self) -> None:
        with self._lock:
            self.prepared += 1

    def _refuse(self) -> None:
        if self.refuses:
            with self._lock:
                self.refused += 1
            raise MoverError(self.refuses, lasting=self.lasting)

    def make_target(self, buffers: torch.Tensor, peer: str, origin: str) -> Target:
        self._refuse()
        time.sleep(self.slow)
        self.targets.append(HeldTarget(self, buffers, peer))
        return self.targets[-1]

    def make_path(
        self, buffers: torch.Tensor, description: bytes, peer: str, wake: Callable[[], None]
    ) -> Path:
        self._refuse()
        time.sleep(self.slow)
        self.paths.append(HeldPath(self, buffers, description))
        return self.paths[-1]
