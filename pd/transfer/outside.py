"""Transfer backends of other packages, found by their entry points.

A package offers one as ``NAME = "module:Class"`` in the group ``pd.transfer``, where the class is a
:class:`~pd.transfer.backend.TransferBackend` (docs/extending.md). Nothing of a package is imported
before its backend is chosen, so that a broken one hinders nobody who does not use it.
"""

from __future__ import annotations

import contextlib
import logging
from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple

from pd.core.errors import PDError, SetupError
from pd.transfer.backend import TransferBackend
from pd.transfer.base import TransferManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd.transfer.backend import TransferSetup

logger = logging.getLogger(__name__)

GROUP = "pd.transfer"


class Offer(NamedTuple):
    """A backend that a package offers; nothing of it is imported yet."""

    entry_point: metadata.EntryPoint
    package: str

    def load(self) -> TransferBackend:
        """Import the description. Raises SetupError if it cannot be had."""
        with _named(self):
            found = self.entry_point.load()
            if not (isinstance(found, type) and issubclass(found, TransferBackend)):
                raise TypeError(f"{self.entry_point.value} is no subclass of TransferBackend")
            return OutsideBackend(found(), self)


def find_outside() -> dict[str, list[Offer]]:
    """Offers by the backend's name; more than one where packages disagree."""
    found: dict[str, list[Offer]] = {}
    seen: set[str] = set()
    for distribution in metadata.distributions():
        package = "a package without a name"
        try:
            if GROUP not in (distribution.read_text("entry_points.txt") or ""):
                continue
            package = distribution.metadata["Name"] or package
            points = list(distribution.entry_points.select(group=GROUP))
        except Exception as error:  # noqa: BLE001
            # Whatever is wrong with the files of one package must not hinder the others.
            logger.warning("the entry points of %s cannot be read: %r", package, error)
            continue
        # A package that stands twice on sys.path is imported from the first place.
        if package not in seen:
            seen.add(package)
            for point in points:
                found.setdefault(point.name, []).append(Offer(point, package))
    return found


class OutsideBackend(TransferBackend):
    """Backend of another package, whose errors name it.

    A :class:`~pd.core.errors.PDError` is the backend's own message and passes unchanged; anything
    else that its code raises becomes a SetupError.
    """

    def __init__(self, backend: TransferBackend, offer: Offer) -> None:
        self._backend, self._offer = backend, offer
        self.one_device = backend.one_device

    def obstacle(self, device: str) -> str | None:
        with _named(self._offer):
            return self._backend.obstacle(device)

    def manager_class(self) -> Callable[..., TransferManager]:
        with _named(self._offer):
            return self._backend.manager_class()

    def make(self, setup: TransferSetup) -> TransferManager:
        name = self._offer.entry_point.name
        with _named(self._offer):
            manager = self._backend.make(setup)
            if not isinstance(manager, TransferManager):
                raise TypeError(f"{type(manager).__name__} is no TransferManager")
            if manager.name != name:
                manager.close()
                raise ValueError(f"its manager's name is {manager.name!r}, not {name!r}")
            return manager


@contextlib.contextmanager
def _named(offer: Offer) -> Iterator[None]:
    try:
        yield
    except PDError:
        raise
    except (Exception, SystemExit) as error:
        # Code of a package may raise anything, and a module may even end the process.
        raise SetupError(
            f"transfer backend {offer.entry_point.name} of package {offer.package} is broken: "
            f"{type(error).__name__}: {error}"
        ) from error
