"""What a transfer library has to offer to staged links (:mod:`pd.transfer.staged.manager`).

A link between P and D owns ``count`` slots of ``slot_bytes`` on each side. Who may write which slot
when is the link's affair. A mover only registers slot memory and moves slots.
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
    """A write to D's slot ``target`` that is over: nothing of it can land any more. ``error``
    empty: all bytes are there, visible to D's process."""

    target: int
    error: str = ""


class Target(ABC):
    """D's end of one link. Made on a thread of its own, then used by the pump's thread only."""

    @property
    @abstractmethod
    def description(self) -> bytes:
        """What P needs to open a :class:`Path` to the slots; it travels over the channel. At most
        64 KiB."""

    def progress(self) -> None:
        """Let the library do D's part of writes and of connecting. Does not block. Called every
        now and then while P says that it waits for something (``Path.needs_peer``)."""

    @abstractmethod
    def close(self) -> None:
        """Unregister the slots and forget the link. Only called when P drained or is gone; nothing
        may land in the slots after this."""


class Path(ABC):
    """P's end of one link. Made on a thread of its own, then used by one thread at a time.

    Attributes:
        poll_seconds: how often :meth:`poll` has to be called while writes are in flight; None if
            the library calls ``wake`` when one is over.
        needs_peer: whether writes may need :meth:`Target.progress` on D.
        stall_seconds: the link is given up when no write was completed for so long, though the
            library has not given them up; None if only the library's word counts.
    """

    poll_seconds: float | None = None
    needs_peer: bool = False
    stall_seconds: float | None = None

    @abstractmethod
    def write(self, source: int, target: int, num_bytes: int) -> None:
        """Begin to write the first bytes of P's slot ``source`` to D's slot ``target``. Blocks at
        most for the time of a copy, never for the peer. The outcome, errors included, is given by
        :meth:`poll`; until then no second write from or to these slots is begun."""

    @abstractmethod
    def poll(self) -> list[Written]:
        """Writes that are over since the last call. Does not block. A write whose peer cannot be
        reached stays in flight as long as it might still land."""

    @abstractmethod
    def close(self) -> None:
        """Unregister the slots and forget the link; nothing is in flight."""


class Mover(ABC):
    """One per manager. :meth:`target` and :meth:`path` may block for a second (libraries take
    their time to start) and may be called from several threads at once.

    Attributes:
        name: the backend's name, which is also the channel's service.
        device_slots: whether slots may lie in CUDA memory if both pools do and the nodes share a
            host; else they are pinned host memory.
    """

    name: str
    device_slots: bool = False

    def prepare(self) -> None:
        """Do what :meth:`target` and :meth:`path` would need long for the first time. Takes no slot
        memory; called when two nodes meet, on a thread of its own.

        Raises:
            MoverError: the library cannot.
        """
        return

    @abstractmethod
    def target(self, slots: torch.Tensor, peer: str, origin: str) -> Target:
        """D: register slots and describe them.

        Args:
            slots: uint8 ``[count, slot_bytes]``, contiguous, kept alive until ``close`` returned.
            peer: instance id of P.
            origin: IP address that P's channel comes from.

        Raises:
            MoverError: the library cannot.
        """

    @abstractmethod
    def path(
        self, slots: torch.Tensor, description: bytes, peer: str, wake: Callable[[], None]
    ) -> Path:
        """P: register own slots and open the way to D's, which have the same shape.

        Args:
            slots: as for :meth:`target`.
            description: of D's target. Not to be trusted beyond what the greeting proved: check
                its form.
            peer: instance id of D.
            wake: to be called, from any thread, when :meth:`Path.poll` has something to say.

        Raises:
            MoverError: the description is bad or the library cannot.
        """

    def close(self) -> None:
        """The manager ends; all targets and paths that can be closed are."""
