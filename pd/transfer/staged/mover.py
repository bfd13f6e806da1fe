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
    """The library refused or failed. The message says why.

    Args:
        lasting: another try would end the same way.
    """

    def __init__(self, message: str, *, lasting: bool = False) -> None:
        super().__init__(message)
        self.lasting = lasting


@dataclass(frozen=True, slots=True)
class Written:
    """A write to D's buffer ``target`` is over, and no part of it can land any more. If ``error``
    is empty, all bytes are visible to D's process."""

    target: int
    error: str = ""


class Target(ABC):
    """D's end of one link. A thread of its own makes it, then only the pump's thread uses it."""

    @property
    @abstractmethod
    def description(self) -> bytes:
        """Tells P how to open a :class:`Path` to the buffers. At most 64 KiB, sent over the
        channel."""

    def make_progress(self) -> None:
        """Let the library do D's part of writes and of connecting, without blocking. Called now and
        then while P waits for it (``Path.needs_peer``)."""

    @abstractmethod
    def close(self) -> None:
        """Unregister the buffers and forget the link. Nothing may land in the buffers after this.
        Called when P drained or is gone."""


class Path(ABC):
    """P's end of one link. A thread of its own makes it, and then one thread at a time uses it.

    Attributes:
        poll_seconds: how often to call :meth:`poll` while writes are in flight, or None if the
            library calls ``wake`` when one is over.
        needs_peer: whether writes may need :meth:`Target.make_progress` on D.
        stall_seconds: the link ends if no write completes for so long, even if the library still
            waits. None leaves the decision to the library.
    """

    poll_seconds: float | None = None
    needs_peer: bool = False
    stall_seconds: float | None = None

    @abstractmethod
    def begin_write(self, source: int, target: int, num_bytes: int) -> None:
        """Begin to write the first bytes of P's buffer ``source`` to D's buffer ``target``.

        Blocks at most for the time of a copy, never for the peer. :meth:`poll` returns the outcome,
        including errors. Until then we begin no second write from or to these buffers.
        """

    @abstractmethod
    def poll(self) -> list[Written]:
        """Return the writes that are over since the last call, without blocking. A write to an
        unreachable peer stays in flight as long as it might still land."""

    @abstractmethod
    def close(self) -> None:
        """Unregister the buffers and forget the link. Nothing is in flight."""


class Mover(ABC):
    """One per manager. :meth:`make_target` and :meth:`make_path` may block for a second, because
    libraries start slowly. Several threads may call them at once.

    Attributes:
        name: the backend's name, which is also the channel's service.
        device_buffers: whether buffers may lie in CUDA memory if both pools do and the nodes share
            a host. Otherwise they are in pinned host memory.
    """

    name: str
    device_buffers: bool = False

    def prepare(self) -> None:
        """Do the part of the first :meth:`make_target` or :meth:`make_path` that is slow.

        Takes no memory for buffers. Called on a thread of its own when two nodes meet.

        Raises:
            MoverError: the library cannot.
        """
        return

    @abstractmethod
    def make_target(self, buffers: torch.Tensor, peer: str, origin: str) -> Target:
        """D: register buffers and describe them.

        Args:
            buffers: uint8 ``[count, buffer_bytes]``, contiguous, kept alive until ``close`` has
                returned.
            peer: instance id of P.
            origin: source IP address of P's channel.

        Raises:
            MoverError: the library cannot.
        """

    @abstractmethod
    def make_path(
        self, buffers: torch.Tensor, description: bytes, peer: str, wake: Callable[[], None]
    ) -> Path:
        """P: register own buffers and open the way to D's buffers of the same shape.

        Args:
            buffers: as for :meth:`make_target`.
            description: describes D's target. Check its form, because the greeting proved only its
                sender.
            peer: instance id of D.
            wake: call this, from any thread, when :meth:`Path.poll` has something to return.

        Raises:
            MoverError: the description is bad or the library cannot.
        """

    def close(self) -> None:
        """End with the manager. All targets and paths are closed, except stuck ones."""
