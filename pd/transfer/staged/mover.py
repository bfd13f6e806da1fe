"""Interface of a transfer library for staged links (:mod:`pd.transfer.staged.manager`).

A link between P and D owns ``count`` staging buffers of ``buffer_bytes`` on each side. The link
decides which buffer may be written when. A mover only registers buffers and writes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class MoverError(Exception):
    """The library refused or failed; the message says what and why.

    Args:
        lasting: another try would end the same way.
    """

    def __init__(self, message: str, *, lasting: bool = False) -> None:
        super().__init__(message)
        self.lasting = lasting


@dataclass(frozen=True, slots=True)
class Written:
    """A write to D's buffer ``target`` is over: nothing of it can land any more. If ``error`` is
    empty, all bytes are there and visible to D's process."""

    target: int
    error: str = ""


class Target(ABC):
    """D's end of one link. It is made on a thread of its own, then used by the pump's thread
    only."""

    @property
    @abstractmethod
    def description(self) -> bytes:
        """Tells P how to open a :class:`Path` to the buffers; at most 64 KiB, sent over the
        channel."""

    def progress(self) -> None:
        """Let the library do D's part of writes and of connecting. Does not block. Called every
        now and then while P waits for it (``Path.needs_peer``)."""

    @abstractmethod
    def close(self) -> None:
        """Unregister the buffers and forget the link. Called when P drained or is gone; nothing may
        land in the buffers after this."""


class Path(ABC):
    """P's end of one link. It is made on a thread of its own, then used by one thread at a time.

    Attributes:
        poll_seconds: how often :meth:`poll` has to be called while writes are in flight; None if
            the library calls ``wake`` when one is over.
        needs_peer: whether writes may need :meth:`Target.progress` on D.
        stall_seconds: the link ends when no write was completed for so long, even if the library
            still waits; None if only the library decides.
    """

    poll_seconds: float | None = None
    needs_peer: bool = False
    stall_seconds: float | None = None

    @abstractmethod
    def write(self, source: int, target: int, num_bytes: int) -> None:
        """Begin to write the first bytes of P's buffer ``source`` to D's buffer ``target``. Blocks
        at most for the time of a copy, never for the peer. :meth:`poll` gives the outcome, errors
        included; until then no second write from or to these buffers is begun."""

    @abstractmethod
    def poll(self) -> list[Written]:
        """Writes that are over since the last call. Does not block. A write whose peer cannot be
        reached stays in flight as long as it might still land."""

    @abstractmethod
    def close(self) -> None:
        """Unregister the buffers and forget the link; nothing is in flight."""


class Mover(ABC):
    """One per manager. :meth:`target` and :meth:`path` may block for a second (libraries take
    their time to start) and may be called from several threads at once.

    Attributes:
        name: the backend's name, which is also the channel's service.
        device_buffers: whether buffers may lie in CUDA memory if both pools do and the nodes share
            a host; otherwise they are pinned host memory.
    """

    name: str
    device_buffers: bool = False

    def prepare(self) -> None:
        """Do what would make the first :meth:`target` or :meth:`path` slow. Takes no memory for
        buffers; called when two nodes meet, on a thread of its own.

        Raises:
            MoverError: the library cannot.
        """
        return

    @abstractmethod
    def target(self, buffers: torch.Tensor, peer: str, origin: str) -> Target:
        """D: register buffers and describe them.

        Args:
            buffers: uint8 ``[count, buffer_bytes]``, contiguous, kept alive until ``close``
                returned.
            peer: instance id of P.
            origin: IP address that P's channel comes from.

        Raises:
            MoverError: the library cannot.
        """

    @abstractmethod
    def path(
        self, buffers: torch.Tensor, description: bytes, peer: str, wake: Callable[[], None]
    ) -> Path:
        """P: register own buffers and open the way to D's, which have the same shape.

        Args:
            buffers: as for :meth:`target`.
            description: of D's target. The greeting proved only its sender, so check its form.
            peer: instance id of D.
            wake: to be called, from any thread, when :meth:`Path.poll` has something to return.

        Raises:
            MoverError: the description is bad or the library cannot.
        """

    def close(self) -> None:
        """The manager ends. All targets and paths that can be closed are closed."""
