"""Transfer backends of other packages, found by their entry points.

A package offers one as ``NAME = "module:Class"`` in the group ``pd.transfer``, where the class is a
:class:`~pd.transfer.backend.TransferBackend` (docs/extending-transfer.md). We import nothing of a
package before you choose its backend, so a broken one harms only its own users.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from functools import lru_cache
from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pd.core.errors import PDError, SetupError
from pd.core.node_info import Transfers
from pd.transfer.backend import TransferBackend
from pd.transfer.base import TransferManager
from pd.util.starvation import Patience

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd.transfer.backend import TransferSetup

logger = logging.getLogger(__name__)

GROUP = "pd.transfer"
# Peers accept only addresses of this form.
_addresses = msgspec.msgpack.Decoder(Transfers)


class Offer(NamedTuple):
    """A backend that a package offers. Nothing of it is imported yet."""

    entry_point: metadata.EntryPoint
    package: str

    def load_backend(self) -> TransferBackend:
        """Import the description. Raises SetupError if that fails."""
        with _name_package(self):
            found = self.entry_point.load()
            if not (isinstance(found, type) and issubclass(found, TransferBackend)):
                raise TypeError(f"{self.entry_point.value} is no subclass of TransferBackend")
            return OutsideBackend(found(), self)


def find_outside() -> dict[str, list[Offer]]:
    """Return the offers by the backend's name, several if packages disagree.

    We look them up once for each search path of this process.
    """
    return _find_on_path(tuple(sys.path))


@lru_cache(maxsize=4)
def _find_on_path(_: tuple[str, ...]) -> dict[str, list[Offer]]:
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
            # A package with broken files must not hinder the others.
            logger.warning("the entry points of %s cannot be read: %r", package, error)
            continue
        # If a package appears twice on sys.path, Python imports the first. Different spellings of a
        # name are the same name (PEP 503).
        spelling = re.sub(r"[-_.]+", "-", package).lower()
        if spelling not in seen:
            seen.add(spelling)
            for point in points:
                found.setdefault(point.name, []).append(Offer(point, package))
    return found


class OutsideBackend(TransferBackend):
    """Backend of another package. Its errors name the package.

    A :class:`~pd.core.errors.PDError` is the backend's own message and passes unchanged, and so do
    the errors that :meth:`make` documents. Any other exception becomes a SetupError.
    """

    def __init__(self, backend: TransferBackend, offer: Offer) -> None:
        self._backend, self._offer = backend, offer
        self.one_device = backend.one_device

    def obstacle(self, device: str) -> str | None:
        with _name_package(self._offer):
            return self._backend.obstacle(device)

    def manager_class(self) -> Callable[..., TransferManager]:
        with _name_package(self._offer):
            return self._backend.manager_class()

    def make(self, setup: TransferSetup) -> TransferManager:
        with _name_package(self._offer, ImportError, OSError):
            manager = self._backend.make(setup)
        with _name_package(self._offer):
            if not isinstance(manager, TransferManager):
                raise TypeError(f"{type(manager).__name__} is no TransferManager")
            try:
                _check_manager(manager, self._offer.entry_point.name)
            except Exception:
                # The first error explains the problem with the manager.
                with contextlib.suppress(Exception):
                    manager.close()
                raise
        return manager


def _check_manager(manager: TransferManager, name: str) -> None:
    """Raise unless a manager has everything a node needs to start."""
    if manager.name != name:
        raise ValueError(f"its manager's name is {manager.name!r}, not {name!r}")
    patience = getattr(manager, "patience", None)
    if not isinstance(patience, Patience):
        raise TypeError(
            f"its manager's patience is {patience!r}, not the Patience that it is given"
        )
    try:
        addresses = _addresses.decode(msgspec.msgpack.encode(manager.addresses()))
    except msgspec.ValidationError as error:
        raise TypeError(f"peers could not read its manager's addresses: {error}") from error
    if name not in addresses:
        raise ValueError(f"its manager's addresses have none for {name!r}")
    if not hasattr(manager, "shape"):
        raise TypeError("its manager has no shape: call TransferManager.__init__")


@contextlib.contextmanager
def _name_package(offer: Offer, *passed: type[Exception]) -> Iterator[None]:
    """Name the package in errors, except in those that ``passed`` lists."""
    unchanged: tuple[type[Exception], ...] = (PDError, *passed)
    try:
        yield
    except unchanged:
        raise
    except (Exception, SystemExit) as error:
        # A package's code may raise anything, and a module may even end the process.
        raise SetupError(
            f"transfer backend {offer.entry_point.name} of package {offer.package} is broken: "
            f"{type(error).__name__}: {error}"
        ) from error
