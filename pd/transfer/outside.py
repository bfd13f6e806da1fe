"""Transfer backends of other packages, found by their entry points.

A package offers one as ``NAME = "module:Class"`` in the group ``pd.transfer``, where the class is a
:class:`~pd.transfer.backend.TransferBackend` (docs/extending.md). Nothing of a package is imported
before its backend is chosen, so that a broken one hinders nobody who does not use it.
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
from pd.core.starvation import Patience
from pd.transfer.backend import TransferBackend
from pd.transfer.base import TransferManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd.transfer.backend import TransferSetup

logger = logging.getLogger(__name__)

GROUP = "pd.transfer"
# What peers accept as the addresses of a node.
_addresses = msgspec.msgpack.Decoder(Transfers)


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
    """Offers by the backend's name; more than one where packages disagree. Looked up once for each
    search path of this process."""
    return _found_on(tuple(sys.path))


@lru_cache(maxsize=4)
def _found_on(_: tuple[str, ...]) -> dict[str, list[Offer]]:
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
        # A package that stands twice on sys.path is imported from the first place. Its name may be
        # spelled in several ways, which are one (PEP 503).
        spelling = re.sub(r"[-_.]+", "-", package).lower()
        if spelling not in seen:
            seen.add(spelling)
            for point in points:
                found.setdefault(point.name, []).append(Offer(point, package))
    return found


class OutsideBackend(TransferBackend):
    """Backend of another package, whose errors name it.

    A :class:`~pd.core.errors.PDError` is the backend's own message and passes unchanged, as do the
    errors that :meth:`make` names. Anything else that its code raises becomes a SetupError.
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
        with _named(self._offer, ImportError, OSError):
            manager = self._backend.make(setup)
        with _named(self._offer):
            if not isinstance(manager, TransferManager):
                raise TypeError(f"{type(manager).__name__} is no TransferManager")
            try:
                _check(manager, self._offer.entry_point.name)
            except Exception:
                # The first error says what is wrong with the manager.
                with contextlib.suppress(Exception):
                    manager.close()
                raise
        return manager


def _check(manager: TransferManager, name: str) -> None:
    """Raise unless a manager has all that a node needs of it to start."""
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


@contextlib.contextmanager
def _named(offer: Offer, *passed: type[Exception]) -> Iterator[None]:
    """Name the package in errors other than those that pass unchanged."""
    unchanged: tuple[type[Exception], ...] = (PDError, *passed)
    try:
        yield
    except unchanged:
        raise
    except (Exception, SystemExit) as error:
        # Code of a package may raise anything, and a module may even end the process.
        raise SetupError(
            f"transfer backend {offer.entry_point.name} of package {offer.package} is broken: "
            f"{type(error).__name__}: {error}"
        ) from error
